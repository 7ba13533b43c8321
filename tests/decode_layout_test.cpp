// The decode layout, against loops over explicit lists of rows and positions.
#include <stepgraph/layouts/decode_layout.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "guarded_array.h"
#include "random.h"

namespace stepgraph {
namespace {

constexpr int32_t most = std::numeric_limits<int32_t>::max();
constexpr int32_t least = std::numeric_limits<int32_t>::min();

struct Step {
    int rows = 1;
    int columns = 1;
    int64_t pages = 1000;
    ContextParallel dcp{};
    std::vector<int32_t> seq_lens;
    std::vector<int32_t> query_lens;
    std::optional<int32_t> num_requests;
    std::vector<std::vector<int32_t>> table;  // one row a request

    [[nodiscard]] int requests() const { return static_cast<int>(query_lens.size()); }
    [[nodiscard]] int64_t width() const { return int64_t{64} * columns; }
};

struct Layout {
    std::vector<int32_t> starts;
    std::vector<int32_t> row_request;
    std::vector<int32_t> ends;
    std::vector<int64_t> slots;
    StepStatus status;
};

/// A table whose every entry is a page of the cache.
std::vector<std::vector<int32_t>> random_table(test::Random& random, int requests, int columns, int64_t pages) {
    std::vector<std::vector<int32_t>> table(static_cast<size_t>(requests));
    for (std::vector<int32_t>& row : table) {
        for (int column = 0; column < columns; ++column) {
            row.push_back(random.integer32(0, static_cast<int32_t>(pages) - 1));
        }
    }
    return table;
}

/// Runs the library with every output prefilled, and with the table's rows further apart than they are long.
Layout laid_out(const Step& step) {
    const int64_t stride = step.columns + 3;
    std::vector<int32_t> table(static_cast<size_t>(stride * step.requests()), -7);
    for (size_t q = 0; q < step.table.size(); ++q) {
        std::copy(step.table[q].begin(), step.table[q].end(), table.begin() + static_cast<int64_t>(q) * stride);
    }
    const auto rows = static_cast<size_t>(step.rows);
    Layout layout{.starts = std::vector<int32_t>(step.query_lens.size() + 1, -99),
                  .row_request = std::vector<int32_t>(rows, -99),
                  .ends = std::vector<int32_t>(rows, -99),
                  .slots = std::vector<int64_t>(rows, -99),
                  .status = {}};
    const int32_t live = step.num_requests.value_or(0);
    decode_layout_host({.seq_lens = step.seq_lens.data(),
                        .query_lens = step.query_lens.data(),
                        .num_requests = step.num_requests ? &live : nullptr,
                        .block_table = table.data(),
                        .block_table_stride = stride,
                        .max_requests = step.requests(),
                        .rows = step.rows,
                        .columns = step.columns,
                        .pages = step.pages,
                        .dcp = step.dcp,
                        .starts = layout.starts.data(),
                        .row_request = layout.row_request.data(),
                        .ends = layout.ends.data(),
                        .slots = layout.slots.data(),
                        .status = &layout.status});
    return layout;
}

/// What the rank owns of the positions 0 .. count-1, in ascending order.
std::vector<int64_t> own_positions(int64_t count, ContextParallel dcp) {
    std::vector<int64_t> own;
    for (int64_t t = 0; t < count; ++t) {
        if (t / dcp.interleave % dcp.world_size == dcp.rank) {
            own.push_back(t);
        }
    }
    return own;
}

/// The same by loops: every row of every request in turn, every position by counting.
Layout by_loops(const Step& step) {
    Layout layout;
    int64_t row = 0;
    for (int q = 0; q < step.requests(); ++q) {
        const auto at = static_cast<size_t>(q);
        layout.starts.push_back(static_cast<int32_t>(row));
        if (step.num_requests && q >= *step.num_requests) {
            continue;
        }
        const int64_t length = step.query_lens[at];
        for (int64_t i = 0; i < std::clamp<int64_t>(length, 0, step.rows); ++i, ++row) {
            if (row >= step.rows) {
                layout.status.dropped_rows++;
                continue;
            }
            const int64_t position = step.seq_lens[at] - length + i;
            const std::vector<int64_t> own = own_positions(position + 1, step.dcp);
            const auto bound = static_cast<int64_t>(own.size());
            layout.status.clamped_bounds += bound > step.width() ? 1 : 0;
            layout.row_request.push_back(q);
            layout.ends.push_back(static_cast<int32_t>(std::min(bound, step.width())));

            int64_t slot = -1;
            if (position >= 0 && !own.empty() && own.back() == position) {
                const int64_t local = bound - 1;
                const int64_t block = local < step.width() ? step.table[at][static_cast<size_t>(local / 64)] : -1;
                if (block >= 0 && block < step.pages) {
                    slot = block * 64 + local % 64;
                } else {
                    layout.status.invalid_slots++;
                }
            }
            layout.slots.push_back(slot);
        }
    }
    layout.starts.push_back(static_cast<int32_t>(row));
    layout.row_request.resize(static_cast<size_t>(step.rows), -1);
    layout.ends.resize(static_cast<size_t>(step.rows), 0);
    layout.slots.resize(static_cast<size_t>(step.rows), -1);
    return layout;
}

void expect_as_by_loops(const Step& step) {
    const Layout got = laid_out(step);
    const Layout want = by_loops(step);
    EXPECT_EQ(got.starts, want.starts);
    EXPECT_EQ(got.row_request, want.row_request);
    EXPECT_EQ(got.ends, want.ends);
    EXPECT_EQ(got.slots, want.slots);
    EXPECT_EQ(got.status.invalid_slots, want.status.invalid_slots);
    EXPECT_EQ(got.status.invalid_blocks, 0U);
    EXPECT_EQ(got.status.clamped_bounds, want.status.clamped_bounds);
    EXPECT_EQ(got.status.dropped_rows, want.status.dropped_rows);
}

TEST(DecodeLayout, OfRandomRaggedStepsIsThatOfTheLoops) {
    test::Random random;
    SCOPED_TRACE(random.trace());
    for (int trial = 0; trial < 400 && !::testing::Test::HasFailure(); ++trial) {
        Step step;
        step.rows = random.integer32(1, 70);
        step.columns = random.integer32(1, 6);
        step.pages = random.integer(1, 50);
        step.dcp.world_size = random.one_in(2) ? 1 : random.integer32(1, 8);
        step.dcp.rank = random.integer32(0, step.dcp.world_size - 1);
        step.dcp.interleave = std::vector<int>{1, 2, 16, 64}[static_cast<size_t>(random.integer(0, 3))];
        const int requests = random.one_in(50) ? random.integer32(200, 400) : random.integer32(1, 40);
        step.table = random_table(random, requests, step.columns, step.pages);
        const auto longest = static_cast<int32_t>(step.width()) * step.dcp.world_size + 70;
        for (int q = 0; q < requests; ++q) {
            step.query_lens.push_back(random.one_in(3) ? 0 : random.integer32(random.one_in(8) ? -5 : 0, 6));
            if (random.one_in(40)) {
                step.query_lens.back() = random.integer32(step.rows, most);
            }
            step.seq_lens.push_back(random.integer32(random.one_in(8) ? -10 : 0, longest));
            for (int32_t& block : step.table[static_cast<size_t>(q)]) {
                block = random.one_in(5) ? random.integer32(least, most) : block;
            }
        }
        if (!random.one_in(3)) {
            step.num_requests = random.integer32(random.one_in(4) ? -2 : 0, requests + 3);
        }
        SCOPED_TRACE("trial " + std::to_string(trial));
        expect_as_by_loops(step);
    }
}

TEST(DecodeLayout, OfAStepWithoutRowsIsAllPadding) {
    for (const int requests : {1, 32}) {
        Step step{.rows = 64, .columns = 2, .seq_lens = {}, .query_lens = {}, .num_requests = {}, .table = {}};
        step.seq_lens.assign(static_cast<size_t>(requests), 100);
        step.query_lens.assign(static_cast<size_t>(requests), 0);
        step.table.assign(static_cast<size_t>(requests), {1, 2});
        const Layout layout = laid_out(step);
        EXPECT_EQ(layout.starts, std::vector<int32_t>(static_cast<size_t>(requests) + 1, 0));
        EXPECT_EQ(layout.row_request, std::vector<int32_t>(64, -1));
        EXPECT_EQ(layout.ends, std::vector<int32_t>(64, 0));
        EXPECT_EQ(layout.slots, std::vector<int64_t>(64, -1));
        EXPECT_EQ(layout.status, StepStatus{});
    }
}

TEST(DecodeLayout, RequestsOfLengthZeroWithTwoVerifyRowsHaveNoKeys) {
    // seq_lens shorter than the rows: no position, no key, no slot; a bound of -1 must not come out as 4 billion.
    const Step step{
        .rows = 4, .columns = 2, .seq_lens = {0, 1}, .query_lens = {2, 2}, .num_requests = {}, .table = {{5, 6}, {7, 8}}};
    const Layout layout = laid_out(step);
    EXPECT_EQ(layout.ends, (std::vector<int32_t>{0, 0, 0, 1}));
    EXPECT_EQ(layout.slots, (std::vector<int64_t>{-1, -1, -1, 7 * 64}));
    EXPECT_EQ(layout.status, StepStatus{});
}

TEST(DecodeLayout, VerifyRowsSeeOneKeyMoreEachAndEndAtTheLength) {
    for (int verify = 1; verify <= 16; ++verify) {
        Step step{
            .rows = verify, .columns = 2, .seq_lens = {100}, .query_lens = {verify}, .num_requests = {}, .table = {{3, 4}}};
        const Layout layout = laid_out(step);
        for (int i = 0; i < verify; ++i) {
            ASSERT_EQ(layout.ends[static_cast<size_t>(i)], 100 - verify + i + 1) << "row " << i << " of " << verify;
        }
    }
}

TEST(DecodeLayout, BoundaryLengthsGiveTheirBoundsAndSlots) {
    for (const int32_t length : {0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192}) {
        const Step step{
            .rows = 1, .columns = 3, .seq_lens = {length}, .query_lens = {1}, .num_requests = {}, .table = {{9, 2, 5}}};
        SCOPED_TRACE("length " + std::to_string(length));
        expect_as_by_loops(step);
        EXPECT_EQ(laid_out(step).ends[0], length);
        EXPECT_EQ(laid_out(step).status, StepStatus{});
    }
}

TEST(DecodeLayout, BoundsAreClampedToTheTableAndCounted) {
    const Step step{
        .rows = 4, .columns = 1, .seq_lens = {66, most}, .query_lens = {3, 1}, .num_requests = {}, .table = {{5}, {6}}};
    const Layout layout = laid_out(step);
    EXPECT_EQ(layout.ends, (std::vector<int32_t>{64, 64, 64, 64}));
    EXPECT_EQ(layout.status.clamped_bounds, 3U) << "a bound of exactly the width is not clamped";
    EXPECT_EQ(layout.slots, (std::vector<int64_t>{5 * 64 + 63, -1, -1, -1}));
    EXPECT_EQ(layout.status.invalid_slots, 3U);
}

TEST(DecodeLayout, RowsBeyondTheBucketAreDroppedAndCounted) {
    const Step step{.rows = 5,
                    .columns = 2,
                    .seq_lens = {100, 100, 100},
                    .query_lens = {3, 4, 2},
                    .num_requests = {},
                    .table = {{1, 2}, {3, 4}, {5, 6}}};
    const Layout layout = laid_out(step);
    EXPECT_EQ(layout.starts, (std::vector<int32_t>{0, 3, 7, 9}));
    EXPECT_EQ(layout.row_request, (std::vector<int32_t>{0, 0, 0, 1, 1}));
    EXPECT_EQ(layout.ends, (std::vector<int32_t>{98, 99, 100, 97, 98})) << "the rows that remain keep their place";
    EXPECT_EQ(layout.status.dropped_rows, 4U);
}

TEST(DecodeLayout, NoLengthsMakeTheScanOverflow) {
    Step step{.rows = 7, .columns = 1, .seq_lens = {}, .query_lens = {}, .num_requests = {}, .table = {}};
    for (int q = 0; q < 100; ++q) {
        step.seq_lens.push_back(most);
        step.query_lens.push_back(q % 2 == 0 ? most : least);
        step.table.push_back({0});
    }
    const Layout layout = laid_out(step);
    EXPECT_EQ(layout.starts.back(), 50 * 7) << "each length is clamped to the rows before the scan";
    EXPECT_EQ(layout.status.dropped_rows, 49U * 7);
    EXPECT_EQ(layout.row_request, std::vector<int32_t>(7, 0));
    EXPECT_EQ(layout.ends, (std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7}));
}

TEST(DecodeLayout, LiveRequestsAreCutToThoseThatThereAre) {
    const Step all{.rows = 6,
                   .columns = 1,
                   .seq_lens = {10, 20, 30},
                   .query_lens = {2, 1, 3},
                   .num_requests = {},
                   .table = {{1}, {2}, {3}}};
    const std::vector<std::vector<int32_t>> starts{{0, 0, 0, 0}, {0, 0, 0, 0}, {0, 2, 2, 2}, {0, 2, 3, 3},
                                                   {0, 2, 3, 6}, {0, 2, 3, 6}, {0, 2, 3, 6}};
    const std::vector<int32_t> live{-1, 0, 1, 2, 3, 4, most};
    for (size_t i = 0; i < live.size(); ++i) {
        Step step = all;
        step.num_requests = live[i];
        SCOPED_TRACE("num_requests " + std::to_string(live[i]));
        EXPECT_EQ(laid_out(step).starts, starts[i]);
        expect_as_by_loops(step);
    }
    EXPECT_EQ(laid_out(all).starts, (std::vector<int32_t>{0, 2, 3, 6})) << "null: all are live";
}

TEST(DecodeLayout, StaleEntriesBehindTheLiveRequestsChangeNothing) {
    test::Random random;
    SCOPED_TRACE(random.trace());
    Step step{.rows = 16, .columns = 2, .seq_lens = {}, .query_lens = {}, .num_requests = 3, .table = {}};
    for (int q = 0; q < 8; ++q) {
        step.seq_lens.push_back(random.integer32(4, 128));
        step.query_lens.push_back(random.integer32(1, 4));
    }
    step.table = random_table(random, 8, 2, step.pages);
    const Layout clean = laid_out(step);
    for (const int32_t stale : {-1, most, least, 3}) {
        for (size_t q = 3; q < 8; ++q) {
            step.seq_lens[q] = stale;
            step.query_lens[q] = stale;
            step.table[q] = {stale, stale};
        }
        const Layout layout = laid_out(step);
        EXPECT_EQ(layout.starts, clean.starts);
        EXPECT_EQ(layout.row_request, clean.row_request);
        EXPECT_EQ(layout.ends, clean.ends);
        EXPECT_EQ(layout.slots, clean.slots);
        EXPECT_EQ(layout.status, clean.status);
    }
}

TEST(DecodeLayout, ReadsNothingBehindTheLiveRequests) {
    // Only the live entries are mapped: a look at the next one faults.
    const test::GuardedArray<int32_t> seq_lens({64, 1, 65});
    const test::GuardedArray<int32_t> query_lens({1, 1, 2});
    const test::GuardedArray<int32_t> num_requests({3});
    const test::GuardedArray<int32_t> table({4, 5, 6, 7, 8, 9});
    std::vector<int32_t> starts(11);
    std::vector<int32_t> row_request(8);
    std::vector<int32_t> ends(8);
    std::vector<int64_t> slots(8);
    StepStatus status;
    decode_layout_host({.seq_lens = seq_lens.data(),
                        .query_lens = query_lens.data(),
                        .num_requests = num_requests.data(),
                        .block_table = table.data(),
                        .block_table_stride = 2,
                        .max_requests = 10,
                        .rows = 8,
                        .columns = 2,
                        .pages = 10,
                        .dcp = {},
                        .starts = starts.data(),
                        .row_request = row_request.data(),
                        .ends = ends.data(),
                        .slots = slots.data(),
                        .status = &status});
    EXPECT_EQ(starts, (std::vector<int32_t>{0, 1, 2, 4, 4, 4, 4, 4, 4, 4, 4}));
    EXPECT_EQ(ends, (std::vector<int32_t>{64, 1, 64, 65, 0, 0, 0, 0}));
    EXPECT_EQ(slots, (std::vector<int64_t>{4 * 64 + 63, 6 * 64, 8 * 64 + 63, 9 * 64, -1, -1, -1, -1}));
}

TEST(DecodeLayout, NeedsNoTableWhereTheEngineHandsSlots) {
    const std::vector<int32_t> seq_lens{10, 20};
    const std::vector<int32_t> query_lens{1, 2};
    std::vector<int32_t> starts(3);
    std::vector<int32_t> row_request(4);
    std::vector<int32_t> ends(4);
    StepStatus status;
    decode_layout_host({.seq_lens = seq_lens.data(),
                        .query_lens = query_lens.data(),
                        .num_requests = nullptr,
                        .block_table = nullptr,
                        .block_table_stride = 1,
                        .max_requests = 2,
                        .rows = 4,
                        .columns = 1,
                        .pages = 1,
                        .dcp = {},
                        .starts = starts.data(),
                        .row_request = row_request.data(),
                        .ends = ends.data(),
                        .slots = nullptr,
                        .status = &status});
    EXPECT_EQ(ends, (std::vector<int32_t>{10, 19, 20, 0}));
    EXPECT_EQ(status, StepStatus{});
}

TEST(DecodeLayout, DerivedSlotsOfInvalidBlocksAreMinusOneAndCounted) {
    const int32_t pages = 10;
    for (const int32_t block : {-1, least, pages, pages + 1, most}) {
        Step step{.rows = 2, .columns = 2, .seq_lens = {70}, .query_lens = {2}, .num_requests = {}, .table = {{3, block}}};
        step.pages = pages;
        const Layout layout = laid_out(step);
        EXPECT_EQ(layout.slots, (std::vector<int64_t>{-1, -1})) << "block " << block;
        EXPECT_EQ(layout.status.invalid_slots, 2U) << "block " << block;
        EXPECT_EQ(layout.ends, (std::vector<int32_t>{69, 70})) << "an invalid block cuts no bound";
    }
    const Step last{.rows = 1,
                    .columns = 1,
                    .pages = pages,
                    .dcp = {},
                    .seq_lens = {64},
                    .query_lens = {1},
                    .num_requests = {},
                    .table = {{pages - 1}}};
    EXPECT_EQ(laid_out(last).slots[0], 639);
}

TEST(DecodeLayout, CountersAddUpOverSteps) {
    StepStatus status{.invalid_slots = 1, .invalid_blocks = 2, .clamped_bounds = 3, .dropped_rows = 0xFFFFFFFF};
    const int32_t seq_len = 100;
    const int32_t query_len = 3;
    const int32_t block = 0;
    std::vector<int32_t> starts(2);
    int32_t row_request = 0;
    int32_t end = 0;
    int64_t slot = 0;
    const int32_t second_query_len = 1;
    std::vector<int32_t> lens{query_len, second_query_len};
    std::vector<int32_t> seqs{seq_len, seq_len};
    starts.resize(3);
    const std::vector<int32_t> table{block, block};
    decode_layout_host({.seq_lens = seqs.data(),
                        .query_lens = lens.data(),
                        .num_requests = nullptr,
                        .block_table = table.data(),
                        .block_table_stride = 1,
                        .max_requests = 2,
                        .rows = 1,
                        .columns = 1,
                        .pages = 1,
                        .dcp = {},
                        .starts = starts.data(),
                        .row_request = &row_request,
                        .ends = &end,
                        .slots = &slot,
                        .status = &status});
    EXPECT_EQ(status.invalid_slots, 2U);
    EXPECT_EQ(status.invalid_blocks, 2U);
    EXPECT_EQ(status.clamped_bounds, 4U);
    EXPECT_EQ(status.dropped_rows, 0U) << "modulo 2^32";
}

TEST(DecodeLayout, OfThousandsOfRequestsIsThatOfTheLoops) {
    test::Random random;
    SCOPED_TRACE(random.trace());
    for (const int requests : {1023, 1024, 1025, 5000}) {
        Step step{.rows = 6000, .columns = 2, .seq_lens = {}, .query_lens = {}, .num_requests = {}, .table = {}};
        for (int q = 0; q < requests; ++q) {
            step.query_lens.push_back(random.integer32(0, 3));
            step.seq_lens.push_back(random.integer32(step.query_lens.back(), 128));
        }
        step.table = random_table(random, requests, step.columns, step.pages);
        expect_as_by_loops(step);
    }
}

// ---- context parallelism

constexpr int interleaves[] = {1, 2, 16, 64};

TEST(ContextParallelLayout, LocalisesEachRowAfterItIsExpanded) {
    const Step step{.rows = 3,
                    .columns = 1,
                    .dcp = {.world_size = 2, .rank = 1, .interleave = 1},
                    .seq_lens = {10},
                    .query_lens = {3},
                    .num_requests = {},
                    .table = {{0}}};
    EXPECT_EQ(laid_out(step).ends, (std::vector<int32_t>{4, 4, 5}));
}

TEST(ContextParallelLayout, TheRanksTogetherOwnEveryKeyOnce) {
    for (int world = 1; world <= 8; ++world) {
        for (const int interleave : interleaves) {
            const int round = world * interleave;
            for (const int keys : {0, 1, interleave, interleave + 1, round - 1, round, round + 1, 3 * round - interleave / 2,
                                   3 * round + 1, 1000}) {
                std::vector<int> owners(static_cast<size_t>(keys));
                for (int rank = 0; rank < world; ++rank) {
                    const ContextParallel dcp{world, rank, interleave};
                    const Step step{.rows = 1,
                                    .columns = 20,
                                    .dcp = dcp,
                                    .seq_lens = {keys},
                                    .query_lens = {1},
                                    .num_requests = {},
                                    .table = {std::vector<int32_t>(20, 0)}};
                    const int64_t end = laid_out(step).ends[0];
                    for (int64_t j = 0; j < end; ++j) {
                        const int64_t t = global_position(j, dcp);
                        ASSERT_LT(t, keys) << "world " << world << " rank " << rank << " interleave " << interleave;
                        owners[static_cast<size_t>(t)]++;
                        ASSERT_EQ(local_position(t, dcp), j);
                    }
                }
                ASSERT_EQ(owners, std::vector<int>(static_cast<size_t>(keys), 1))
                    << "world " << world << " interleave " << interleave << " keys " << keys;
            }
        }
    }
}

TEST(ContextParallelLayout, BoundsAndPositionsAreThoseOfTheEnumeration) {
    for (int world = 1; world <= 8; ++world) {
        for (const int interleave : interleaves) {
            for (int rank = 0; rank < world; ++rank) {
                const ContextParallel dcp{world, rank, interleave};
                const int keys = 2 * world * interleave + interleave + 1;
                const std::vector<int64_t> own = own_positions(keys, dcp);
                for (int end = 0; end <= keys; ++end) {
                    const auto below = std::lower_bound(own.begin(), own.end(), end) - own.begin();
                    ASSERT_EQ(local_bound(end, dcp), below) << world << " " << rank << " " << interleave << " " << end;
                }
                for (int t = 0; t < keys; ++t) {
                    const auto at = std::lower_bound(own.begin(), own.end(), t);
                    ASSERT_EQ(local_position(t, dcp), at != own.end() && *at == t ? at - own.begin() : -1);
                }
                for (size_t j = 0; j < own.size(); ++j) {
                    ASSERT_EQ(global_position(static_cast<int64_t>(j), dcp), own[j]);
                }
            }
        }
    }
}

TEST(ContextParallelLayout, EveryVerifyRowOfEveryRankIsThatOfTheLoops) {
    for (int world = 2; world <= 8; ++world) {
        for (const int interleave : interleaves) {
            for (int rank = 0; rank < world; ++rank) {
                const int round = world * interleave;
                const Step step{.rows = 15,
                                .columns = 3,
                                .dcp = {world, rank, interleave},
                                .seq_lens = {round + 2, 2 * round + interleave, 3},
                                .query_lens = {5, 7, 3},
                                .num_requests = {},
                                .table = {{4, 9, 2}, {7, 0, 8}, {1, 3, 5}}};
                SCOPED_TRACE("world " + std::to_string(world) + " rank " + std::to_string(rank) + " interleave " +
                             std::to_string(interleave));
                expect_as_by_loops(step);
            }
        }
    }
}

TEST(ContextParallelLayout, ExactlyOneRankStoresEachNewKey) {
    for (const int interleave : interleaves) {
        std::vector<int> stored(4);
        for (int rank = 0; rank < 3; ++rank) {
            const Step step{.rows = 4,
                            .columns = 4,
                            .dcp = {3, rank, interleave},
                            .seq_lens = {200},
                            .query_lens = {4},
                            .num_requests = {},
                            .table = {{1, 2, 3, 4}}};
            const Layout layout = laid_out(step);
            for (size_t row = 0; row < 4; ++row) {
                stored[row] += layout.slots[row] >= 0 ? 1 : 0;
            }
            EXPECT_EQ(layout.status.invalid_slots, 0U) << "another rank's key is not counted";
        }
        EXPECT_EQ(stored, std::vector<int>(4, 1)) << "interleave " << interleave;
    }
}

TEST(ContextParallelLayout, PositionsAbove24BitsStayExact) {
    for (const int64_t t :
         {(int64_t{1} << 24U) - 1, int64_t{1} << 24U, (int64_t{1} << 24U) + 1, (int64_t{1} << 30U) + 3, int64_t{most}}) {
        for (const int interleave : interleaves) {
            for (int rank = 0; rank < 8; ++rank) {
                const ContextParallel dcp{8, rank, interleave};
                const int64_t local = local_position(t, dcp);
                if (t / interleave % 8 == rank) {
                    ASSERT_EQ(global_position(local, dcp), t);
                    ASSERT_EQ(local_bound(t + 1, dcp), local + 1);
                } else {
                    ASSERT_EQ(local, -1);
                }
            }
        }
    }
}

}  // namespace
}  // namespace stepgraph
