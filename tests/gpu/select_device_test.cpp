// Select alone, on every kind of data that made another selection wrong, against the reference.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include <stepgraph/kernels/reference/select.h>
#include <stepgraph/kernels/select.h>

#include "device_step.h"

namespace stepgraph::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

class SelectOnDevice : public GpuTest {};

using Distribution = std::function<float(Random&, int)>;

struct Named {
    const char* name;
    Distribution draw;
};

float normal(Random& random) {
    return std::normal_distribution<float>()(random);
}
float uniform(Random& random) {
    return std::uniform_real_distribution<float>()(random);
}

std::vector<Named> distributions() {
    return {
        {"normal", [](Random& r, int) { return normal(r); }},
        {"zeros under a plateau", [](Random& r, int) { return std::max(0.0F, normal(r)); }},
        {"packed into [100, 101]", [](Random& r, int) { return 100.0F + uniform(r); }},
        {"heavy tail", [](Random& r, int) { return std::pow(uniform(r) + 1e-7F, -3.0F) * (r() % 2 == 0 ? 1.0F : -1.0F); }},
        {"all equal", [](Random&, int) { return 3.25F; }},
        {"all infinite", [](Random&, int) { return infinity; }},
        {"all minus infinite", [](Random&, int) { return -infinity; }},
        {"all NaN", [](Random&, int) { return std::nanf(""); }},
        {"half NaN", [](Random& r, int j) { return j % 2 == 0 ? std::nanf("") : normal(r); }},
        {"one NaN", [](Random& r, int j) { return j == 17 ? -std::nanf("") : normal(r); }},
        {"both zeros", [](Random&, int j) { return j % 3 == 0 ? -0.0F : 0.0F; }},
        {"100 winners and zeros", [](Random&, int j) { return j % 83 == 5 && j / 83 < 100 ? 1.0F : 0.0F; }},
        {"denormals", [](Random& r, int) { return std::ldexp(uniform(r), -140); }},
        {"below -65504", [](Random& r, int) { return -1e6F - 1e6F * uniform(r); }},
        {"BF16 rounded", [](Random& r, int) { return round_to_bf16(normal(r)); }},
        {"ascending", [](Random&, int j) { return static_cast<float>(j); }},
        {"descending", [](Random&, int j) { return -static_cast<float>(j); }}};
}

struct Selection {
    std::vector<int32_t> indices, counts;
    std::vector<int64_t> slots;
    std::vector<float> logits;
};

