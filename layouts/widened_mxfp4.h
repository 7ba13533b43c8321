// MXFP4 numbers as the E4M3 numbers that Hopper's matrix units multiply.
//
// The 128 numbers that share a dot product, a key or one head of a query, have four scales. Their largest, 2^(m - 127), is
// taken out; a number E2M1 * 2^(b - 127) becomes E2M1 * 2^(6 - (m - b)), which E4M3 holds exactly as long as m - b is at
// most 11. The sign is turned, which a product of two of them does not show.
#pragma once

#include "number_formats.h"

namespace stepgraph {

inline constexpr int most_widened_difference = 11;  // of the scale bytes m and b
// Scale bytes m that leave products, weights and sums within FP32's normal range.
inline constexpr int least_widened_scale = 127 - 60;
inline constexpr int most_widened_scale = 127 + 60;
inline constexpr int widened_scale_of_zeros = 127;        // m where all numbers are 0, which any scale fits
inline constexpr uint32_t e2m1_magnitudes = 0x77777777U;  // of eight codes, the bits beside their signs

/// Whether a number whose scale lies `difference` below the largest, m, can be widened.
STEPGRAPH_HD constexpr bool can_widen(int m, int difference) {
    return difference <= most_widened_difference && m >= least_widened_scale && m <= most_widened_scale;
}

/// The E4M3 codes of magnitudes 0, 0.5, 1, 1.5 (the first in the low byte) and 2, 3, 4, 6, for m - b = `difference`.
STEPGRAPH_HD constexpr uint32_t widened_small(uint32_t difference) {
    return 0x6C686000U - difference * 0x08080800U;
}
STEPGRAPH_HD constexpr uint32_t widened_large(uint32_t difference) {
    return 0x7C787470U - difference * 0x08080808U;
}

/// The E4M3 code of the E2M1 code in the low four bits of `code`, its sign turned.
STEPGRAPH_HD constexpr uint8_t widened(uint8_t code, uint32_t difference) {
    const uint32_t codes = (code & 4U) != 0 ? widened_large(difference) : widened_small(difference);
    const uint32_t magnitude = codes >> (code & 3U) * 8U & 0xFFU;
    return static_cast<uint8_t>(magnitude | (~static_cast<uint32_t>(code) & 8U) << 4U);
}

/// What a sum of products with widened numbers is multiplied by for one of the two that were taken out of it: 2^(m - 127 -
/// 6).
STEPGRAPH_HD constexpr float widened_scale(int m) {
    return float_of(static_cast<uint32_t>(m - 6) << 23U);
}

}  // namespace stepgraph
