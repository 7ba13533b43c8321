// Caches beyond 2 and 4 GiB: a page far out gives the bits that the same page gives near by.
#include <algorithm>

#include <cuda_runtime_api.h>

#include "device_step.h"

namespace stepgraph::test {
namespace {

class FarPages : public GpuTest {};

struct Far {
    CacheFormat format;
    int64_t page_stride_bytes;
    int64_t pages;
    std::vector<int32_t> interesting;
};

/// Runs a step of one request whose four pages lie at `far_pages` of a huge cache and compares it with the same step of a
/// small cache.
void compare_far_with_near(const Far& far, const uint8_t* huge, const std::vector<int32_t>& far_pages, Random& random) {
    StepCase step = make_case({.format = far.format,
                               .max_rows = 2,
                               .max_requests = 1,
                               .columns = 4,
                               .extra_stride_bytes = far.page_stride_bytes - page_bytes(far.format)},
                              random);
    step.set_lengths(255, 2);
    StepCase there = step;
    there.geometry.pages = far.pages;
    for (size_t column = 0; column < 4; ++column) {
        there.block_table[column] = far_pages[column];
        const int64_t near_page = step.block_table[column];
        check_cuda(cudaMemcpy(const_cast<uint8_t*>(huge) + far_pages[column] * far.page_stride_bytes,
                              step.layers[0].cache.data() + near_page * far.page_stride_bytes,
                              static_cast<size_t>(far.page_stride_bytes), cudaMemcpyHostToDevice),
                   "cudaMemcpy");
    }
    DeviceStep near_step(step, {}, {.physical_slots = false});
    near_step.run_eager(2);
    near_step.expect_equal(step, expected_step(step, 2, true), 2);

    DeviceStep far_step(there, {}, {.physical_slots = false});  // its own cache is small: bind again with the huge one
    const auto& memory = far_step.layers()[0];
    LayerBuffers layer{.iq = memory.iq.as<__nv_bfloat16>(),
                       .projected = memory.projected.as<__nv_bfloat16>(),
                       .k_norm_weight = memory.k_norm_weight.as<float>(),
                       .k_norm_bias = memory.k_norm_bias.as<float>(),
                       .cache = const_cast<uint8_t*>(huge),
                       .indices = memory.out.indices.as<int32_t>(),
                       .counts = memory.out.counts.as<int32_t>(),
                       .winner_logits = memory.out.winner_logits.as<float>(),
                       .logits = memory.out.logits.as<float>()};
    far_step.rebind(layer);
    far_step.run_eager(2);
    const auto near_bytes = near_step.snapshot();
    const auto far_bytes = far_step.snapshot();
    for (size_t output = 0; output + 1 < near_bytes.size(); ++output) {  // all but the cache
        EXPECT_EQ(near_bytes[output], far_bytes[output]) << "output " << output;
    }
    for (size_t column = 0; column < 4; ++column) {
        std::vector<uint8_t> page(static_cast<size_t>(far.page_stride_bytes));
        check_cuda(
            cudaMemcpy(page.data(), huge + far_pages[column] * far.page_stride_bytes, page.size(), cudaMemcpyDeviceToHost),
            "cudaMemcpy");
        EXPECT_TRUE(std::equal(page.begin(), page.end(),
                               step.layers[0].cache.begin() + step.block_table[column] * far.page_stride_bytes))
            << "page " << far_pages[column];
    }
}

TEST_F(FarPages, GiveTheBitsOfNearOnes) {
    Random random = fresh_random();
    const std::vector<Far> all = {
        {CacheFormat::fp8, 8448, 520000, {254199, 254200, 254201, 508400, 508401, 508402, 519999, 0}},
        {CacheFormat::mxfp4, 4352, 990000, {493446, 493447, 493448, 493449, 986895, 986896, 989999, 1}},
        {CacheFormat::mxfp4_rowgroup, 4352, 990000, {493447, 493448, 986895, 986896}},
        {CacheFormat::fp8_mx, 1002240, 4300, {2142, 2143, 2144, 4285, 4286, 4299, 1, 0}}};
    for (const Far& far : all) {
        DeviceMemory huge(static_cast<size_t>(far.pages * far.page_stride_bytes), 256, false);
        for (size_t first = 0; first + 4 <= far.interesting.size(); first += 4) {
            SCOPED_TRACE("stride " + std::to_string(far.page_stride_bytes) + ", pages from " +
                         std::to_string(far.interesting[first]));
            const auto begin = far.interesting.begin() + static_cast<int64_t>(first);
            compare_far_with_near(far, huge.as<uint8_t>(), {begin, begin + 4}, random);
            // The last key lies on the fourth page: turn the four, so that each is once written to.
            std::vector<int32_t> turned(begin, begin + 4);
            for (int turn = 1; turn < 4; ++turn) {
                std::rotate(turned.begin(), turned.begin() + 1, turned.end());
                compare_far_with_near(far, huge.as<uint8_t>(), turned, random);
            }
        }
    }
}

}  // namespace
}  // namespace stepgraph::test