/// Rows of one tile that begins at `tile_begin` of a larger batch.
Selection select_on_device(const std::vector<float>& logits, int64_t stride, const std::vector<int32_t>& ends, int top_k,
                           int tile_begin, bool winner_logits) {
    const auto rows = ends.size();
    const auto before = static_cast<size_t>(tile_begin);
    std::vector<int32_t> all_ends(before + rows, 0);
    std::copy(ends.begin(), ends.end(), all_ends.begin() + tile_begin);
    std::vector<int32_t> requests(before + rows, 0);
    std::vector<int32_t> table(static_cast<size_t>(stride / 64 + 1));
    for (size_t i = 0; i < table.size(); ++i) {
        table[i] = i % 5 == 4 ? -1 : static_cast<int32_t>(i * 7 % 1000);
    }
    const auto k = static_cast<size_t>(top_k);
    DeviceMemory device_logits(logits.size() * 4, 4, true);
    DeviceMemory device_ends(all_ends.size() * 4, 4, true);
    DeviceMemory device_requests(requests.size() * 4, 4, true);
    DeviceMemory device_table(table.size() * 4, 4, true);
    DeviceMemory indices((before + rows) * k * 4, 4, true);
    DeviceMemory counts((before + rows) * 4, 4, true);
    DeviceMemory slots((before + rows) * k * 8, 8, true);
    DeviceMemory winners((before + rows) * k * 4, 4, true);
    device_logits.upload(logits);
    device_ends.upload(all_ends);
    device_requests.upload(requests);
    device_table.upload(table);
    for (DeviceMemory* memory : {&indices, &counts, &slots, &winners}) {
        memory->fill(poison_byte);
    }
    select({.tile_begin = tile_begin,
            .tile_rows = static_cast<int>(rows),
            .top_k = top_k,
            .ends = device_ends.as<int32_t>(),
            .logits = device_logits.as<float>(),
            .logits_stride = stride,
            .row_request = device_requests.as<int32_t>(),
            .block_table = device_table.as<int32_t>(),
            .block_table_stride = static_cast<int64_t>(table.size()),
            .pages = 900,
            .indices = indices.as<int32_t>(),
            .counts = counts.as<int32_t>(),
            .physical_slots = slots.as<int64_t>(),
            .winner_logits = winner_logits ? winners.as<float>() : nullptr,
            .padded_logits = nullptr,
            .width = stride,
            .last_of_layer = false},
           {cudaStreamPerThread, true});
    Selection selection{indices.download<int32_t>(), counts.download<int32_t>(), slots.download<int64_t>(),
                        winners.download<float>()};
    selection.indices.erase(selection.indices.begin(), selection.indices.begin() + static_cast<int64_t>(before * k));
    selection.counts.erase(selection.counts.begin(), selection.counts.begin() + tile_begin);
    selection.slots.erase(selection.slots.begin(), selection.slots.begin() + static_cast<int64_t>(before * k));
    selection.logits.erase(selection.logits.begin(), selection.logits.begin() + static_cast<int64_t>(before * k));

    Selection expected{std::vector<int32_t>(rows * k), std::vector<int32_t>(rows), std::vector<int64_t>(rows * k),
                       std::vector<float>(rows * k)};
    reference::select({.rows = static_cast<int>(rows),
                       .top_k = top_k,
                       .ends = ends.data(),
                       .logits = logits.data(),
                       .logits_stride = stride,
                       .row_request = requests.data(),
                       .block_table = table.data(),
                       .block_table_stride = 0,
                       .pages = 900,
                       .indices = expected.indices.data(),
                       .counts = expected.counts.data(),
                       .physical_slots = expected.slots.data(),
                       .winner_logits = winner_logits ? expected.logits.data() : nullptr});
    expect_same_bits(selection.indices.data(), expected.indices.data(), rows * k, "indices");
    expect_same_bits(selection.counts.data(), expected.counts.data(), rows, "counts");
    expect_same_bits(selection.slots.data(), expected.slots.data(), rows * k, "physical slots");
    if (winner_logits) {
        expect_same_bits(selection.logits.data(), expected.logits.data(), rows * k, "winner logits");
    }
    return selection;
}

std::vector<float> draw_rows(const Named& distribution, size_t rows, int64_t stride, Random& random) {
    std::vector<float> logits(rows * static_cast<size_t>(stride));
    for (size_t i = 0; i < logits.size(); ++i) {
        logits[i] = distribution.draw(random, static_cast<int>(i % static_cast<size_t>(stride)));
    }
    return logits;
}

TEST_F(SelectOnDevice, IsExactOnEveryDistributionAndLength) {
    Random random = fresh_random();
    for (const Named& distribution : distributions()) {
        for (const int top_k : {1, 64, 512, 2048, 2051, 4096}) {
            SCOPED_TRACE(std::string(distribution.name) + ", K " + std::to_string(top_k));
            const std::vector<int32_t> ends = {0, 1, 63, 64, 65, top_k - 1, top_k, top_k + 1, 8320, 8319, 4097, 5000};
            const int64_t stride = 8321;  // rows that begin at any multiple of four bytes
            select_on_device(draw_rows(distribution, ends.size(), stride, random), stride, ends, top_k, 3, true);
        }
    }
}

