// Top-K on the host, against a stable sort of every position.
#include <stepgraph/kernels/reference/select.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "guarded_array.h"
#include "random.h"

namespace stepgraph {
namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t most = std::numeric_limits<int32_t>::max();
constexpr int top_ks[] = {1, 64, 512, 1024, 2048, 2051};

struct Selected {
    std::vector<int32_t> indices;
    std::vector<int32_t> counts;
    std::vector<int64_t> physical_slots;
    std::vector<float> winner_logits;
};

/// Rows of logits of any lengths, each request one row; a block of the table is its own number reversed.
Selected selected(const std::vector<std::vector<float>>& rows, int top_k) {
    size_t width = 64;
    for (const std::vector<float>& row : rows) {
        width = std::max(width, (row.size() + 63) / 64 * 64);
    }
    const size_t columns = width / 64;
    const auto pages = static_cast<int32_t>(rows.size() * columns);
    std::vector<int32_t> ends;
    std::vector<int32_t> row_request;
    std::vector<int32_t> table;
    std::vector<float> logits(rows.size() * width, inf);  // behind the bound stands what would win
    for (size_t row = 0; row < rows.size(); ++row) {
        ends.push_back(static_cast<int32_t>(rows[row].size()));
        row_request.push_back(static_cast<int32_t>(row));
        std::copy(rows[row].begin(), rows[row].end(), logits.begin() + static_cast<int64_t>(row * width));
    }
    for (int32_t block = 0; block < pages; ++block) {
        table.push_back(pages - 1 - block);
    }
    const size_t winners = rows.size() * static_cast<size_t>(top_k);
    Selected out{.indices = std::vector<int32_t>(winners, -99),
                 .counts = std::vector<int32_t>(rows.size(), -99),
                 .physical_slots = std::vector<int64_t>(winners, -99),
                 .winner_logits = std::vector<float>(winners, -99.0F)};
    reference::select({.rows = static_cast<int>(rows.size()),
                       .top_k = top_k,
                       .ends = ends.data(),
                       .logits = logits.data(),
                       .logits_stride = static_cast<int64_t>(width),
                       .row_request = row_request.data(),
                       .block_table = table.data(),
                       .block_table_stride = static_cast<int64_t>(columns),
                       .pages = pages,
                       .indices = out.indices.data(),
                       .counts = out.counts.data(),
                       .physical_slots = out.physical_slots.data(),
                       .winner_logits = out.winner_logits.data()});
    for (size_t i = 0; i < winners; ++i) {
        const int32_t position = out.indices[i];
        const size_t row = i / static_cast<size_t>(top_k);
        if (position < 0) {
            EXPECT_EQ(out.physical_slots[i], -1);
            EXPECT_EQ(out.winner_logits[i], -inf);
        } else {
            const auto block = static_cast<int32_t>(row * columns) + position / 64;
            EXPECT_EQ(out.physical_slots[i], int64_t{pages - 1 - block} * 64 + position % 64);
            const float logit = rows[row][static_cast<size_t>(position)];
            EXPECT_TRUE(out.winner_logits[i] == logit || std::isnan(logit));
        }
    }
    return out;
}

/// The best positions by a full sort: those in front come first among equals.
std::vector<int32_t> by_sorting(const std::vector<float>& logits, int top_k) {
    std::vector<int32_t> positions(logits.size());
    std::iota(positions.begin(), positions.end(), 0);
    std::stable_sort(positions.begin(), positions.end(), [&logits](int32_t a, int32_t b) {
        const float x = logits[static_cast<size_t>(a)];
        const float y = logits[static_cast<size_t>(b)];
        return (std::isnan(x) ? -inf : x) > (std::isnan(y) ? -inf : y);
    });
    positions.resize(std::min(positions.size(), static_cast<size_t>(top_k)));
    std::sort(positions.begin(), positions.end());
    positions.resize(static_cast<size_t>(top_k), -1);
    return positions;
}

void expect_by_sorting(const std::vector<std::vector<float>>& rows, int top_k) {
    const Selected got = selected(rows, top_k);
    for (size_t row = 0; row < rows.size(); ++row) {
        const auto first = got.indices.begin() + static_cast<int64_t>(row) * top_k;
        ASSERT_EQ(std::vector<int32_t>(first, first + top_k), by_sorting(rows[row], top_k))
            << "row " << row << " of " << rows[row].size() << " logits, top_k " << top_k;
        ASSERT_EQ(got.counts[row], std::min(static_cast<int32_t>(rows[row].size()), top_k));
    }
}

class Select : public ::testing::Test {
protected:
    std::vector<float> normal_row(int length) {
        std::vector<float> row;
        for (int j = 0; j < length; ++j) {
            row.push_back(random_.normal());
        }
        return row;
    }

