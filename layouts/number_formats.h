// BF16, E4M3, E2M1 and UE8M0, and the power-of-two scales of FP8 and MXFP4 blocks.
//
// Every function runs on host and device and gives the same bits on both. None allocates, synchronises or fails.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include "host_device.h"

namespace stepgraph {

/// BF16, round to nearest even; overflow gives infinity, NaN gives 0x7FFF.
STEPGRAPH_HD inline __nv_bfloat16 bf16_from_float(float x) {
    return __float2bfloat16_rn(x);
}
STEPGRAPH_HD inline float float_from_bf16(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
/// `x` rounded to BF16, as a float.
STEPGRAPH_HD inline float round_to_bf16(float x) {
    return float_from_bf16(bf16_from_float(x));
}

/// E4M3, round to nearest even, saturating at +-448; NaN gives 0x7F.
STEPGRAPH_HD inline uint8_t e4m3_from_float(float x) {
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

/// The codes of `low` and, in the next byte, of `high`.
STEPGRAPH_HD inline uint32_t e4m3_pair_from_floats(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

/// The value of an E4M3 code. Its seven low bits, put where a float has exponent and mantissa, are the value times 2^-120,
/// subnormals included.
STEPGRAPH_HD constexpr float float_from_e4m3(uint8_t code) {
    const uint32_t magnitude = code & 0x7FU;
    const float value = float_of(magnitude << 20U) * 0x1p120F;
    return float_of((magnitude == 0x7FU ? 0x7FC00000U : bits_of(value)) | static_cast<uint32_t>(code & 0x80U) << 24U);
}

/// E2M1, round to nearest even, saturating at +-6; NaN gives +6 (code 7), a small negative value keeps its sign (code 8).
/// The same codes as __nv_cvt_float_to_fp4() of CUDA's header, which takes hundreds of instructions where the GPU has none
/// for it.
STEPGRAPH_HD inline uint8_t e2m1_from_float(float x) {
    const uint32_t magnitude = bits_of(x) & 0x7FFFFFFFU;
    // Below 1 the codes are multiples of 0.5, which is the last place of 2^22. From 1 on, a code is the exponent and the
    // first bit of the mantissa, rounded.
    const uint32_t multiple = bits_of(add_rn(float_of(magnitude), 0x1p22F)) & 3U;
    const uint32_t rounded = ((magnitude + 0x1FFFFFU + (magnitude >> 22U & 1U)) >> 22U) - (126U << 1U);
    const uint32_t code = magnitude < 0x3F800000U ? multiple : rounded < 7U ? rounded : 7U;
    const uint32_t sign = magnitude <= 0x7F800000U ? bits_of(x) >> 28U & 8U : 0U;
    return static_cast<uint8_t>(code | sign);
}

/// The value of the low four bits of `code`.
STEPGRAPH_HD constexpr float float_from_e2m1(uint8_t code) {
    const uint32_t exponent = (code >> 1U) & 3U;
    const uint32_t mantissa = code & 1U;
    const uint32_t sign = static_cast<uint32_t>(code & 8U) << 28U;
    const uint32_t subnormal = mantissa != 0 ? bits_of(0.5F) : 0U;
    const uint32_t normal = ((exponent + 126U) << 23U) | (mantissa << 22U);
    return float_of(sign | (exponent == 0 ? subnormal : normal));
}

/// 2^exponent for -127 <= exponent <= 127, exactly; 2^-127 is subnormal.
STEPGRAPH_HD constexpr float power_of_two(int exponent) {
    return float_of(exponent == -127 ? 0x00400000U : static_cast<uint32_t>(exponent + 127) << 23U);
}

/// Smallest maximum that an FP8 block is scaled for.
inline constexpr float fp8_smallest_amax = 1e-10F;

/// Exponent k of the FP8 scale 2^k = 2^ceil(log2(max(1e-10, amax) / 448)); -42 <= k <= 120.
/// `amax` >= 0, not NaN. 448 = 1.75 * 2^8, so the exponent of amax rises by one where its mantissa exceeds 0.75.
STEPGRAPH_HD constexpr int fp8_scale_exponent(float amax) {
    const uint32_t bits = bits_of(amax);
    const int exponent = static_cast<int>(bits >> 23U) - 127 - 8 + ((bits & 0x7FFFFFU) > 0x600000U ? 1 : 0);
    return exponent > -42 ? exponent : -42;
}

/// UE8M0 byte of the MXFP4 scale of a block with absolute maximum `amax` >= 0, not NaN; 1..254.
/// 6 = 1.5 * 2^2, so the exponent of amax rises by one where its mantissa exceeds 0.5.
STEPGRAPH_HD constexpr uint8_t mxfp4_scale_byte(float amax) {
    const uint32_t bits = bits_of(amax);
    const int exponent = static_cast<int>(bits >> 23U);
    if (exponent == 255) {
        return 254;
    }
    const int byte = exponent - 2 + ((bits & 0x7FFFFFU) > 0x400000U ? 1 : 0);
    return static_cast<uint8_t>(byte > 1 ? byte : 1);
}

/// The scale that a UE8M0 byte of 0..254 stands for, and the factor that a value is multiplied with before E2M1.
STEPGRAPH_HD constexpr float ue8m0_scale(uint8_t byte) {
    return power_of_two(static_cast<int>(byte) - 127);
}
STEPGRAPH_HD constexpr float ue8m0_inverse(uint8_t byte) {
    return power_of_two(127 - static_cast<int>(byte));
}

/// UE8M0 byte of the power of two 2^exponent.
STEPGRAPH_HD constexpr uint8_t ue8m0_byte(int exponent) {
    return static_cast<uint8_t>(exponent + 127);
}

}  // namespace stepgraph
