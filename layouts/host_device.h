// Marks functions that compile for host and device alike, and the float operations whose rounding both must share.
#pragma once

#include <cstdint>

#include <cmath>

#if defined(__CUDACC__)
#define STEPGRAPH_HD __host__ __device__
#else
#define STEPGRAPH_HD
#endif

namespace stepgraph {

/// The bit pattern of a float, and back.
STEPGRAPH_HD constexpr uint32_t bits_of(float x) {
    return __builtin_bit_cast(uint32_t, x);
}
STEPGRAPH_HD constexpr float float_of(uint32_t bits) {
    return __builtin_bit_cast(float, bits);
}

// Single operations, rounded to nearest even. On the device they are intrinsics that the compiler may not contract into
// FMA; on the host the library is compiled with -ffp-contract=off. That is what makes the stages bit-identical on both.

STEPGRAPH_HD inline float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

STEPGRAPH_HD inline float sub_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fsub_rn(a, b);
#else
    return a - b;
#endif
}

STEPGRAPH_HD inline float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

STEPGRAPH_HD inline float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

STEPGRAPH_HD inline float sqrt_rn(float x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return std::sqrt(x);
#endif
}

/// The larger of `amax` and |x|; a NaN is ignored. Not fmaxf(): the host's gives NaN for a signalling one, the device's does
/// not.
STEPGRAPH_HD inline float max_magnitude(float amax, float x) {
    const float magnitude = fabsf(x);
    return magnitude > amax ? magnitude : amax;
}

/// max(0, x) that keeps a NaN: what the spec calls relu (`max.NaN`).
STEPGRAPH_HD inline float relu_keep_nan(float x) {
    return x < 0.0F ? 0.0F : x;
}

}  // namespace stepgraph