    test::Random random_;
    ::testing::ScopedTrace trace_{__FILE__, __LINE__, random_.trace()};
};

TEST_F(Select, OfBoundaryLengthsIsTheSortedTop) {
    for (const int top_k : top_ks) {
        std::vector<std::vector<float>> rows;
        for (const int length : {0, 1, 2, 63, 64, 65, top_k - 1, top_k, top_k + 1, 2 * top_k, 5000}) {
            rows.push_back(normal_row(length));
        }
        expect_by_sorting(rows, top_k);
    }
}

TEST_F(Select, OfReluPlateausTakesTheFirstZeros) {
    for (const int top_k : top_ks) {
        std::vector<float> row = normal_row(8000);
        for (float& logit : row) {
            logit = std::max(0.0F, logit - 1.0F);
        }
        expect_by_sorting({row}, top_k);
    }
}

TEST_F(Select, OfAHundredWinnersAmongZerosHoldsAllOfThem) {
    std::vector<float> row(8320, 0.0F);
    std::vector<int32_t> winners(row.size());
    std::iota(winners.begin(), winners.end(), 0);
    std::shuffle(winners.begin(), winners.end(), random_.engine());
    winners.resize(100);
    for (const int32_t winner : winners) {
        row[static_cast<size_t>(winner)] = random_.uniform(0.001F, 1.0F);
    }
    expect_by_sorting({row}, 2048);
    const std::vector<int32_t> indices = selected({row}, 2048).indices;
    for (const int32_t winner : winners) {
        EXPECT_TRUE(std::binary_search(indices.begin(), indices.end(), winner)) << winner;
    }
}

TEST_F(Select, OfEqualLogitsTakesThePositionsInFront) {
    for (const int top_k : top_ks) {
        std::vector<int32_t> front(static_cast<size_t>(top_k));
        std::iota(front.begin(), front.end(), 0);
        for (const float value : {0.0F, -0.0F, 1.0F, -3.5F, inf, -inf, nan, 3.4e38F, 1e-45F}) {
            EXPECT_EQ(selected({std::vector<float>(8320, value)}, top_k).indices, front) << value;
        }
    }
}

TEST_F(Select, OfLogitsPackedIntoANarrowRangeDropsNone) {
    for (const int top_k : top_ks) {
        std::vector<float> row;
        for (int j = 0; j < 20000; ++j) {
            row.push_back(random_.uniform(100.0F, 101.0F));
        }
        expect_by_sorting({row}, top_k);
    }
}

TEST_F(Select, OfLogitsOneStepApartTellsThemApart) {
    std::vector<float> row;
    float value = 100.0F;
    for (int j = 0; j < 9000; ++j) {
        row.push_back(value);
        value = std::nextafter(value, inf);
    }
    expect_by_sorting({row}, 2048);
    std::shuffle(row.begin(), row.end(), random_.engine());
    expect_by_sorting({row}, 2048);
    for (float& logit : row) {
        logit = -logit;
    }
    expect_by_sorting({row}, 2048);
}

TEST_F(Select, CountsNanAsMinusInfinity) {
    for (const int top_k : {1, 64, 512}) {
        std::vector<float> all(1000, nan);
        std::vector<float> half = normal_row(1000);
        std::vector<float> one = normal_row(1000);
        std::vector<float> mixed = normal_row(1000);
        for (size_t j = 0; j < 1000; ++j) {
            half[j] = random_.one_in(2) ? nan : half[j];
            mixed[j] = random_.one_in(2) ? (random_.one_in(2) ? nan : -inf) : (random_.one_in(2) ? -nan : mixed[j]);
        }
        one[static_cast<size_t>(random_.integer(0, 999))] = nan;
        expect_by_sorting({all, half, one, mixed}, top_k);
    }
}

TEST_F(Select, TakesNanOnlyWhereNothingElseIsLeft) {
    std::vector<float> row(100, nan);
    row[99] = -3e38F;
    row[50] = -inf;
    EXPECT_EQ(selected({row}, 1).indices, std::vector<int32_t>{99});
    EXPECT_EQ(selected({row}, 3).indices, (std::vector<int32_t>{0, 1, 99})) << "NaN and -inf are equal, position decides";
}

TEST_F(Select, TakesMinusZeroForZero) {
    std::vector<float> row(2000, -1.0F);
    for (float& logit : row) {
        logit = random_.one_in(2) ? 0.0F : -0.0F;
    }
    expect_by_sorting({row}, 512);
    std::vector<int32_t> front(512);
    std::iota(front.begin(), front.end(), 0);
    EXPECT_EQ(selected({row}, 512).indices, front);
}

TEST_F(Select, OfManyRandomRowsIsTheSortedTop) {
    for (int trial = 0; trial < 100; ++trial) {
        const int top_k = random_.integer32(1, 300);
        std::vector<std::vector<float>> rows;
        for (int row = 0; row < 5; ++row) {
            rows.push_back(normal_row(random_.integer32(0, 900)));
            const float step = random_.one_in(2) ? 0.25F : 1e-6F;  // many ties, or none
            for (float& logit : rows.back()) {
                logit = std::round(logit / step) * step;
                logit = random_.one_in(50) ? (random_.one_in(2) ? inf : nan) : logit;
            }
        }
        ASSERT_NO_FATAL_FAILURE(expect_by_sorting(rows, top_k));
    }
}

TEST_F(Select, GivesARowTheSameAnswerAloneAndAmongOthers) {
    std::vector<std::vector<float>> rows;
    for (int row = 0; row < 8; ++row) {
        rows.push_back(std::vector<float>(3000, 0.0F));
        for (int winner = 0; winner < 200; ++winner) {
            rows.back()[static_cast<size_t>(random_.integer(0, 2999))] = 1.0F;
        }
    }
    const std::vector<int32_t> all = selected(rows, 512).indices;
    for (size_t row = 0; row < rows.size(); ++row) {
        const auto first = all.begin() + static_cast<int64_t>(row) * 512;
        EXPECT_EQ(selected({rows[row]}, 512).indices, std::vector<int32_t>(first, first + 512));
    }
}

// ---- what is read and what is written

/// One row of `end` positions whose logits and table end where they must; null stands for an output that is not wanted.
struct OneRow {
    int32_t end;
    int top_k;
    const float* logits;
    const int32_t* blocks;
    int64_t pages;
    int32_t row_request = 0;
    std::vector<int32_t> indices{};
    std::vector<int64_t> slots{};

