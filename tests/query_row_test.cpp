// Which byte of the query buffer holds what, and the factor on the head weights.
#include <stepgraph/layouts/query_row.h>

#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "number_oracle.h"
#include "page_oracle.h"
#include "random.h"

namespace stepgraph {
namespace {

constexpr int all_heads[] = {16, 32, 64};

class QueryRow : public ::testing::TestWithParam<std::tuple<CacheFormat, int>> {
protected:
    [[nodiscard]] static CacheFormat format() { return std::get<0>(GetParam()); }
    [[nodiscard]] static int heads() { return std::get<1>(GetParam()); }
};

std::string name_of(const ::testing::TestParamInfo<QueryRow::ParamType>& info) {
    return ::testing::PrintToString(std::get<0>(info.param)) + "_" + std::to_string(std::get<1>(info.param)) + "_heads";
}

TEST_P(QueryRow, OffsetsAreThoseOfTheArrays) {
    for (const int64_t max_rows : {1, 2, 5, 64}) {
        for (int64_t row = 0; row < max_rows; ++row) {
            for (int head = 0; head < heads(); ++head) {
                for (int column = 0; column < 128; ++column) {
                    ASSERT_EQ(query_payload_offset(format(), heads(), row, head, column),
                              test::query_payload_at(format(), heads(), row, head, column));
                }
                for (int block = 0; block < 4 && test::four_bit(format()); ++block) {
                    ASSERT_EQ(query_scale_offset(format(), heads(), max_rows, row, head, block),
                              test::query_scale_at(format(), heads(), max_rows, row, head, block));
                }
            }
        }
    }
}

TEST_P(QueryRow, NoTwoThingsShareAByteAndTheUnusedOnesAreAsManyAsTheContractLeaves) {
    const int64_t max_rows = 3;
    const auto bytes = static_cast<size_t>(query_bytes(format(), heads(), max_rows));
    std::vector<int> payload(bytes);
    std::vector<int> scales(bytes);
    for (int64_t row = 0; row < max_rows; ++row) {
        for (int head = 0; head < heads(); ++head) {
            for (int column = 0; column < 128; ++column) {
                payload.at(static_cast<size_t>(query_payload_offset(format(), heads(), row, head, column)))++;
            }
            for (int block = 0; block < 4 && test::four_bit(format()); ++block) {
                scales.at(static_cast<size_t>(query_scale_offset(format(), heads(), max_rows, row, head, block)))++;
            }
        }
    }
    const int columns_of_a_byte = test::four_bit(format()) ? 2 : 1;
    int64_t unused = 0;
    for (size_t byte = 0; byte < bytes; ++byte) {
        ASSERT_TRUE(payload[byte] == 0 || (payload[byte] == columns_of_a_byte && scales[byte] == 0)) << "byte " << byte;
        ASSERT_LE(scales[byte], 1) << "byte " << byte;
        unused += payload[byte] == 0 && scales[byte] == 0 ? 1 : 0;
    }
    switch (format()) {
    case CacheFormat::mxfp4:  // half of the FP8 row, less the scales
        EXPECT_EQ(unused, max_rows * heads() * 60);
        break;
    case CacheFormat::mxfp4_rowgroup:  // the scales have room for 64 heads
        EXPECT_EQ(unused, max_rows * (64 - heads()) * 4);
        break;
    default:
        EXPECT_EQ(unused, 0);
    }
}

TEST_P(QueryRow, ValuesAreReadWithTheirOwnScales) {
    test::Random random;
    SCOPED_TRACE(random.trace());
    const int64_t max_rows = 3;
    std::vector<uint8_t> query(static_cast<size_t>(query_bytes(format(), heads(), max_rows)));
    for (uint8_t& byte : query) {
        byte = static_cast<uint8_t>(random.integer(1, 254));
    }
    for (int64_t row = 0; row < max_rows; ++row) {
        for (int head = 0; head < heads(); ++head) {
            for (int column = 0; column < 128; ++column) {
                const int byte = query[static_cast<size_t>(test::query_payload_at(format(), heads(), row, head, column))];
                double value = test::e4m3_value(byte);
                if (test::four_bit(format())) {
                    const int scale = query[static_cast<size_t>(
                        test::query_scale_at(format(), heads(), max_rows, row, head, column / 32))];
                    value = std::ldexp(test::e2m1_value(column % 2 == 0 ? byte % 16 : byte / 16), scale - 127);
                    value = std::fabs(value) >= 0x1p128 ? std::copysign(test::infinity, value) : value;
                }
                const double read = query_value(format(), query.data(), heads(), max_rows, row, head, column);
                ASSERT_TRUE(read == value || (std::isnan(read) && std::isnan(value)))
                    << "row " << row << " head " << head << " column " << column << ": " << read << ", must be " << value;
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(FormatsAndHeads, QueryRow,
                         ::testing::Combine(::testing::ValuesIn(test::all_formats), ::testing::ValuesIn(all_heads)),
                         name_of);

TEST(QueryOffsets, Are64Bit) {
    // 2^18 rows of 64 heads are 2^31 bytes.
    const int64_t rows = int64_t{1} << 20U;
    EXPECT_EQ(query_payload_offset(CacheFormat::fp8, 64, rows - 1, 63, 127), (int64_t{1} << 33U) - 1);
    EXPECT_EQ(query_payload_offset(CacheFormat::mxfp4, 64, rows - 1, 0, 0), (rows - 1) * 8192);
    EXPECT_EQ(query_payload_offset(CacheFormat::mxfp4_rowgroup, 64, rows - 1, 63, 127), (int64_t{1} << 32U) - 1);
    EXPECT_EQ(query_scale_offset(CacheFormat::mxfp4, 64, rows, rows - 1, 63, 3), (rows - 1) * 8192 + 4096 + 255);
    EXPECT_EQ(query_scale_offset(CacheFormat::mxfp4_rowgroup, 64, rows, rows - 1, 63, 3), rows * (4096 + 256) - 1);
    EXPECT_EQ(query_bytes(CacheFormat::fp8, 64, rows), int64_t{1} << 33U);
    EXPECT_EQ(query_bytes(CacheFormat::mxfp4, 64, rows), int64_t{1} << 33U);
    EXPECT_EQ(query_bytes(CacheFormat::mxfp4_rowgroup, 64, rows), rows * (4096 + 256));
}

TEST(HeadWeightFactor, HasTheBitsOfTheContract) {
    EXPECT_EQ(bits_of(head_weight_factor(16)), 0x3CB504F3U);
    EXPECT_EQ(bits_of(head_weight_factor(32)), 0x3C800000U);
    EXPECT_EQ(bits_of(head_weight_factor(64)), 0x3C3504F3U);
}

TEST(HeadWeightFactor, IsTheReciprocalRootOfHeadsTimesColumns) {
    for (const int heads : all_heads) {
        EXPECT_EQ(head_weight_factor(heads), static_cast<float>(1.0L / std::sqrt(static_cast<long double>(heads * 128))));
    }
}

TEST(ValidHeads, AreThreeCounts) {
    for (int heads = -1; heads <= 256; ++heads) {
        EXPECT_EQ(valid_heads(heads), heads == 16 || heads == 32 || heads == 64) << heads;
    }
}

}  // namespace
}  // namespace stepgraph
