// BF16, E4M3, E2M1, UE8M0 and the scales of blocks, against their definitions in double.
#include <stepgraph/layouts/number_formats.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "number_oracle.h"
#include "random.h"

namespace stepgraph {
namespace {

constexpr uint32_t bf16_infinity = 0x7F80;

float from_bf16_bits(uint32_t bits) {
    return float_of(bits << 16U);
}

uint32_t bf16_bits(__nv_bfloat16 x) {
    return std::bit_cast<uint16_t>(x);
}

/// Equal as numbers and in the sign of zero; any NaN equals any NaN.
bool same(double a, double b) {
    return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

TEST(E4m3, EveryCodeDecodesToItsValueAndRoundTrips) {
    for (int code = 0; code < 256; ++code) {
        const float value = float_from_e4m3(static_cast<uint8_t>(code));
        EXPECT_TRUE(same(value, test::e4m3_value(code))) << "code " << code << " is " << value;
        EXPECT_EQ(e4m3_from_float(value), code == 0xFF ? 0x7F : code);
    }
}

TEST(E4m3, KnownCodesHaveTheirKnownValues) {
    EXPECT_EQ(float_from_e4m3(0x00), 0.0F);
    EXPECT_EQ(float_from_e4m3(0x01), 0x1p-9F);
    EXPECT_EQ(float_from_e4m3(0x07), 7 * 0x1p-9F);
    EXPECT_EQ(float_from_e4m3(0x08), 0x1p-6F);
    EXPECT_EQ(float_from_e4m3(0x38), 1.0F);
    EXPECT_EQ(float_from_e4m3(0x7E), 448.0F);
    EXPECT_EQ(float_from_e4m3(0xFE), -448.0F);
    EXPECT_TRUE(std::isnan(float_from_e4m3(0x7F)));
    EXPECT_TRUE(std::isnan(float_from_e4m3(0xFF)));
}

TEST(E4m3, DecodesAsTheCudaHeaderDoes) {
    for (int code = 0; code < 256; ++code) {
        const __half theirs(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3));
        EXPECT_TRUE(same(float_from_e4m3(static_cast<uint8_t>(code)), __half2float(theirs))) << "code " << code;
    }
}

TEST(E4m3, EveryTieGoesToTheEvenCodeAndItsNeighboursToTheNearer) {
    for (int code = 0; code < 0x7E; ++code) {
        const auto tie = static_cast<float>((test::e4m3_value(code) + test::e4m3_value(code + 1)) / 2);
        const int even = code % 2 == 0 ? code : code + 1;
        EXPECT_EQ(e4m3_from_float(tie), even) << tie;
        EXPECT_EQ(e4m3_from_float(-tie), even + 0x80) << tie;
        EXPECT_EQ(e4m3_from_float(std::nextafter(tie, 0.0F)), code) << tie;
        EXPECT_EQ(e4m3_from_float(std::nextafter(tie, 1e9F)), code + 1) << tie;
    }
}

TEST(E4m3, SaturatesAndKeepsSignsAndHasOneNan) {
    for (const float beyond : {448.0F, 449.0F, 464.0F, 480.0F, 512.0F, 1e30F, std::numeric_limits<float>::infinity()}) {
        EXPECT_EQ(e4m3_from_float(beyond), 0x7E) << beyond;
        EXPECT_EQ(e4m3_from_float(-beyond), 0xFE) << beyond;
    }
    for (const float tiny : {0.0F, 1e-45F, 1e-30F, 0x1p-10F}) {
        EXPECT_EQ(e4m3_from_float(tiny), 0x00) << tiny;
        EXPECT_EQ(e4m3_from_float(-tiny), 0x80) << tiny;
    }
    for (const uint32_t nan : {0x7FC00000U, 0xFFC00000U, 0x7F800001U, 0xFF800001U, 0x7FFFFFFFU, 0xFFFFFFFFU}) {
        EXPECT_EQ(e4m3_from_float(float_of(nan)), 0x7F) << std::hex << nan;
    }
}

TEST(E4m3, APairHoldsTheCodesOfBothNumbers) {
    std::mt19937 random(std::random_device{}());
    for (int i = 0; i < 1'000'000; ++i) {
        const float low = float_of(static_cast<uint32_t>(random()));
        const float high = float_of(static_cast<uint32_t>(random()) & 0xC7FFFFFFU);  // often in range
        ASSERT_EQ(e4m3_pair_from_floats(low, high), e4m3_from_float(low) | uint32_t{e4m3_from_float(high)} << 8U)
            << low << " and " << high;
    }
}

TEST(E2m1, EveryCodeDecodesToItsValueAndRoundTrips) {
    for (int code = 0; code < 256; ++code) {  // the high four bits are the neighbour's
        const float value = float_from_e2m1(static_cast<uint8_t>(code));
        EXPECT_TRUE(same(value, test::e2m1_value(code % 16))) << "code " << code << " is " << value;
        EXPECT_EQ(e2m1_from_float(value), code % 16);
    }
}

TEST(E2m1, DecodesAsTheCudaHeaderDoes) {
    for (int code = 0; code < 16; ++code) {
        const __half theirs(__nv_cvt_fp4_to_halfraw(static_cast<__nv_fp4_storage_t>(code), __NV_E2M1));
        EXPECT_TRUE(same(float_from_e2m1(static_cast<uint8_t>(code)), __half2float(theirs))) << "code " << code;
    }
}

TEST(E2m1, EncodesAsTheCudaHeaderDoes) {
    std::mt19937 random(std::random_device{}());
    for (int i = 0; i < 2'000'000; ++i) {
        // All bit patterns, and as many of magnitudes near those that codes have.
        const uint32_t any = static_cast<uint32_t>(random());
        const float x = float_of(i % 2 == 0 ? any : (any & 0x83FFFFFFU) | 0x3C000000U);
        ASSERT_EQ(e2m1_from_float(x), __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest)) << std::hex << bits_of(x);
    }
}

TEST(E2m1, EveryTieGoesToTheEvenCodeAndItsNeighboursToTheNearer) {
    for (int code = 0; code < 7; ++code) {
        const auto tie = static_cast<float>((test::e2m1_value(code) + test::e2m1_value(code + 1)) / 2);
        const int even = code % 2 == 0 ? code : code + 1;
        EXPECT_EQ(e2m1_from_float(tie), even) << tie;
        EXPECT_EQ(e2m1_from_float(-tie), even + 8) << tie;
        EXPECT_EQ(e2m1_from_float(std::nextafter(tie, 0.0F)), code) << tie;
        EXPECT_EQ(e2m1_from_float(std::nextafter(tie, 1e9F)), code + 1) << tie;
    }
}

TEST(E2m1, SaturatesAndKeepsSignsAndTurnsNanIntoSix) {
    for (const float beyond : {6.0F, 6.5F, 7.0F, 8.0F, 1e30F, std::numeric_limits<float>::infinity()}) {
        EXPECT_EQ(e2m1_from_float(beyond), 7) << beyond;
        EXPECT_EQ(e2m1_from_float(-beyond), 15) << beyond;
    }
    for (const float tiny : {0.0F, 1e-45F, 1e-30F, 0.25F}) {
        EXPECT_EQ(e2m1_from_float(tiny), 0) << tiny;
        EXPECT_EQ(e2m1_from_float(-tiny), 8) << tiny;
    }
    for (const uint32_t nan : {0x7FC00000U, 0xFFC00000U, 0x7F800001U, 0xFF800001U, 0x7FFFFFFFU, 0xFFFFFFFFU}) {
        EXPECT_EQ(e2m1_from_float(float_of(nan)), 7) << std::hex << nan;
    }
}

// Every value that a query or a key can hold under every scale that its block can have.

TEST(E4m3, EveryBf16ValueUnderEveryScaleGoesToTheNearestCode) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const double x = test::bf16_value(bits);
        for (int exponent = -42; exponent <= 120; ++exponent) {
            const int code = e4m3_from_float(from_bf16_bits(bits) * power_of_two(-exponent));
            ASSERT_EQ(code, test::e4m3_code(std::ldexp(x, -exponent))) << x << " at scale 2^" << exponent;
        }
    }
}

