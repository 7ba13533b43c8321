// copy_engine.h for the emulator: a bulk copy is done where it is asked for, and its barrier told.
#pragma once

#include <cstring>

#include "emulator.h"

namespace stepgraph::sm90 {

using emulation::shared_address;

/// A barrier of the copy engine in its eight bytes.
struct EmulatedBarrier {
    int32_t missing_bytes;
    int8_t missing_arrivals;
    int8_t arrivals;
    uint16_t phase;

    void complete() {
        if (missing_arrivals == 0 && missing_bytes == 0) {
            missing_arrivals = arrivals;
            ++phase;
        }
    }
};
static_assert(sizeof(EmulatedBarrier) == sizeof(uint64_t));

inline EmulatedBarrier& emulated(uint64_t* barrier) {
    return *reinterpret_cast<EmulatedBarrier*>(barrier);
}

inline void barrier_init(uint64_t* barrier, int arrivals) {
    emulated(barrier) = {0, static_cast<int8_t>(arrivals), static_cast<int8_t>(arrivals), 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint64_t* barrier) {
    --emulated(barrier).missing_arrivals;
    emulated(barrier).complete();
}
inline void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    EmulatedBarrier& b = emulated(barrier);
    b.missing_bytes += static_cast<int32_t>(bytes);
    --b.missing_arrivals;
    b.complete();
}
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
    while (emulated(barrier).phase % 2 == parity) {
        emulation::look_later();
    }
}
inline void async_proxy_fence_global() {}
inline void async_proxy_fence_shared() {}
inline uint64_t evict_first() {
    return 0;
}
inline uint64_t evict_last() {
    return 0;
}
inline void copy_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t) {
    emulation::check_readable(from, bytes, 16);
    if (emulation::shared_address(to) % 16 != 0 || bytes % 16 != 0) {
        emulation::fail("a bulk copy that is not aligned");
    }
    static_cast<void>(emulation::shared_address(static_cast<unsigned char*>(to) + bytes - 1));  // its end too
    std::memcpy(to, from, bytes);
    emulated(barrier).missing_bytes -= static_cast<int32_t>(bytes);
    emulated(barrier).complete();
}

inline void start_copy(void* to, const void* from, bool is_there, uint64_t) {
    emulation::start_copy(to, is_there ? from : nullptr);
}
inline void copy_word(void* to, const void* from) {
    emulation::start_copy(to, from, 4);
}
inline void wait_for_copied_words() {
    emulation::finish_copies();
}
inline void store(float* to, float x, uint64_t) {
    *to = x;
}
using emulation::commit_copies;
template <int left>
void wait_for_copies() {
    emulation::finish_batches(left);
}

/// A matrix of two-byte elements.
struct TensorMap {
    const uint16_t* matrix;
    int rows, columns;
    int box_rows, box_columns;
};

inline void prefetch(const TensorMap&) {}

/// Where the 128-byte swizzle puts a byte.
inline uint32_t swizzled(uint32_t address) {
    return address ^ (address >> 7U & 7U) << 4U;
}

inline void copy_box(void* to, const TensorMap& map, int column, int row, uint64_t* barrier, uint64_t) {
    const uint32_t base = emulation::shared_address(to);
    if (base % 1024 != 0 || map.box_columns != 64) {
        emulation::fail("a box that is not aligned");
    }
    for (int r = 0; r < map.box_rows; ++r) {
        for (int c = 0; c < map.box_columns; ++c) {
            const bool is_there = row + r < map.rows && column + c < map.columns;
            const uint32_t at = swizzled(base + static_cast<uint32_t>(r * map.box_columns + c) * 2) - base;
            auto* element = reinterpret_cast<uint16_t*>(static_cast<unsigned char*>(to) + at);
            static_cast<void>(emulation::shared_address(element));
            *element = is_there ? map.matrix[int64_t{row + r} * map.columns + column + c] : uint16_t{0};
        }
    }
    emulated(barrier).missing_bytes -= map.box_rows * map.box_columns * 2;
    emulated(barrier).complete();
}

}  // namespace stepgraph::sm90
