// Scoring on the host, against the sum of the contract in double over values decoded from arrays laid out by hand.
#include <stepgraph/kernels/reference/score.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include <stepgraph/layouts/query_row.h>

#include "guarded_array.h"
#include "number_oracle.h"
#include "page_oracle.h"
#include "random.h"
#include "score_case.h"

namespace stepgraph {
namespace {

constexpr int all_heads[] = {16, 32, 64};
constexpr int32_t most = std::numeric_limits<int32_t>::max();

// ---- the oracle

double query_value_at(const test::ScoreCase& c, int row, int head, int column) {
    const int byte = c.query[static_cast<size_t>(test::query_payload_at(c.format, c.heads, row, head, column))];
    if (!test::four_bit(c.format)) {
        return test::e4m3_value(byte);
    }
    const int scale =
        c.query[static_cast<size_t>(test::query_scale_at(c.format, c.heads, c.rows(), row, head, column / 32))];
    return std::ldexp(test::e2m1_value(column % 2 == 0 ? byte % 16 : byte / 16), scale - 127);
}

double key_value_at(test::ScoreCase& c, int64_t page, int token, int column) {
    const int byte = *test::payload_byte(c.format, c.page(page), token, column);
    if (!test::four_bit(c.format)) {
        return test::e4m3_value(byte);
    }
    const int scale = *test::scale_byte(c.format, c.page(page), token, column / 32);
    return std::ldexp(test::e2m1_value(column % 2 == 0 ? byte % 16 : byte / 16), scale - 127);
}

double key_scale_at(test::ScoreCase& c, int64_t page, int token) {
    const uint8_t* bytes = test::scale_byte(c.format, c.page(page), token, 0);
    float fp32 = 0;
    std::memcpy(&fp32, bytes, 4);
    return c.format == CacheFormat::fp8      ? static_cast<double>(fp32)
           : c.format == CacheFormat::fp8_mx ? std::ldexp(1.0, *bytes - 127)
                                             : 1.0;
}

struct Logit {
    double value;
    double tolerance;
};

/// FP32 sums of 128 columns and of the heads, each term and each sum rounded once: the error is below 2^-24 for each
/// rounding of the sum of the terms' magnitudes.
Logit by_definition(test::ScoreCase& c, int row, int j) {
    const int64_t page = c.table[static_cast<size_t>(c.row_request[static_cast<size_t>(row)])][static_cast<size_t>(j / 64)];
    double key[128];
    for (int column = 0; column < 128; ++column) {
        key[column] = key_value_at(c, page, j % 64, column);
    }
    double sum = 0;
    double magnitudes = 0;
    for (int head = 0; head < c.heads; ++head) {
        double dot = 0;
        double dot_magnitudes = 0;
        for (int column = 0; column < 128; ++column) {
            const double product = query_value_at(c, row, head, column) * key[column];
            dot += product;
            dot_magnitudes += std::fabs(product);
        }
        const double weight = c.head_weights[static_cast<size_t>(row * c.heads + head)];
        sum += weight * (dot < 0 ? 0.0 : dot);  // a NaN stays
        magnitudes += std::fabs(weight) * dot_magnitudes;
    }
    const double scale = key_scale_at(c, page, j % 64);
    return {scale * sum, std::fabs(scale) * magnitudes * (128 + 64 + 4) * 0x1p-24};
}

void expect_by_definition(test::ScoreCase& c) {
    StepStatus status;
    const std::vector<float> logits = test::scored(c, &status);
    EXPECT_EQ(status, StepStatus{});
    for (int row = 0; row < c.rows(); ++row) {
        for (int j = 0; j < c.width(); ++j) {
            const float got = logits[static_cast<size_t>(row * c.width() + j)];
            if (j >= c.ends[static_cast<size_t>(row)]) {
                ASSERT_EQ(got, test::unwritten_logit) << "row " << row << " position " << j << " is behind the bound";
                continue;
            }
            const Logit want = by_definition(c, row, j);
            ASSERT_NEAR(got, want.value, want.tolerance) << "row " << row << " position " << j;
        }
    }
}

// ---- tests

class Score : public ::testing::TestWithParam<std::tuple<CacheFormat, int>> {
protected:
    [[nodiscard]] static CacheFormat format() { return std::get<0>(GetParam()); }
    [[nodiscard]] static int heads() { return std::get<1>(GetParam()); }

