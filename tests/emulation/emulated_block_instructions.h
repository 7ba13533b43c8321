// block_instructions.h for the emulator.
#pragma once

#include <algorithm>
#include <cmath>

#include "emulator.h"

namespace stepgraph::device {

using emulation::cluster_arrive;
using emulation::cluster_blocks;
using emulation::cluster_number;
using emulation::cluster_rank;
using emulation::cluster_wait;
using emulation::finish_copies;
using emulation::shared_address;
using emulation::start_copy;

template <int threads>
void partial_barrier() {
    emulation::partial_barrier(threads);
}

inline uint32_t address_in_block(uint32_t address, int rank) {
    return address | static_cast<uint32_t>(rank + 1) << 24U;
}
template <typename Value>
Value load_from_address(uint32_t address) {
    return *static_cast<const Value*>(
        emulation::in_block(address & 0xFFFFFFU, static_cast<int>(address >> 24U) - 1, sizeof(Value)));
}
inline uint32_t load_from_block(uint32_t address) {
    return load_from_address<uint32_t>(address);
}
inline uint2 load_pair_from_block(uint32_t address) {
    return load_from_address<uint2>(address);
}

inline float4 load_four_from_block(uint32_t address) {
    return load_from_address<float4>(address);
}

inline unsigned char* dynamic_shared_memory() {
    return static_cast<unsigned char*>(emulation::shared_memory());
}

inline float larger_or_nan(float x, float y) {
    return std::isnan(x) || std::isnan(y) ? NAN : std::max(x, y);
}

inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selectors) {
    uint32_t result = 0;
    for (unsigned i = 0; i < 4; ++i) {
        const uint32_t selector = selectors >> 4 * i & 15U;
        const uint32_t byte = (selector % 8 < 4 ? a >> 8 * (selector % 4) : b >> 8 * (selector % 4)) & 255U;
        result |= (selector < 8 ? byte : byte >= 128 ? 255U : 0U) << 8 * i;
    }
    return result;
}

template <typename Element>
void compute_here(Element*&) {}

}  // namespace stepgraph::device
