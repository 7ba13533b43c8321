// What a step found wrong in the data on the device.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace stepgraph {

/// Counters of data that was skipped, cumulative since bind or the engine's reset, modulo 2^32. Wrong data never faults and
/// never touches memory outside the buffers.
struct StepStatus {
    /// Slots of the engine at or past the cache's end (once a layer), and derived slots whose position or block lies outside
    /// table or cache (once a step).
    uint32_t invalid_slots = 0;
    /// Block table entries outside [0, pages) that the scorer met: once per request, column and layer. Entries of requests
    /// that need no logits (every bound <= top_k and none asked for) are not looked at.
    uint32_t invalid_blocks = 0;
    /// Rows whose bound was cut to the block table's width.
    uint32_t clamped_bounds = 0;
    /// Rows of the query lengths beyond the bucket.
    uint32_t dropped_rows = 0;

    bool operator==(const StepStatus&) const = default;
};

/// Adds `n` to a counter that many threads may add to.
STEPGRAPH_HD inline void count(uint32_t* counter, uint32_t n = 1) {
#if defined(__CUDA_ARCH__)
    atomicAdd(counter, n);
#else
    *counter += n;
#endif
}

}  // namespace stepgraph