    void select(bool want_slots) {
        indices.assign(static_cast<size_t>(top_k), -99);
        slots.assign(static_cast<size_t>(top_k), -99);
        reference::select({.rows = 1,
                           .top_k = top_k,
                           .ends = &end,
                           .logits = logits,
                           .logits_stride = 1 << 20U,
                           .row_request = &row_request,
                           .block_table = blocks,
                           .block_table_stride = 1 << 14U,
                           .pages = pages,
                           .indices = indices.data(),
                           .counts = nullptr,
                           .physical_slots = want_slots ? slots.data() : nullptr,
                           .winner_logits = nullptr});
    }
};

TEST_F(Select, ReadsNoLogitOfARowThatFits) {
    for (const int32_t end : {0, 1, 63, 64}) {
        OneRow row{.end = end, .top_k = 64, .logits = nullptr, .blocks = nullptr, .pages = 0};
        row.select(false);
        for (int32_t j = 0; j < 64; ++j) {
            EXPECT_EQ(row.indices[static_cast<size_t>(j)], j < end ? j : -1);
        }
    }
}

TEST_F(Select, ReadsNothingBehindTheBound) {
    const test::GuardedArray<float> logits(normal_row(130));
    const test::GuardedArray<int32_t> blocks({7, 5, 3});
    OneRow row{.end = 130, .top_k = 129, .logits = logits.data(), .blocks = blocks.data(), .pages = 8};
    row.select(true);
    EXPECT_EQ(row.indices, by_sorting({logits.data(), logits.data() + 130}, 129));
    EXPECT_EQ(row.slots.back(), 3 * 64 + row.indices.back() % 64);
}

TEST_F(Select, TranslatesWinnersInInvalidBlocksToMinusOne) {
    const std::vector<float> logits(320, 1.0F);
    const std::vector<int32_t> blocks{4, -1, 10, most, 9};
    OneRow row{.end = 320, .top_k = 320, .logits = logits.data(), .blocks = blocks.data(), .pages = 10};
    row.select(true);
    for (int32_t j = 0; j < 320; ++j) {
        const auto at = static_cast<size_t>(j);
        EXPECT_EQ(row.indices[at], j) << "the position stays";
        EXPECT_EQ(row.slots[at], j < 64 ? 256 + j : j >= 256 ? 576 + j - 256 : -1);
    }
}

TEST_F(Select, OfPaddingIsMinusOneThroughout) {
    // Its request is -1: no row of the table stands behind it.
    const test::GuardedArray<int32_t> blocks({1});
    OneRow row{.end = 0, .top_k = 65, .logits = nullptr, .blocks = blocks.data(), .pages = 2, .row_request = -1};
    row.select(true);
    EXPECT_EQ(row.indices, std::vector<int32_t>(65, -1));
    EXPECT_EQ(row.slots, std::vector<int64_t>(65, -1));
}

}  // namespace
}  // namespace stepgraph