TEST_F(SelectOnDevice, ReadsNoLogitOfARowWithinK) {
    // The rows have no memory behind their logits pointer's guard: reading one would fault.
    const std::vector<int32_t> ends = {100, 64, 0};
    std::vector<float> none(1, 0.0F);
    const Selection selection = [&] {
        DeviceMemory device_ends(12, 4, true);
        DeviceMemory indices(3 * 128 * 4, 4, true);
        device_ends.upload(ends);
        select({.tile_begin = 0,
                .tile_rows = 3,
                .top_k = 128,
                .ends = device_ends.as<int32_t>(),
                .logits = nullptr,
                .logits_stride = 1 << 20,
                .row_request = nullptr,
                .block_table = nullptr,
                .block_table_stride = 0,
                .pages = 1,
                .indices = indices.as<int32_t>(),
                .counts = nullptr,
                .physical_slots = nullptr,
                .winner_logits = nullptr,
                .padded_logits = nullptr,
                .width = 1 << 20,
                .last_of_layer = true},
               {cudaStreamPerThread, true});
        return Selection{indices.download<int32_t>(), {}, {}, {}};
    }();
    for (int row = 0; row < 3; ++row) {
        for (int i = 0; i < 128; ++i) {
            ASSERT_EQ(selection.indices[static_cast<size_t>(row * 128 + i)], i < ends[static_cast<size_t>(row)] ? i : -1);
        }
    }
}

TEST_F(SelectOnDevice, GivesARowTheSameBitsAloneAmongOthersAndInAnotherTile) {
    Random random = fresh_random();
    const int64_t stride = 20000;
    for (const size_t which : {size_t{0}, size_t{1}, size_t{4}}) {
        const Named distribution = distributions()[which];
        SCOPED_TRACE(distribution.name);
        const std::vector<float> alone = draw_rows(distribution, 1, stride, random);
        const Selection first = select_on_device(alone, stride, {19999}, 2048, 0, false);
        std::vector<float> many = draw_rows(distribution, 128, stride, random);
        std::copy(alone.begin(), alone.end(), many.begin() + 77 * stride);
        std::vector<int32_t> ends(128, 12345);
        ends[77] = 19999;
        for (const int tile_begin : {0, 32}) {
            const Selection batch = select_on_device(many, stride, ends, 2048, tile_begin, false);
            EXPECT_TRUE(std::equal(first.indices.begin(), first.indices.end(), batch.indices.begin() + 77 * 2048));
        }
        for (int i = 0; i < 100; ++i) {
            ASSERT_EQ(select_on_device(alone, stride, {19999}, 2048, 0, false).indices, first.indices);
        }
    }
}

TEST_F(SelectOnDevice, TakesRowsOfAMillionKeysAndOffsetsBeyondTwoToThe31Elements) {
    Random random = fresh_random();
    select_on_device(draw_rows(distributions()[1], 2, 1 << 20, random), 1 << 20, {1 << 20, (1 << 20) - 3}, 2048, 0, true);

    // 2^31 elements and more before the last row: its logits are written there and nowhere else.
    const int64_t stride = int64_t{1} << 30U;
    const std::vector<float> row = draw_rows(distributions()[0], 1, 5000, random);
    DeviceMemory logits((static_cast<size_t>(stride) * 3 + 5000) * 4, 4, false);
    check_cuda(cudaMemcpy(logits.as<float>() + 3 * stride, row.data(), 5000 * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
    const std::vector<int32_t> ends = {0, 0, 0, 5000};
    DeviceMemory device_ends(16, 4, true);
    DeviceMemory indices(4 * 64 * 4, 4, true);
    device_ends.upload(ends);
    select({.tile_begin = 0,
            .tile_rows = 4,
            .top_k = 64,
            .ends = device_ends.as<int32_t>(),
            .logits = logits.as<float>(),
            .logits_stride = stride,
            .row_request = nullptr,
            .block_table = nullptr,
            .block_table_stride = 0,
            .pages = 1,
            .indices = indices.as<int32_t>(),
            .counts = nullptr,
            .physical_slots = nullptr,
            .winner_logits = nullptr,
            .padded_logits = nullptr,
            .width = stride,
            .last_of_layer = true},
           {cudaStreamPerThread, true});
    const auto actual = indices.download<int32_t>();
    const Selection alone = select_on_device(row, 5000, {5000}, 64, 0, false);
    EXPECT_TRUE(std::equal(alone.indices.begin(), alone.indices.end(), actual.begin() + 3 * 64));
}

}  // namespace
}  // namespace stepgraph::test
