// copy_engine.h for the emulator: a bulk copy is done where it is asked for, and its barrier told.
#pragma once

#include <cstring>

#include "emulator.h"

namespace stepgraph::sm90 {

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
inline uint64_t evict_first() {
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

}  // namespace stepgraph::sm90
