// What the threads of one block of select do together: sums and ordered counts.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace stepgraph::selecting {

inline constexpr int log_threads = 9;
inline constexpr int threads = 1 << log_threads;  // of a block
inline constexpr int lanes = 32;                  // of a warp
inline constexpr int warps = threads / lanes;
inline constexpr unsigned whole_warp = 0xFFFFFFFFU;

__device__ __forceinline__ int thread() {
    return static_cast<int>(threadIdx.x);
}
__device__ __forceinline__ int lane() {
    return thread() % lanes;
}
__device__ __forceinline__ int warp() {
    return thread() / lanes;
}

/// Sum over the lanes before this one and itself.
__device__ __forceinline__ uint32_t inclusive_warp_sum(uint32_t value) {
#pragma unroll
    for (int distance = 1; distance < lanes; distance *= 2) {
        const uint32_t other = __shfl_up_sync(whole_warp, value, distance);
        value += lane() >= distance ? other : 0U;
    }
    return value;
}

/// A word of each warp. Who uses one again must know that all have read it: another barrier lies between.
struct WarpWords {
    uint32_t words[warps];
};

struct BlockSum {
    uint32_t before;  // of the warps before this one
    uint32_t total;
};

/// Sums a word of each warp. All threads of the block; one barrier, behind which all see what each wrote before.
__device__ __forceinline__ BlockSum sum_warps(uint32_t warp_value, WarpWords& shared) {
    if (lane() == 0) {
        shared.words[warp()] = warp_value;
    }
    __syncthreads();
    const uint32_t value = lane() < warps ? shared.words[lane()] : 0U;
    return {__reduce_add_sync(whole_warp, lane() < warp() ? value : 0U), __reduce_add_sync(whole_warp, value)};
}

/// Of marks 4i + c, for key c of this thread's i-th vector of four neighbours.
struct OrderedPlaces {
    uint32_t before[4];  // marked keys of the block before this thread's vector i, in ascending place
    uint32_t total;      // of the block
};

/// Where each thread's marked keys come in the order of their places: a warp has consecutive ones, a vector a lane after the
/// other. All threads of the block; one barrier.
__device__ __forceinline__ OrderedPlaces ordered_places(uint32_t marks, WarpWords& shared) {
    // Four counts in the bytes of a word: none exceeds 128.
    uint32_t counts = (marks | marks << 8U) & 0x00FF00FFU;
    counts = (counts | counts << 4U) & 0x0F0F0F0FU;
    counts -= (counts >> 1U) & 0x05050505U;
    counts = (counts & 0x03030303U) + ((counts >> 2U) & 0x03030303U);
    const uint32_t inclusive = inclusive_warp_sum(counts);
    const uint32_t totals = __shfl_sync(whole_warp, inclusive, lanes - 1);
    const uint32_t before = inclusive - counts;
    const uint32_t halves = (totals & 0x00FF00FFU) + (totals >> 8U & 0x00FF00FFU);
    const BlockSum sum = sum_warps((halves & 0xFFFFU) + (halves >> 16U), shared);
    OrderedPlaces places;
    places.total = sum.total;
    uint32_t base = sum.before;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        places.before[i] = base + (before >> (8 * i) & 0xFFU);
        base += totals >> (8 * i) & 0xFFU;
    }
    return places;
}

}  // namespace stepgraph::selecting
