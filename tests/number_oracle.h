// The number formats said once more, in double and by search: what the library's bit arithmetic is compared with.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <cuda_bf16.h>

namespace stepgraph::test {

inline constexpr double infinity = std::numeric_limits<double>::infinity();
inline constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

/// Value of a BF16 bit pattern.
inline double bf16_value(uint32_t bits) {
    const int exponent = static_cast<int>(bits >> 7U & 0xFFU);
    const int mantissa = static_cast<int>(bits & 0x7FU);
    const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
    if (exponent == 255) {
        return mantissa != 0 ? not_a_number : sign * infinity;
    }
    return sign * (exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134));
}

inline double bf16_value(__nv_bfloat16 x) {
    return bf16_value(std::bit_cast<uint16_t>(x));
}

/// `x` rounded to BF16, to nearest even, as a double; overflow gives infinity.
inline double rounded_to_bf16(double x) {
    if (x == 0 || !std::isfinite(x)) {
        return x;
    }
    const int quantum = std::max(std::ilogb(x), -126) - 7;
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -quantum)), quantum);
    return std::fabs(rounded) >= 0x1p128 ? std::copysign(infinity, x) : rounded;
}

/// Values of the non-negative codes of a small float format, ascending, its NaN left out.
inline std::vector<double> e4m3_magnitudes() {
    std::vector<double> values;
    for (int code = 0; code < 0x7F; ++code) {
        const int exponent = code / 8;
        values.push_back(exponent == 0 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, exponent - 10));
    }
    return values;
}

inline std::vector<double> e2m1_magnitudes() {
    return {0, 0.5, 1, 1.5, 2, 3, 4, 6};
}

/// Code of the magnitude nearest to |x|, of the even code where two are as near; beyond the largest, the largest.
inline int nearest_code(const std::vector<double>& magnitudes, double x) {
    const double wanted = std::min(std::fabs(x), magnitudes.back());
    const auto above = std::lower_bound(magnitudes.begin(), magnitudes.end(), wanted) - magnitudes.begin();
    const int code = static_cast<int>(above);
    if (code == 0) {
        return 0;
    }
    const double up = magnitudes[static_cast<size_t>(code)] - wanted;
    const double down = wanted - magnitudes[static_cast<size_t>(code - 1)];
    return up < down || (up == down && code % 2 == 0) ? code : code - 1;
}

inline int e4m3_code(double x) {
    static const std::vector<double> magnitudes = e4m3_magnitudes();
    if (std::isnan(x)) {
        return 0x7F;
    }
    return nearest_code(magnitudes, x) + (std::signbit(x) ? 0x80 : 0);
}

inline int e2m1_code(double x) {
    static const std::vector<double> magnitudes = e2m1_magnitudes();
    if (std::isnan(x)) {
        return 7;
    }
    return nearest_code(magnitudes, x) + (std::signbit(x) ? 8 : 0);
}

inline double e4m3_value(int code) {
    static const std::vector<double> magnitudes = e4m3_magnitudes();
    const int magnitude = code & 0x7F;
    const double value = magnitude == 0x7F ? not_a_number : magnitudes[static_cast<size_t>(magnitude)];
    return code >= 0x80 ? -value : value;
}

inline double e2m1_value(int code) {
    static const std::vector<double> magnitudes = e2m1_magnitudes();
    const double value = magnitudes[static_cast<size_t>(code & 7)];
    return (code & 8) != 0 ? -value : value;
}

/// The exponent of the FP8 scale as it is defined. An infinite maximum counts as 2^128, the first number that BF16 lacks.
inline int fp8_exponent(double amax) {
    const long double least = std::max<long double>(1e-10L, std::min(amax, 0x1p128));
    return static_cast<int>(std::ceil(std::log2(least / 448.0L)));
}

/// The MXFP4 scale byte as it is defined, by trial: the first scale under which the maximum fits.
inline int mxfp4_byte(double amax) {
    if (std::isinf(amax)) {
        return 254;
    }
    int byte = 1;
    while (std::ldexp(6.0, byte - 127) < amax) {
        ++byte;
    }
    return byte;
}

/// Absolute maximum, NaN ignored.
inline double largest_magnitude(const double* values, int n) {
    double largest = 0;
    for (int i = 0; i < n; ++i) {
        if (std::fabs(values[i]) > largest) {
            largest = std::fabs(values[i]);
        }
    }
    return largest;
}

}  // namespace stepgraph::test
