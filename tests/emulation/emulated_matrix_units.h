// matrix_units.h for the emulator. The matrix units compute as late as they may, where a thread waits for them: who reads a
// product before, or changes what is multiplied, is found out.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include <cuda_fp16.h>

#include <stepgraph/layouts/number_formats.h>

#include "cuda_runtime.h"
#include "emulated_copy_engine.h"

namespace stepgraph::sm90 {

inline uint32_t swizzled_rows_low(uint32_t address) {
    return address >> 4U;
}
inline void wgmma_fence() {}
inline void wgmma_commit() {
    emulation::commit_products();
}
/// Here lanes meet: none goes on while another still has to read what it multiplies.
template <int left>
void wgmma_wait(STEPGRAPH_PLACE) {
    emulation::finish_products(left);
    static_cast<void>(emulation::meet_warp(0, place));
}
template <typename Value>
void pin(Value&) {}
inline void leave_undefined(float& x) {
    x = std::numeric_limits<float>::quiet_NaN();
}
template <int count>
void take_registers() {}
template <int count>
void leave_registers() {}

/// What `count` registers of all lanes of the warp hold.
template <int count>
std::array<std::array<uint32_t, 32>, count> registers_of_warp(const uint32_t* registers, STEPGRAPH_PLACE) {
    std::array<std::array<uint32_t, 32>, count> all;
    for (size_t i = 0; i < count; ++i) {
        std::memcpy(all[i].data(), emulation::meet_warp(registers[i], place), sizeof(all[i]));
    }
    return all;
}

/// Element i of a thread's share of a product stands in this row of the warpgroup's, and in this column.
inline int product_row(int i) {
    return emulation::thread() % 128 / 32 * 16 + emulation::thread() % 32 / 4 + i / 2 % 2 * 8;
}
inline int product_column(int i) {
    return i / 4 * 8 + emulation::thread() % 4 * 2 + i % 2;
}

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
    emulation::start_product([&d, a, b] {
        for (int i = 0; i < columns / 2; ++i) {
            for (int k = 0; k < 16; ++k) {
                d[i] += bf16_at(a, product_row(i), k) * bf16_at(b, product_column(i), k);
            }
        }
    });
}

inline double e4m3(uint32_t code) {
    static const auto values = [] {
        std::array<double, 256> all{};
        for (size_t i = 0; i < all.size(); ++i) {
            all[i] = float_from_e4m3(static_cast<uint8_t>(i));
        }
        return all;
    }();
    return values[code & 255U];
}

/// Sums are exact, rounded once a product.
template <int columns>
void wgmma_e4m3(float (&d)[columns / 2], const uint32_t* a, uint32_t b, int accumulate) {
    emulation::start_product([&d, a, b, accumulate] {
        const auto registers = registers_of_warp<4>(a);
        const auto* shared = static_cast<const unsigned char*>(emulation::shared_memory());
        for (int i = 0; i < columns / 2; ++i) {
            double sum = accumulate != 0 ? d[i] : 0.0;
            for (int k = 0; k < 32; ++k) {
                const int lane = emulation::thread() % 32 / 4 * 4 + k % 16 / 4;
                const uint32_t four = registers[static_cast<size_t>(k / 16 * 2 + i / 2 % 2)][static_cast<size_t>(lane)];
                const auto* code = shared + swizzled((b << 4U) + static_cast<uint32_t>(product_column(i) * 128 + k));
                static_cast<void>(emulation::shared_address(code));  // that it is one
                sum += e4m3(four >> k % 4 * 8) * e4m3(*code);
            }
            d[i] = static_cast<float>(sum);
        }
    });
}

/// Half `i` of a word, a number of FP16.
inline double fp16(uint32_t word, int i) {
    return double{__half2float(__half(__half_raw{static_cast<unsigned short>(word >> i * 16)}))};
}

inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t words[] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto registers = registers_of_warp<6>(words);
    const int lane = emulation::thread() % 32;
    for (int i = 0; i < 4; ++i) {
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const auto of_row = static_cast<size_t>(lane / 4 * 4 + k % 8 / 2);
            const auto of_column = static_cast<size_t>((lane % 4 * 2 + i % 2) * 4 + k % 8 / 2);
            sum += fp16(registers[static_cast<size_t>(k / 8 * 2 + i / 2)][of_row], k % 2) *
                   fp16(registers[static_cast<size_t>(4 + k / 8)][of_column], k % 2);
        }
        d[i] = static_cast<float>(sum);
    }
}

}  // namespace stepgraph::sm90