TEST(E2m1, EveryBf16ValueUnderEveryScaleGoesToTheNearestCode) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const double x = test::bf16_value(bits);
        for (int byte = 1; byte <= 254; ++byte) {
            const int code = e2m1_from_float(from_bf16_bits(bits) * ue8m0_inverse(static_cast<uint8_t>(byte)));
            ASSERT_EQ(code, test::e2m1_code(std::ldexp(x, 127 - byte))) << x << " at scale byte " << byte;
        }
    }
}

TEST(Bf16, RoundsToNearestEvenAndOverflowsToInfinity) {
    for (uint32_t high = 0; high < 0x10000; ++high) {
        for (const uint32_t low : {0x0000U, 0x0001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
            const float x = float_of(high << 16U | low);
            const uint32_t bits = bf16_bits(bf16_from_float(x));
            if (std::isnan(x)) {
                ASSERT_EQ(bits, 0x7FFFU) << std::hex << bits_of(x);
                ASSERT_TRUE(std::isnan(round_to_bf16(x)));
            } else {
                ASSERT_TRUE(same(test::bf16_value(bits), test::rounded_to_bf16(x))) << std::hexfloat << x;
                ASSERT_TRUE(same(round_to_bf16(x), test::rounded_to_bf16(x))) << std::hexfloat << x;
            }
        }
    }
    EXPECT_EQ(bf16_bits(bf16_from_float(std::numeric_limits<float>::max())), bf16_infinity);
    EXPECT_EQ(bf16_bits(bf16_from_float(-std::numeric_limits<float>::max())), 0x8000U | bf16_infinity);
}

TEST(Bf16, EveryPatternWidensExactly) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const float value = float_from_bf16(std::bit_cast<__nv_bfloat16>(static_cast<uint16_t>(bits)));
        ASSERT_TRUE(same(value, test::bf16_value(bits))) << std::hex << bits;
    }
}

