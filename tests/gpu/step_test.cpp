// Whole steps against the reference: every format and shape, eager, with guarded buffers.
#include <algorithm>
#include <limits>
#include <numeric>

#include <stepgraph/tools/step_checks.h>

#include "device_step.h"

namespace stepgraph::test {
namespace {

constexpr CacheFormat all_formats[] = {CacheFormat::fp8, CacheFormat::fp8_mx, CacheFormat::mxfp4,
                                       CacheFormat::mxfp4_rowgroup};

class WholeStep : public GpuTest {};

void run_and_compare(StepCase& step, const Options& options = {}, const Wanted& wanted = {}) {
    DeviceStep device(step, options, wanted, true);
    device.run_eager(step.geometry.max_rows);
    device.expect_equal(step, expected_step(step, step.geometry.max_rows, wanted.all_logits()), step.geometry.max_rows);
}

TEST_F(WholeStep, IsTheReferencesInEveryFormatAndHeadCount) {
    Random random = fresh_random();
    for (const CacheFormat format : all_formats) {
        for (const int heads : {16, 32, 64}) {
            SCOPED_TRACE(std::to_string(static_cast<int>(format)) + ", heads " + std::to_string(heads));
            StepCase step = make_case({.format = format, .heads = heads, .layers = 2}, random);
            run_and_compare(step);
        }
    }
}

TEST_F(WholeStep, LeavesTheNeighboursOfAMergedPageAlone) {
    Random random = fresh_random();
    for (const CacheFormat format : all_formats) {
        for (const int64_t extra : {int64_t{4}, int64_t{1024}, int64_t{1002240 - 8448}}) {
            StepCase step =
                make_case({.format = format, .max_requests = 2, .columns = 3, .extra_stride_bytes = extra}, random);
            run_and_compare(step);
        }
    }
}

TEST_F(WholeStep, TakesOneToSixteenVerifyRowsMixed) {
    Random random = fresh_random();
    StepCase step = make_case({.max_rows = 160, .max_requests = 20, .columns = 4}, random);
    for (size_t q = 0; q < 20; ++q) {
        step.query_lens[q] = static_cast<int32_t>(q % 16 + 1);
        step.seq_lens[q] = std::max(step.query_lens[q], static_cast<int32_t>(1 + random() % 256));
    }
    step.set_table();
    for (const int tile_rows : {0, 1, 7, 160}) {
        StepCase again = step;
        run_and_compare(again, {.tile_rows = tile_rows});
    }
}

/// Lengths and ragged rows round the number of keys up to which Hopper's scorer multiplies exactly.
StepCase make_long_case(CacheFormat format, int heads, int max_rows, Random& random) {
    StepCase step =
        make_case({.format = format, .heads = heads, .max_rows = max_rows, .max_requests = 6, .columns = 40}, random);
    step.seq_lens = {1030, 1024, 1025, 2560, 1500 + static_cast<int32_t>(random() % 900), 700};
    step.query_lens = {19, 1, 2, 7, static_cast<int32_t>(1 + random() % 9), 3};
    step.set_table();
    return step;
}

TEST_F(WholeStep, IsTheReferencesForLongRows) {
    Random random = fresh_random();
    for (const CacheFormat format : {CacheFormat::fp8, CacheFormat::fp8_mx}) {
        for (const int heads : {16, 32, 64}) {
            SCOPED_TRACE(std::to_string(static_cast<int>(format)) + ", heads " + std::to_string(heads));
            StepCase step = make_long_case(format, heads, 36, random);
            run_and_compare(step);
        }
    }
}

TEST_F(WholeStep, GivesTheSameBitsInEveryTile) {
    Random random = fresh_random();
    for (const CacheFormat format : all_formats) {
        for (const int heads : {16, 32, 64}) {
            SCOPED_TRACE(std::to_string(static_cast<int>(format)) + ", heads " + std::to_string(heads));
            const StepCase step = make_long_case(format, heads, 40, random);
            std::vector<std::vector<uint8_t>> first;
            for (const int tile_rows : {0, 1, 2, 3, 7, 40}) {
                DeviceStep device(step, {.tile_rows = tile_rows});
                device.run_eager(40);
                first = first.empty() ? device.snapshot() : first;
                EXPECT_EQ(device.snapshot(), first) << "tile of " << tile_rows;
            }
        }
    }
}

// Without the logits as an output, tiles take as many rows as the step's lengths allow.
TEST_F(WholeStep, GivesTheSameBitsHoweverManyRowsATileTakes) {
    Random random = fresh_random();
    constexpr int rows = 70;
    for (const CacheFormat format : {CacheFormat::fp8, CacheFormat::mxfp4}) {
        StepCase step = make_case({.format = format, .max_rows = rows, .max_requests = 40, .columns = 40}, random);
        for (const int32_t longest : {64, 300, 900, 1280, 2560}) {
            for (size_t q = 0; q < 40; ++q) {
                step.query_lens[q] = static_cast<int32_t>(random() % 4);
                step.seq_lens[q] =
                    std::max(step.query_lens[q], static_cast<int32_t>(random() % static_cast<uint64_t>(longest)));
            }
            step.seq_lens[random() % 40] = longest;
            step.set_table();
            std::vector<std::vector<uint8_t>> one_tile;
            for (const int tile_rows : {rows, 0, 1, 7, 40}) {
                DeviceStep device(step, {.tile_rows = tile_rows}, {.logits = false}, true);
                device.run_eager(rows);
                one_tile = one_tile.empty() ? device.snapshot() : one_tile;
                EXPECT_EQ(device.snapshot(), one_tile) << "tiles of at least " << tile_rows << ", longest " << longest;
            }
            StepCase again = step;
            run_and_compare(again, {.tile_rows = 7}, {.logits = false, .winner_logits = false});
        }
    }
}

// One graph: the lengths of each replay say how its rows are cut.
TEST_F(WholeStep, CutsEachReplayByItsOwnLengths) {
    Random random = fresh_random();
    StepCase step = make_case({.max_rows = 24, .max_requests = 24, .columns = 40}, random);
    step.set_lengths(2560, 1);
    const Wanted wanted{.logits = false};
    DeviceStep device(step, {.tile_rows = 3}, wanted);
    device.pipeline().capture({24});
    for (const int32_t length : {2560, 65, 320, 2500, 1, 640}) {
        step.set_lengths(length, 1);
        step.set_table();
        DeviceStep one_tile(step, {.tile_rows = 24}, wanted);
        one_tile.run_eager(24);
        device.upload_inputs(step);
        device.upload_caches(step);
        device.poison_outputs();
        device.replay(24);
        EXPECT_EQ(device.snapshot(), one_tile.snapshot()) << "length " << length;
    }
}

TEST_F(WholeStep, GivesARowTheSameBitsWhateverElseIsInTheBatch) {
    Random random = fresh_random();
    for (const int heads : {16, 32, 64}) {
        SCOPED_TRACE(heads);
        StepCase step = make_long_case(CacheFormat::fp8, heads, 40, random);
        DeviceStep among_others(step);
        among_others.run_eager(40);
        step.num_requests = {1};
        DeviceStep alone(step);
        alone.run_eager(40);
        const size_t logits = 19 * static_cast<size_t>(step.geometry.width());  // of the first request's rows
        expect_same_bits(alone.layers()[0].out.logits.download<float>().data(),
                         among_others.layers()[0].out.logits.download<float>().data(), logits, "logits");
    }
}

TEST_F(WholeStep, LeavesOutWhatNobodyWants) {
    Random random = fresh_random();
    for (const int top_k : {1, 63, 64, 65, 300, 2048}) {
        StepCase step = make_case({.top_k = top_k, .columns = 40}, random);
        run_and_compare(step, {}, {.logits = false, .winner_logits = false});
        run_and_compare(step, {}, {.logits = false, .winner_logits = false, .physical_slots = false, .counts = false});
        run_and_compare(step, {}, {.logits = false, .winner_logits = true});
    }
}

TEST_F(WholeStep, SeesLengthsAtEveryBoundary) {
    Random random = fresh_random();
    const std::vector<int32_t> lengths = {0, 1, 2, 62, 63, 64, 65, 127, 128, 129, 299, 300, 301, 319, 320};
    StepCase step = make_case({.top_k = 300, .max_rows = 40, .max_requests = 15, .columns = 5}, random);
    for (const int32_t rows : {0, 1, 2}) {
        for (size_t q = 0; q < lengths.size(); ++q) {
            step.seq_lens[q] = lengths[q];
            step.query_lens[q] = rows;
        }
        step.set_table();
        StepCase again = step;
        run_and_compare(again);
        run_and_compare(again, {}, {.logits = false, .winner_logits = false});
    }
}

TEST_F(WholeStep, ServesOneRequestOfFewKeysAtTheEndOfMemory) {
    Random random = fresh_random();
    for (const int32_t length : {1, 2, 63, 64}) {
        StepCase step = make_case({.top_k = 16, .max_rows = 1, .max_requests = 1, .columns = 1}, random);
        step.set_lengths(length, 1);
        run_and_compare(step);
    }
}

TEST_F(WholeStep, TreatsPaddedRequestsAsAbsent) {
    Random random = fresh_random();
    StepCase step = make_case({.max_rows = 8, .max_requests = 6}, random);
    for (const int32_t live : {0, 1, 3, 6, 7, -1, std::numeric_limits<int32_t>::max()}) {
        SCOPED_TRACE(live);
        step.num_requests = {live};
        StepCase again = step;
        // Behind the live requests: lengths that would be wrong in every way, and a table that points nowhere.
        for (int q = std::clamp(live, 0, 6); q < 6; ++q) {
            again.seq_lens[static_cast<size_t>(q)] = q % 2 == 0 ? std::numeric_limits<int32_t>::max() : -5;
            again.query_lens[static_cast<size_t>(q)] = q % 2 == 0 ? 2 : std::numeric_limits<int32_t>::min();
        }
        run_and_compare(again);
    }
    // Padded requests of length 0 with two verify rows: bounds of -1 and 0.
    step.num_requests = {};
    step.set_lengths(0, 2);
    run_and_compare(step);
    step.set_lengths(0, 0);
    run_and_compare(step);
}

TEST_F(WholeStep, DerivesSlotsOrTakesThem) {
    Random random = fresh_random();
    StepCase step = make_case({.max_rows = 9, .max_requests = 9}, random);
    step.set_lengths(130, 1);
    run_and_compare(step);
    // Distinct ones, padding, and at, past and far past the end of the cache.
    const int64_t end = step.geometry.pages * page_tokens;
    step.slots = {5, 0, -1, end - 1, end, end + 1, int64_t{1} << 40U, std::numeric_limits<int64_t>::min(), 64};
    run_and_compare(step);
}

TEST_F(WholeStep, SkipsAndCountsWrongData) {
    Random random = fresh_random();
    StepCase step = make_case({.max_rows = 12, .max_requests = 6}, random);
    step.set_lengths(500, 2);
    const auto stride = static_cast<size_t>(step.geometry.block_table_stride);
    step.block_table[0 * stride + 1] = -1;                                            // one block unknown
    step.block_table[1 * stride + 7] = std::numeric_limits<int32_t>::max();           // where the own key goes
    step.block_table[2 * stride + 0] = static_cast<int32_t>(step.geometry.pages);     // just past the end
    std::fill_n(step.block_table.begin() + static_cast<int64_t>(3 * stride), 8, -7);  // all of one request
    step.seq_lens[4] = std::numeric_limits<int32_t>::max();                           // wider than the table
    step.query_lens[5] = 1000;                                                        // more rows than the bucket
    for (const int tile_rows : {0, 1, 5}) {
        SCOPED_TRACE(tile_rows);
        StepCase again = step;
        DeviceStep device(again, {.tile_rows = tile_rows}, {}, true);
        device.run_eager(12);
        const ExpectedStep expected = expected_step(again, 12, true);
        device.expect_equal(again, expected, 12);
        EXPECT_EQ(expected.status.invalid_blocks, 1U + 1U + 1U + 8U);
        EXPECT_EQ(expected.status.clamped_bounds, 2U);
        EXPECT_EQ(expected.status.invalid_slots, 2U + 2U + 2U);  // requests 1, 3 and 4, two rows each
        EXPECT_EQ(expected.status.dropped_rows, 10U);            // a length is cut to the bucket before the scan
        EXPECT_EQ(device.pipeline().read_status(device.stream()), expected.status);
        device.pipeline().reset_status(device.stream());
        EXPECT_EQ(device.pipeline().read_status(device.stream()), StepStatus{});
    }
}

TEST_F(WholeStep, HoldsUnderContextParallelism) {
    Random random = fresh_random();
    for (const int world : {2, 3, 8}) {
        for (const int interleave : {1, 16, 64}) {
            const ContextParallel dcp{world, static_cast<int>(random() % static_cast<uint64_t>(world)), interleave};
            StepCase step = make_case({.max_rows = 16, .max_requests = 8, .columns = 4, .dcp = dcp}, random);
            run_and_compare(step);
        }
    }
}

TEST_F(WholeStep, ServesThousandsOfRequests) {
    Random random = fresh_random();
    StepCase step = make_case({.top_k = 16, .max_rows = 3000, .max_requests = 5000, .columns = 1}, random);
    run_and_compare(step);
}

TEST_F(WholeStep, RanksTogetherSeeEveryKeyOnce) {
    Random random = fresh_random();
    constexpr int world = 4;
    std::vector<int> seen(4 * 64 * world, 0);
    for (int rank = 0; rank < world; ++rank) {
        const ContextParallel dcp{world, rank, 16};
        StepCase step = make_case({.top_k = 4096, .max_rows = 1, .max_requests = 1, .columns = 4, .dcp = dcp}, random);
        step.set_lengths(777, 1);
        DeviceStep device(step, {}, {.logits = false, .winner_logits = false});
        device.run_eager(1);
        for (const int32_t j : device.layers()[0].out.indices.download<int32_t>()) {
            if (j >= 0) {
                ++seen[static_cast<size_t>(global_position(j, dcp))];
            }
        }
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), 777);
    EXPECT_EQ(std::accumulate(seen.begin(), seen.begin() + 777, 0), 777);
}

TEST_F(WholeStep, SelectsFromScatteredPagesOfALongRequest) {
    Random random = fresh_random();
    // A table exactly as wide as needed; the reference's own logits at this size are compared in full.
    StepCase step = make_case({.top_k = 2048, .max_rows = 1, .max_requests = 1, .columns = 131072 / 64}, random);
    step.set_lengths(131072, 1);
    run_and_compare(step);
}

TEST_F(WholeStep, KeepsAPoisonedKeyToItself) {
    Random random = fresh_random();
    for (const int columns : {4, 32}) {  // of few keys and of many: Hopper's scorer multiplies them in different ways
        SCOPED_TRACE(columns);
        StepCase step = make_case({.max_rows = 2, .max_requests = 2, .columns = columns}, random);
        step.set_lengths(columns * page_tokens, 1);
        // Request 0's key 10 is NaN in every code: its logit is NaN, it never wins, and nothing else changes.
        uint8_t* page = page_address(step.layers[0].cache.data(), step.block_table[0], step.geometry.page_stride_bytes);
        std::fill_n(page + payload_offset(CacheFormat::fp8, 10, 0), 128, uint8_t{0x7F});
        DeviceStep device(step);
        device.run_eager(2);
        const ExpectedStep expected = expected_step(step, 2, true);
        const auto indices = device.layers()[0].out.indices.download<int32_t>();
        EXPECT_EQ(std::count(indices.begin(), indices.begin() + 64, 10), 0);
        const auto logits = device.layers()[0].out.logits.download<float>();
        EXPECT_TRUE(std::isnan(logits[10]));
        EXPECT_EQ(tools::check_selection(step.geometry, expected.layout.ends, logits, indices), "");
        EXPECT_EQ(tools::check_logits(step.geometry, expected.layout.ends, expected.layers[0].logits, logits, 2e-3), "");
        EXPECT_EQ(std::count_if(logits.begin(), logits.end(), [](float x) { return std::isnan(x); }), 1);
    }
}

}  // namespace
}  // namespace stepgraph::test