    test::Random random_;
    ::testing::ScopedTrace trace_{__FILE__, __LINE__, random_.trace()};
};

std::string name_of(const ::testing::TestParamInfo<Score::ParamType>& info) {
    return ::testing::PrintToString(std::get<0>(info.param)) + "_" + std::to_string(std::get<1>(info.param)) + "_heads";
}

TEST_P(Score, OfBoundaryLengthsIsTheSumOfTheContract) {
    test::ScoreCase c = test::random_case(random_, format(), heads(), {1, 1, 1, 1, 1, 1, 1}, {0, 1, 63, 64, 65, 128, 130});
    expect_by_definition(c);
}

TEST_P(Score, OfVerifyRowsSeesEachRowsOwnBound) {
    test::ScoreCase c = test::random_case(random_, format(), heads(), {3, 0, 5, 2}, {66, 100, 64, 1});
    expect_by_definition(c);
}

INSTANTIATE_TEST_SUITE_P(FormatsAndHeads, Score,
                         ::testing::Combine(::testing::ValuesIn(test::all_formats), ::testing::ValuesIn(all_heads)),
                         name_of);

class ScoreOfFormat : public ::testing::TestWithParam<CacheFormat> {
protected:
    test::Random random_;
    ::testing::ScopedTrace trace_{__FILE__, __LINE__, random_.trace()};
};

TEST_P(ScoreOfFormat, CountsAnInvalidBlockOncePerRequestAndColumnAndScoresItMinusInfinity) {
    constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
    test::ScoreCase c = test::random_case(random_, GetParam(), 16, {1, 4, 2}, {200, 190, 129});
    StepStatus clean;
    const std::vector<float> before = test::scored(c, &clean);
    c.table[0][1] = -1;
    c.table[1][0] = static_cast<int32_t>(c.pages);
    c.table[1][2] = most;
    c.table[2][2] = std::numeric_limits<int32_t>::min();  // only the last row of the request reaches this column
    StepStatus status;
    const std::vector<float> logits = test::scored(c, &status);
    EXPECT_EQ(status, (StepStatus{.invalid_blocks = 4}));
    for (int row = 0; row < c.rows(); ++row) {
        for (int j = 0; j < c.ends[static_cast<size_t>(row)]; ++j) {
            const auto request = static_cast<size_t>(c.row_request[static_cast<size_t>(row)]);
            const int32_t block = c.table[request][static_cast<size_t>(j / 64)];
            const auto at = static_cast<size_t>(row * c.width() + j);
            ASSERT_EQ(logits[at], block < 0 || block >= c.pages ? minus_infinity : before[at]) << row << " " << j;
        }
    }
}

TEST_P(ScoreOfFormat, ReadsNoBlockBehindTheBound) {
    // The table ends with the entry that the last key needs: a look at the next one faults.
    for (const int length : {1, 63, 64, 65, 128, 129}) {
        test::ScoreCase c = test::random_case(random_, GetParam(), 16, {2}, {length});
        std::vector<int32_t> needed = c.table[0];
        needed.resize(static_cast<size_t>((length + 63) / 64));
        const test::GuardedArray<int32_t> table(needed);
        StepStatus status;
        StepStatus clean;
        EXPECT_EQ(test::scored(c, table.data(), c.columns, &status), test::scored(c, &clean)) << "length " << length;
        EXPECT_EQ(status, StepStatus{});
    }
}

TEST_P(ScoreOfFormat, LooksAtNoEntryBehindTheBound) {
    test::ScoreCase c = test::random_case(random_, GetParam(), 16, {1, 2}, {64, 65});
    StepStatus status;
    const std::vector<float> clean = test::scored(c, &status);
    for (const int32_t stale : {-1, most}) {
        c.table[0][1] = stale;
        EXPECT_EQ(test::scored(c, &status), clean);
    }
    EXPECT_EQ(status, StepStatus{});
}

TEST_P(ScoreOfFormat, LeavesRowsOutThatNeedNoLogits) {
    test::ScoreCase c = test::random_case(random_, GetParam(), 16, {4, 1}, {66, 10});  // bounds 63, 64, 65, 66 and 10
    StepStatus status;
    const std::vector<float> all = test::scored(c, &status);
    c.unscored_bound = 64;
    c.table[1][0] = -1;  // not looked at, for its request needs no logits
    const std::vector<float> some = test::scored(c, &status);
    EXPECT_EQ(status, StepStatus{});
    for (int row = 0; row < c.rows(); ++row) {
        for (int j = 0; j < c.width(); ++j) {
            const auto at = static_cast<size_t>(row * c.width() + j);
            ASSERT_EQ(some[at], c.ends[static_cast<size_t>(row)] > 64 ? all[at] : test::unwritten_logit) << row << " " << j;
        }
    }
}

TEST_P(ScoreOfFormat, GivesARowTheSameBitsAloneAndAmongOthers) {
    const test::ScoreCase among = test::random_case(random_, GetParam(), 32, {2, 3, 1}, {100, 130, 70});
    StepStatus status;
    const std::vector<float> all = test::scored(among, &status);
    for (size_t q = 0; q < among.lengths.size(); ++q) {
        test::ScoreCase alone = among;
        for (size_t other = 0; other < among.lengths.size(); ++other) {
            const auto begin = alone.ends.begin() + among.starts[other];
            std::fill_n(begin, other == q ? 0 : among.query_lens[other], 0);
        }
        const std::vector<float> some = test::scored(alone, &status);
        for (int row = among.starts[q]; row < among.starts[q + 1]; ++row) {
            const auto first = static_cast<int64_t>(row) * among.width();
            ASSERT_TRUE(std::equal(all.begin() + first, all.begin() + first + among.width(), some.begin() + first));
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Formats, ScoreOfFormat, ::testing::ValuesIn(test::all_formats), test::format_name);

class ScoreValues : public ::testing::Test {
protected:
    test::Random random_;
    ::testing::ScopedTrace trace_{__FILE__, __LINE__, random_.trace()};
};

TEST_F(ScoreValues, OfANanKeyStaysNanAndTheOthersAreUntouched) {
    for (const CacheFormat format : {CacheFormat::fp8, CacheFormat::fp8_mx}) {
        test::ScoreCase c = test::random_case(random_, format, 32, {1}, {65});
        StepStatus status;
        const std::vector<float> clean = test::scored(c, &status);
        *test::payload_byte(format, c.page(c.table[0][0]), 17, 99) = 0x7F;
        *test::payload_byte(format, c.page(c.table[0][1]), 0, 0) = 0xFF;
        const std::vector<float> logits = test::scored(c, &status);
        for (size_t j = 0; j < 65; ++j) {
            if (j == 17 || j == 64) {
                EXPECT_TRUE(std::isnan(logits[j])) << "relu must not turn NaN into 0";
            } else {
                EXPECT_EQ(logits[j], clean[j]) << j;
            }
        }
    }
}

TEST_F(ScoreValues, OfANanInTheQueryIsNanForTheWholeRow) {
    test::ScoreCase c = test::random_case(random_, CacheFormat::fp8, 16, {2}, {70});
    c.query[static_cast<size_t>(test::query_payload_at(c.format, c.heads, 0, 3, 64))] = 0x7F;
    StepStatus status;
    const std::vector<float> logits = test::scored(c, &status);
    for (int j = 0; j < c.ends[0]; ++j) {
        EXPECT_TRUE(std::isnan(logits[static_cast<size_t>(j)])) << j;
        EXPECT_FALSE(std::isnan(logits[static_cast<size_t>(c.width() + j)])) << j;
    }
}

TEST_F(ScoreValues, WhoseDotsAreAllNegativeAreExactZeros) {
    test::ScoreCase c = test::random_case(random_, CacheFormat::fp8, 16, {1}, {128});
    for (uint8_t& code : c.query) {
        code &= 0x7F;  // not negative, and not all zero
        code |= 0x08;
        code = code == 0x7F ? 0x38 : code;
    }
    for (int64_t page = 0; page < c.pages; ++page) {
        for (int i = 0; i < 8192; ++i) {
            c.page(page)[i] = static_cast<uint8_t>(c.page(page)[i] | 0x80);
            c.page(page)[i] = c.page(page)[i] == 0xFF ? 0xB8 : c.page(page)[i];
        }
    }
    StepStatus status;
    const std::vector<float> logits = test::scored(c, &status);
    for (size_t j = 0; j < 128; ++j) {
        EXPECT_EQ(logits[j], 0.0F) << j;
    }
}

TEST_F(ScoreValues, OfOneKnownKeyIsWhatOneCountsByHand) {
    // Two heads look at the key, one with a negative dot: 0.5 * 3 * (2 * 1.5) = 4.5.
    test::ScoreCase c = test::random_case(random_, CacheFormat::fp8, 16, {1}, {1});
    std::fill(c.query.begin(), c.query.end(), uint8_t{0});
    uint8_t* page = c.page(c.table[0][0]);
    std::memset(page, 0, 8192);
    *test::payload_byte(c.format, page, 0, 7) = 0x40;                                           // 2
    c.query[static_cast<size_t>(test::query_payload_at(c.format, 16, 0, 2, 7))] = 0x3C;         // 1.5
    c.query[static_cast<size_t>(test::query_payload_at(c.format, 16, 0, 5, 7))] = 0x80 | 0x3C;  // -1.5
    c.head_weights[2] = 0.5F;
    c.head_weights[5] = 1000.0F;
    const float scale = 3.0F;
    std::memcpy(test::scale_byte(c.format, page, 0, 0), &scale, 4);
    StepStatus status;
    EXPECT_EQ(test::scored(c, &status)[0], 4.5F);
}

}  // namespace
}  // namespace stepgraph
