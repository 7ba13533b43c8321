// MXFP4 numbers as E4M3: every code at every difference of scales, and what becomes of whole queries.
#include <stepgraph/layouts/widened_mxfp4.h>

#include <array>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include <stepgraph/kernels/reference/widen.h>
#include <stepgraph/layouts/query_row.h>

#include "random.h"

namespace stepgraph::test {
namespace {

TEST(WidenedMxfp4, IsEveryNumberExactlyWithItsSignTurned) {
    for (uint32_t difference = 0; difference <= most_widened_difference; ++difference) {
        for (int code = 0; code < 16; ++code) {
            const auto e2m1 = static_cast<uint8_t>(code);
            const float expected = -std::ldexp(float_from_e2m1(e2m1), 6 - static_cast<int>(difference));
            EXPECT_EQ(float_from_e4m3(widened(e2m1, difference)), expected) << code << ", " << difference;
        }
    }
}

TEST(WidenedMxfp4, ReadsTheLowFourBitsAlone) {
    for (int byte = 0; byte < 256; ++byte) {
        EXPECT_EQ(widened(static_cast<uint8_t>(byte), 3), widened(static_cast<uint8_t>(byte & 15), 3));
    }
}

/// One row of a query, whose codes and scales a test sets.
class Query {
public:
    Query(CacheFormat format, int heads)
        : format_(format), heads_(heads), bytes_(static_cast<size_t>(query_bytes(format, heads, 1))) {}

    void set_code(int head, int column, uint8_t code) {
        uint8_t& pair = bytes_[static_cast<size_t>(query_payload_offset(format_, heads_, 0, head, column))];
        pair = static_cast<uint8_t>(column % 2 == 0 ? (pair & 0xF0) | code : (pair & 0x0F) | code << 4);
    }
    void set_scale(int head, int block, int scale) {
        bytes_[static_cast<size_t>(query_scale_offset(format_, heads_, 1, 0, head, block))] = static_cast<uint8_t>(scale);
    }
    [[nodiscard]] float value(int head, int column) const {
        return query_value(format_, bytes_.data(), heads_, 1, 0, head, column);
    }

    struct Widened {
        std::vector<uint8_t> query;
        std::vector<float> weights;
    };
    [[nodiscard]] Widened widen(const std::vector<float>& weights) const {
        Widened widened{std::vector<uint8_t>(static_cast<size_t>(heads_) * head_dim), std::vector<float>(weights.size())};
        reference::widen_query(format_, heads_, 1, 1, bytes_.data(), weights.data(), widened.query.data(),
                               widened.weights.data());
        return widened;
    }

private:
    CacheFormat format_;
    int heads_;
    std::vector<uint8_t> bytes_;
};

TEST(WidenedMxfp4, KeepsTheProductOfWeightAndNumberInEveryLayout) {
    Random random;
    SCOPED_TRACE(random.trace());
    for (const CacheFormat format : {CacheFormat::mxfp4, CacheFormat::mxfp4_rowgroup}) {
        for (const int heads : {16, 32, 64}) {
            Query query(format, heads);
            std::vector<float> weights(static_cast<size_t>(heads));
            for (int head = 0; head < heads; ++head) {
                weights[static_cast<size_t>(head)] = std::ldexp(1.0F, random.integer32(-9, 9));
                const int largest = random.integer32(least_widened_scale + most_widened_difference, most_widened_scale);
                for (int block = 0; block < 4; ++block) {
                    query.set_scale(head, block, largest - random.integer32(0, most_widened_difference));
                }
                for (int column = 0; column < head_dim; ++column) {
                    query.set_code(head, column, static_cast<uint8_t>(random.integer32(0, 15)));
                }
            }
            const Query::Widened widened = query.widen(weights);
            for (int head = 0; head < heads; ++head) {
                for (int column = 0; column < head_dim; ++column) {
                    const auto h = static_cast<size_t>(head);
                    const float code = float_from_e4m3(widened.query[h * head_dim + static_cast<size_t>(column)]);
                    ASSERT_EQ(-code * widened.weights[h], query.value(head, column) * weights[h])
                        << "head " << head << ", column " << column;
                }
            }
        }
    }
}

/// Whether a head of these scales, whose blocks hold a one where `filled`, can be widened.
bool can_widen(const std::array<int, 4>& scales, const std::array<bool, 4>& filled) {
    Query query(CacheFormat::mxfp4, 16);
    for (int block = 0; block < 4; ++block) {
        query.set_scale(0, block, scales[static_cast<size_t>(block)]);
        if (filled[static_cast<size_t>(block)]) {
            query.set_code(0, block * mxfp4_block + 7, 2);
        }
    }
    return !std::isnan(query.widen(std::vector<float>(16, 1.0F)).weights[0]);
}

TEST(WidenedMxfp4, GivesUpWhereScalesLieTooFarApartOrTooFarFromOne) {
    constexpr std::array<bool, 4> all = {true, true, true, true};
    EXPECT_TRUE(can_widen({127, 127 - 11, 120, 127}, all));
    EXPECT_FALSE(can_widen({127, 127 - 12, 120, 127}, all));
    EXPECT_TRUE(can_widen({67, 67, 67, 67}, all));
    EXPECT_FALSE(can_widen({66, 66, 66, 66}, all));
    EXPECT_TRUE(can_widen({187, 187, 187, 187}, all));
    EXPECT_FALSE(can_widen({187, 188, 187, 187}, all));
    // Of a block of zeros the scale says nothing.
    EXPECT_TRUE(can_widen({254, 127, 1, 127}, {false, true, false, true}));
    EXPECT_TRUE(can_widen({1, 254, 0, 60}, {false, false, false, false}));
}

}  // namespace
}  // namespace stepgraph::test
