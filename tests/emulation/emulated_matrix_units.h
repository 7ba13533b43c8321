// matrix_units.h for the emulator, as far as the emulated kernels use it. Products are computed where they are asked for.
#pragma once

#include <bit>

#include "cuda_runtime.h"
#include "emulated_copy_engine.h"

namespace stepgraph::sm90 {

inline uint32_t swizzled_rows_low(uint32_t address) {
    return address >> 4U;
}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
/// Here lanes meet: none goes on while another still has to read what it multiplies.
template <int left>
void wgmma_wait(STEPGRAPH_PLACE) {
    static_cast<void>(emulation::meet_warp(0, place));
}
inline void pin(float&) {}

/// Element `column` of row `row` behind what a descriptor describes.
inline float bf16_at(uint32_t descriptor, int row, int column) {
    const uint32_t address = swizzled((descriptor << 4U) + static_cast<uint32_t>(row * 128 + column * 2));
    const auto* bits =
        reinterpret_cast<const uint16_t*>(static_cast<const unsigned char*>(emulation::shared_memory()) + address);
    static_cast<void>(emulation::shared_address(bits));  // that it is one
    return std::bit_cast<float>(static_cast<uint32_t>(*bits) << 16U);
}

template <int columns>
void wgmma_bf16(float (&d)[columns / 2], uint32_t a, uint32_t b) {
    const int lane = emulation::thread() % 32;
    for (int i = 0; i < columns / 2; ++i) {
        const int row = emulation::thread() / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            d[i] += bf16_at(a, row, k) * bf16_at(b, column, k);
        }
    }
}

}  // namespace stepgraph::sm90
