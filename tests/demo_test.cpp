// The demonstration: its batch keeps its books, its checks catch what is wrong, and its steps are right on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include <stepgraph/kernels/reference/index_inputs.h>
#include <stepgraph/tools/demo_command.h>
#include <stepgraph/tools/serving_batch.h>
#include <stepgraph/tools/step_checks.h>
#include <stepgraph/tools/trace_slice.h>

namespace stepgraph::test {
namespace {

using namespace tools;

Geometry small_geometry(CacheFormat format = CacheFormat::fp8) {
    return validate({.heads = 16,
                     .top_k = 4,
                     .max_rows = 12,
                     .max_requests = 8,
                     .max_model_len = 2048,
                     .block_table_columns = 32,
                     .cache_format = format,
                     .pages = 100});
}

TEST(ConversationTrace, HoldsTheRequestsOfItsFile) {
    const auto trace = conversation_trace();
    ASSERT_EQ(trace.size(), 96U);
    EXPECT_EQ(trace[0].prompt_tokens, 6758);
    EXPECT_EQ(trace[0].generated_tokens, 500);
    EXPECT_TRUE(std::is_sorted(trace.begin(), trace.end(),
                               [](const auto& a, const auto& b) { return a.arrival_ms < b.arrival_ms; }));
}

TEST(ServingBatch, KeepsItsPagesApartAndGivesThemBack) {
    const Geometry g = small_geometry();
    ServingBatch batch(g, conversation_trace(), {.shrink = 16, .draft_every = 5, .pause_every = 7}, std::random_device{}());
    bool verified = false;
    int most_live = 0;
    size_t arrived = 0;
    for (int step = 0; step < 2000; ++step) {
        arrived += batch.begin_step(step).size();
        ASSERT_GE(batch.live(), 1);
        ASSERT_LE(batch.rows(), g.max_rows);
        std::set<int32_t> pages;
        size_t used = 0;
        for (int q = 0; q < batch.live(); ++q) {
            const auto i = static_cast<size_t>(q);
            ASSERT_GE(batch.query_lens[i], 1);
            ASSERT_LE(batch.seq_lens[i], g.max_model_len);
            verified = verified || batch.query_lens[i] > 1;
            for (int column = 0; column * page_tokens < batch.seq_lens[i]; ++column) {
                const int32_t page = batch.block_table[static_cast<size_t>(q * g.block_table_stride + column)];
                ASSERT_GE(page, 0);
                ASSERT_LT(page, g.pages);
                pages.insert(page);
                ++used;
            }
        }
        ASSERT_EQ(pages.size(), used) << "two requests share a page at step " << step;
        most_live = std::max(most_live, batch.live());
        if (step % 7 == 6) {  // only half of them, or one more
            ASSERT_LE(batch.live(), (g.max_requests + 1) / 2);
        }
        batch.end_step();
    }
    EXPECT_TRUE(verified);
    EXPECT_GT(most_live, (g.max_requests + 1) / 2);
    EXPECT_GT(arrived, conversation_trace().size());  // only if pages come back
}

TEST(StepChecks, CatchAWrongSelection) {
    Geometry g = small_geometry();
    g.block_table_columns = 1;
    std::vector<float> logits(64, 0.0F);
    logits[9] = 2.0F;
    logits[40] = 3.0F;
    logits[41] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<int32_t> right = {0, 1, 9, 40};
    EXPECT_EQ(check_selection(g, {50}, logits, right), "");
    EXPECT_EQ(check_selection(g, {3}, logits, {0, 1, 2, -1}), "");
    EXPECT_EQ(check_selection(g, {0}, logits, {-1, -1, -1, -1}), "");
    for (const auto& wrong : std::vector<std::vector<int32_t>>{{0, 2, 9, 40}, {1, 0, 9, 40}, {0, 1, 9, 41}, {0, 1, 9, -1}}) {
        EXPECT_NE(check_selection(g, {50}, logits, wrong), "");
    }
}

TEST(StepChecks, CatchAKeyThatIsNotTheNearestCode) {
    std::mt19937_64 random{std::random_device{}()};
    std::normal_distribution<float> normal;
    for (const CacheFormat format :
         {CacheFormat::fp8, CacheFormat::fp8_mx, CacheFormat::mxfp4, CacheFormat::mxfp4_rowgroup}) {
        const Geometry g = small_geometry(format);
        std::vector<uint8_t> cache(static_cast<size_t>(g.pages * g.page_stride_bytes), 0);
        std::vector<float> key(head_dim);
        for (auto& x : key) {
            x = round_to_bf16(normal(random));
        }
        const int64_t slot = 5 * page_tokens + 17;
        uint8_t* page = page_address(cache.data(), 5, g.page_stride_bytes);
        reference::store_key(format, key.data(), page, 17);
        const std::vector<double> exact(key.begin(), key.end());
        EXPECT_EQ(check_key(g, cache, slot, exact), "");
        EXPECT_NE(check_key(g, cache, slot + 1, exact), "");
        const auto largest =
            std::max_element(key.begin(), key.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
        uint8_t& code = page[payload_offset(format, 17, static_cast<int>(largest - key.begin()))];
        code = static_cast<uint8_t>(code ^ (is_mxfp4(format) ? 0x22U : 0x04U));
        EXPECT_NE(check_key(g, cache, slot, exact), "");
    }
}

TEST(StepChecks, CatchALogitOutsideItsTolerance) {
    Geometry g = small_geometry();
    g.block_table_columns = 1;
    std::vector<float> expected(64, 1.0F);
    expected[3] = -100.0F;
    std::vector<float> actual = expected;
    actual[5] += 0.19F;
    EXPECT_EQ(check_logits(g, {64}, expected, actual, 2e-3), "");
    actual[5] += 0.02F;
    EXPECT_NE(check_logits(g, {64}, expected, actual, 2e-3), "");
    EXPECT_EQ(check_logits(g, {5}, expected, actual, 2e-3), "");
    actual[4] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_NE(check_logits(g, {5}, expected, actual, 2e-3), "");
}

TEST(Demo, IsRightOnTheHostInEveryFormat) {
    for (const CacheFormat format :
         {CacheFormat::fp8, CacheFormat::fp8_mx, CacheFormat::mxfp4, CacheFormat::mxfp4_rowgroup}) {
        EXPECT_EQ(demo({.device = Device::cpu, .format = format, .steps = 8, .layers = 2, .requests = 4}), 0);
    }
}

}  // namespace
}  // namespace stepgraph::test