TEST(PowerOfTwo, IsExactOverItsWholeRange) {
    for (int exponent = -127; exponent <= 127; ++exponent) {
        EXPECT_EQ(static_cast<double>(power_of_two(exponent)), std::ldexp(1.0, exponent)) << exponent;
    }
}

TEST(Ue8m0, ByteScaleAndInverseBelongTogether) {
    for (int byte = 0; byte <= 254; ++byte) {
        const auto code = static_cast<uint8_t>(byte);
        EXPECT_EQ(static_cast<double>(ue8m0_scale(code)), std::ldexp(1.0, byte - 127));
        EXPECT_EQ(static_cast<double>(ue8m0_inverse(code)), std::ldexp(1.0, 127 - byte));
        EXPECT_EQ(ue8m0_byte(byte - 127), byte);
    }
}

TEST(Mxfp4Scale, OfEveryBf16MaximumIsTheRecordedByte) {
    std::ifstream file(std::string(STEPGRAPH_TEST_DATA) + "/mxfp4_scale_bf16.bin", std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    ASSERT_EQ(bytes.size(), bf16_infinity + 1);
    for (uint32_t bits = 0; bits <= bf16_infinity; ++bits) {
        ASSERT_EQ(mxfp4_scale_byte(from_bf16_bits(bits)), static_cast<uint8_t>(bytes[bits])) << std::hex << bits;
    }
}

TEST(Mxfp4Scale, IsTheSmallestUnderWhichTheMaximumFits) {
    for (uint32_t bits = 0; bits <= bf16_infinity; ++bits) {
        ASSERT_EQ(mxfp4_scale_byte(from_bf16_bits(bits)), test::mxfp4_byte(test::bf16_value(bits))) << std::hex << bits;
    }
}

TEST(Fp8Scale, OfEveryBf16MaximumIsTheCeilingOfTheLogarithm) {
    for (uint32_t bits = 0; bits <= bf16_infinity; ++bits) {
        ASSERT_EQ(fp8_scale_exponent(from_bf16_bits(bits)), test::fp8_exponent(test::bf16_value(bits))) << std::hex << bits;
    }
}

TEST(Fp8Scale, StepsUpOneBf16StepAboveEveryLargestMaximum) {
    for (int k = -41; k <= 119; ++k) {
        const float largest = std::ldexp(448.0F, k);
        ASSERT_TRUE(std::isfinite(largest));
        const uint32_t bits = bits_of(largest) >> 16U;
        EXPECT_EQ(fp8_scale_exponent(from_bf16_bits(bits - 1)), k) << k;
        EXPECT_EQ(fp8_scale_exponent(from_bf16_bits(bits)), k) << k;
        EXPECT_EQ(fp8_scale_exponent(from_bf16_bits(bits + 1)), k + 1) << k;
    }
}

TEST(Mxfp4Scale, StepsUpOneBf16StepAboveEveryLargestMaximum) {
    for (int byte = 1; byte <= 252; ++byte) {
        const float largest = std::ldexp(6.0F, byte - 127);
        ASSERT_TRUE(std::isfinite(largest));
        const uint32_t bits = bits_of(largest) >> 16U;
        EXPECT_EQ(mxfp4_scale_byte(from_bf16_bits(bits - 1)), byte);
        EXPECT_EQ(mxfp4_scale_byte(from_bf16_bits(bits)), byte);
        EXPECT_EQ(mxfp4_scale_byte(from_bf16_bits(bits + 1)), byte + 1);
    }
}

TEST(BlockScales, AtTheEndsOfTheRangeAreAsTheContractSays) {
    const float inf = std::numeric_limits<float>::infinity();
    EXPECT_EQ(fp8_scale_exponent(0.0F), -42);
    EXPECT_EQ(fp8_scale_exponent(1e-45F), -42);
    EXPECT_EQ(fp8_scale_exponent(fp8_smallest_amax), -42);
    EXPECT_EQ(fp8_scale_exponent(inf), 120);
    EXPECT_EQ(mxfp4_scale_byte(0.0F), 1);
    EXPECT_EQ(mxfp4_scale_byte(1e-45F), 1);
    EXPECT_EQ(mxfp4_scale_byte(std::ldexp(6.0F, -126)), 1);
    EXPECT_EQ(mxfp4_scale_byte(from_bf16_bits(0x7F7F)), 253);
    EXPECT_EQ(mxfp4_scale_byte(inf), 254);
}

TEST(BlockScales, OfArbitraryFp32MaximaFollowTheirDefinition) {
    test::Random random;
    SCOPED_TRACE(random.trace());
    for (int i = 0; i < 100000; ++i) {
        const float amax = float_of(static_cast<uint32_t>(random.integer(0, 0x7F7FFFFF)));
        ASSERT_EQ(fp8_scale_exponent(amax), test::fp8_exponent(amax)) << std::hexfloat << amax;
        ASSERT_EQ(mxfp4_scale_byte(amax), test::mxfp4_byte(amax)) << std::hexfloat << amax;
    }
}

TEST(BlockScales, NeverSaturateABlockAndNeverWasteABit) {
    for (uint32_t bits = 0; bits < bf16_infinity; ++bits) {
        const double amax = test::bf16_value(bits);
        const double fp8 = std::ldexp(amax, -fp8_scale_exponent(from_bf16_bits(bits)));
        ASSERT_LE(fp8, 448.0) << amax;
        const double mxfp4 = std::ldexp(amax, 127 - mxfp4_scale_byte(from_bf16_bits(bits)));
        ASSERT_LE(mxfp4, 6.0) << amax;
        if (amax > 1e-9) {  // above the smallest maximum of either
            ASSERT_GT(fp8, 224.0) << amax;
            ASSERT_GT(mxfp4, 3.0) << amax;
        }
    }
}

TEST(BlockScales, KeepTheMaximumWithinHalfACodeJustAboveAPowerOfTwo) {
    for (int k = -30; k <= 100; ++k) {
        const float amax = from_bf16_bits((bits_of(std::ldexp(1.0F, k)) >> 16U) + 1);
        const int exponent = fp8_scale_exponent(amax);
        const float fp8 = float_from_e4m3(e4m3_from_float(amax * power_of_two(-exponent))) * power_of_two(exponent);
        EXPECT_NEAR(fp8 / amax, 1.0F, 1.0F / 16) << "half of E4M3's step of 1/8, at " << amax;
        const uint8_t byte = mxfp4_scale_byte(amax);
        const float mxfp4 = float_from_e2m1(e2m1_from_float(amax * ue8m0_inverse(byte))) * ue8m0_scale(byte);
        EXPECT_NEAR(mxfp4 / amax, 1.0F, 1.0F / 4) << "half of E2M1's step of 1/2, at " << amax;
    }
}

TEST(MaxMagnitude, IgnoresNanAndReluKeepsIt) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    EXPECT_EQ(max_magnitude(2.0F, nan), 2.0F);
    EXPECT_EQ(max_magnitude(2.0F, -3.0F), 3.0F);
    EXPECT_EQ(max_magnitude(0.0F, -std::numeric_limits<float>::infinity()), std::numeric_limits<float>::infinity());
    EXPECT_TRUE(std::isnan(relu_keep_nan(nan)));
    EXPECT_EQ(relu_keep_nan(-1.0F), 0.0F);
    EXPECT_EQ(relu_keep_nan(0.5F), 0.5F);
}

}  // namespace
}  // namespace stepgraph
