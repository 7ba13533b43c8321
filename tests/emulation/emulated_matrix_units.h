// matrix_units.h for the emulator, as far as the emulated kernels use it.
#pragma once

#include <array>
#include <bit>

#include "cuda_runtime.h"

namespace stepgraph::sm90 {

inline std::array<uint32_t, 32> of_all_lanes(uint32_t mine, uintptr_t place) {
    std::array<uint32_t, 32> all{};
    std::copy_n(emulation::meet_warp(mine, place), 32, all.begin());
    return all;
}

/// Half `k % 2` of a word, as a number.
inline float bf16_half(uint32_t word, int k) {
    return std::bit_cast<float>(k % 2 == 0 ? word << 16U : word & 0xFFFF0000U);
}

inline void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                     STEPGRAPH_PLACE) {
    const std::array<std::array<uint32_t, 32>, 4> a = {of_all_lanes(a0, place), of_all_lanes(a1, place),
                                                       of_all_lanes(a2, place), of_all_lanes(a3, place)};
    const std::array<std::array<uint32_t, 32>, 2> b = {of_all_lanes(b0, place), of_all_lanes(b1, place)};
    const int lane = emulation::thread() % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8;
        const int column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const auto word = static_cast<size_t>(row / 8 + k / 8 * 2);
            const auto row_lane = static_cast<size_t>(row % 8 * 4 + k % 8 / 2);
            const auto column_lane = static_cast<size_t>(column * 4 + k % 8 / 2);
            d[i] += bf16_half(a[word][row_lane], k) * bf16_half(b[static_cast<size_t>(k / 8)][column_lane], k);
        }
    }
}

}  // namespace stepgraph::sm90
