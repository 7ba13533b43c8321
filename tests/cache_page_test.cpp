// Which byte of a page holds what, against the page said as arrays.
#include <stepgraph/layouts/cache_page.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "number_oracle.h"
#include "page_oracle.h"
#include "random.h"

namespace stepgraph {
namespace {

class CachePage : public ::testing::TestWithParam<CacheFormat> {};

TEST_P(CachePage, OffsetsAreThoseOfTheArrays) {
    const CacheFormat format = GetParam();
    std::vector<uint8_t> page(sizeof(test::Page));
    for (int token = 0; token < 64; ++token) {
        for (int column = 0; column < 128; ++column) {
            ASSERT_EQ(payload_offset(format, token, column),
                      test::payload_byte(format, page.data(), token, column) - page.data());
        }
        for (int block = 0; block < 4; ++block) {
            ASSERT_EQ(scale_offset(format, token, block), test::scale_byte(format, page.data(), token, block) - page.data());
        }
    }
}

TEST_P(CachePage, PayloadAndScalesCoverEveryByteOnce) {
    const CacheFormat format = GetParam();
    const int columns_of_a_byte = test::four_bit(format) ? 2 : 1;
    std::vector<int> payload(static_cast<size_t>(page_bytes(format)));
    std::vector<int> scales(payload.size());
    for (int token = 0; token < 64; ++token) {
        for (int column = 0; column < 128; ++column) {
            payload.at(static_cast<size_t>(payload_offset(format, token, column)))++;
        }
        for (int block = 0; block < 4; ++block) {
            scales.at(static_cast<size_t>(scale_offset(format, token, block)))++;
        }
    }
    for (size_t byte = 0; byte < payload.size(); ++byte) {
        const bool holds_payload = payload[byte] == columns_of_a_byte && scales[byte] == 0;
        const bool holds_scale = payload[byte] == 0 && scales[byte] == 1;
        ASSERT_TRUE(holds_payload || holds_scale) << "byte " << byte;
    }
}

TEST_P(CachePage, ValuesAreReadWithTheirOwnScales) {
    const CacheFormat format = GetParam();
    test::Random random;
    SCOPED_TRACE(random.trace());
    std::vector<uint8_t> page(sizeof(test::Page));
    for (uint8_t& byte : page) {
        byte = random.byte();
    }
    for (int token = 0; token < 64; ++token) {
        for (int block = 0; block < 4; ++block) {  // scales whose products stay inside FP32
            *test::scale_byte(format, page.data(), token, block) = static_cast<uint8_t>(random.integer(20, 230));
        }
        const float fp32_scale = random.uniform(1e-6F, 1e6F);
        if (format == CacheFormat::fp8) {
            std::memcpy(test::scale_byte(format, page.data(), token, 0), &fp32_scale, 4);
        }
        const int first_byte = *test::scale_byte(format, page.data(), token, 0);
        const double token_scale = format == CacheFormat::fp8      ? static_cast<double>(fp32_scale)
                                   : format == CacheFormat::fp8_mx ? std::ldexp(1.0, first_byte - 127)
                                                                   : 1.0;
        ASSERT_EQ(static_cast<double>(key_scale(format, page.data(), token)), token_scale) << "token " << token;
        for (int column = 0; column < 128; ++column) {
            const int byte = *test::payload_byte(format, page.data(), token, column);
            double value = test::e4m3_value(byte);
            if (test::four_bit(format)) {
                const int block_scale = *test::scale_byte(format, page.data(), token, column / 32);
                value = std::ldexp(test::e2m1_value(column % 2 == 0 ? byte % 16 : byte / 16), block_scale - 127);
            }
            const double read = key_value(format, page.data(), token, column);
            ASSERT_TRUE(read == value || (std::isnan(read) && std::isnan(value)))
                << "token " << token << " column " << column << ": " << read << ", must be " << value;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Formats, CachePage, ::testing::ValuesIn(test::all_formats), test::format_name);

TEST(Mxfp4Page, TwoColumnsOfAByteAreNeighboursTheEvenOneLow) {
    for (const CacheFormat format : {CacheFormat::mxfp4, CacheFormat::mxfp4_rowgroup}) {
        for (int token = 0; token < 64; ++token) {
            for (int column = 0; column < 128; column += 2) {
                ASSERT_EQ(payload_offset(format, token, column), payload_offset(format, token, column + 1));
                std::vector<uint8_t> page(sizeof(test::Page), 0);
                *test::scale_byte(format, page.data(), token, column / 32) = 127;  // 1
                *test::payload_byte(format, page.data(), token, column) = 0x52;    // 1 low, 3 high
                ASSERT_EQ(key_value(format, page.data(), token, column), 1.0F);
                ASSERT_EQ(key_value(format, page.data(), token, column + 1), 3.0F);
            }
        }
    }
}

TEST(CachePageSize, IsThatOfTheContract) {
    EXPECT_EQ(page_bytes(CacheFormat::fp8), 8448);
    EXPECT_EQ(page_bytes(CacheFormat::fp8_mx), 8448);
    EXPECT_EQ(page_bytes(CacheFormat::mxfp4), 4352);
    EXPECT_EQ(page_bytes(CacheFormat::mxfp4_rowgroup), 4352);
}

TEST(PageAddress, DoesNotWrapWhere32BitsDo) {
    constexpr uintptr_t base = 0x10000;
    auto* const cache = reinterpret_cast<uint8_t*>(base);
    for (const int64_t stride : {int64_t{4352}, int64_t{8448}, int64_t{1002240}}) {
        const int64_t wrap31 = (int64_t{1} << 31U) / stride;
        const int64_t wrap32 = (int64_t{1} << 32U) / stride;
        for (const int64_t first :
             {int64_t{0}, wrap31, wrap32, int64_t{2142}, int64_t{254200}, int64_t{493448}, 3 * wrap32}) {
            for (const int64_t page : {first - 1, first, first + 1, first + 2}) {
                if (page < 0) {
                    continue;
                }
                const __int128 address = static_cast<__int128>(page) * stride + base;
                ASSERT_TRUE(reinterpret_cast<uintptr_t>(page_address(cache, page, stride)) ==
                            static_cast<uintptr_t>(address))
                    << "page " << page << " stride " << stride;
            }
        }
    }
}

TEST(PageAddress, OfPagesThatOthersGotWrong) {
    auto* const cache = reinterpret_cast<const uint8_t*>(uintptr_t{0x10000});
    const auto offset = [cache](int64_t page, int64_t stride) { return page_address(cache, page, stride) - cache; };
    EXPECT_EQ(offset(254199, 8448), 2147473152);
    EXPECT_EQ(offset(254200, 8448), 2147481600);
    EXPECT_EQ(offset(254201, 8448), 2147490048);  // above 2^31
    EXPECT_EQ(offset(493447, 4352), 2147481344);
    EXPECT_EQ(offset(493448, 4352), 2147485696);   // above 2^31
    EXPECT_EQ(offset(2143, 1002240), 2147800320);  // above 2^31
    EXPECT_EQ(offset(508401, 8448), 4294971648);   // above 2^32
}

TEST(SlotOf, TranslatesEveryOffsetOfEveryBlock) {
    test::Random random;
    SCOPED_TRACE(random.trace());
    const int64_t pages = 1000;
    std::vector<int32_t> blocks(20);
    for (int32_t& block : blocks) {
        block = random.integer32(0, static_cast<int32_t>(pages) - 1);
    }
    int64_t position = 0;
    for (const int32_t block : blocks) {
        for (int64_t offset = 0; offset < 64; ++offset, ++position) {
            ASSERT_EQ(slot_of(blocks.data(), position, pages), int64_t{block} * 64 + offset) << "position " << position;
        }
    }
}

TEST(SlotOf, RefusesBlocksOutsideTheCacheAtEveryOffset) {
    constexpr int32_t most = std::numeric_limits<int32_t>::max();
    constexpr int32_t least = std::numeric_limits<int32_t>::min();
    const int32_t pages = 7;
    for (const int32_t block : {-1, -64, least, pages, pages + 1, pages + 63, most, most - 63}) {
        for (int64_t offset = 0; offset < 64; ++offset) {
            ASSERT_EQ(slot_of(&block, offset, pages), -1) << "block " << block;
        }
    }
    const int32_t last = pages - 1;
    EXPECT_EQ(slot_of(&last, 63, pages), 7 * 64 - 1);
}

TEST(SlotOf, OfTheLargestCacheIs64Bit) {
    constexpr int32_t last = std::numeric_limits<int32_t>::max() - 1;
    EXPECT_EQ(slot_of(&last, 63, int64_t{last} + 1), int64_t{last} * 64 + 63);
}

}  // namespace
}  // namespace stepgraph
