// Stands in for CUDA's header where kernels are compiled for the emulator: the host side of CUDA's own, and device functions
// as far as the emulated kernels use them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>  // before __noinline__ becomes a macro, whose name it uses
#include <type_traits>

#include <cuda_runtime_api.h>

#include "emulator.h"

namespace stepgraph::emulation {

/// Where a call stands: the same number for all threads that make it.
using Place = uintptr_t;
constexpr Place place_of(int line, const char* function) {
    return std::bit_cast<Place>(function) * 65536U + static_cast<Place>(line);
}

struct Index {
    unsigned x;
};
inline Index thread_index() {
    return {static_cast<unsigned>(thread())};
}
inline Index block_index() {
    return {cluster_number() * static_cast<unsigned>(cluster_blocks()) + static_cast<unsigned>(cluster_rank())};
}
/// Not a macro as those below: a launch has a member of the name.
struct GridDimension {
    struct Blocks {
        operator unsigned() const { return grid_blocks(); }
    };
    Blocks x;
};

template <typename Value>
Value lane_value(Value value, int lane, Place place) {
    static_assert(sizeof(Value) == 4);
    return std::bit_cast<Value>(meet_warp(std::bit_cast<uint32_t>(value), place)[lane]);
}

/// The GPU's maximum drops a NaN of any kind; the host's keeps a signalling one.
inline float larger(float x, float y) {
    return std::isnan(x) ? y : std::isnan(y) ? x : std::max(x, y);
}

template <typename Combine>
uint32_t reduce(uint32_t value, Place place, Combine combine) {
    const uint32_t* values = meet_warp(value, place);
    uint32_t all = values[0];
    for (int lane = 1; lane < 32; ++lane) {
        all = combine(all, values[lane]);
    }
    return all;
}

}  // namespace stepgraph::emulation

#define STEPGRAPH_PLACE \
    stepgraph::emulation::Place place = stepgraph::emulation::place_of(__builtin_LINE(), __builtin_FUNCTION())

// Of one block: blocks that are not of one cluster run one behind the other.
#undef __shared__
#define __shared__ static
#define __CUDA_ARCH_FEAT_SM90_ALL
#if !defined(__launch_bounds__)
#define __launch_bounds__(...)
#endif
#if !defined(__noinline__)
#define __noinline__ __attribute__((noinline))
#endif
#define fmaxf stepgraph::emulation::larger
#define blockIdx (stepgraph::emulation::block_index())
#define threadIdx (stepgraph::emulation::thread_index())

inline constexpr stepgraph::emulation::GridDimension gridDim;

inline void __syncthreads(STEPGRAPH_PLACE) {
    stepgraph::emulation::block_barrier(place);
}
inline void __syncwarp(STEPGRAPH_PLACE) {
    static_cast<void>(stepgraph::emulation::meet_warp(0, place));
}
template <typename Value>
Value __shfl_sync(unsigned, Value value, int lane, STEPGRAPH_PLACE) {
    return stepgraph::emulation::lane_value(value, lane % 32, place);
}
template <typename Value>
Value __shfl_up_sync(unsigned, Value value, int distance, STEPGRAPH_PLACE) {
    const int lane = stepgraph::emulation::thread() % 32;
    return stepgraph::emulation::lane_value(value, lane >= distance ? lane - distance : lane, place);
}
template <typename Value>
Value __shfl_xor_sync(unsigned, Value value, int mask, STEPGRAPH_PLACE) {
    return stepgraph::emulation::lane_value(value, stepgraph::emulation::thread() % 32 ^ mask, place);
}
inline bool __any_sync(unsigned, bool mine, STEPGRAPH_PLACE) {
    return stepgraph::emulation::reduce(mine ? 1U : 0U, place, [](uint32_t a, uint32_t b) { return a | b; }) != 0;
}
inline unsigned __ballot_sync(unsigned, bool mine, STEPGRAPH_PLACE) {
    const int lane = stepgraph::emulation::thread() % 32;
    return stepgraph::emulation::reduce(mine ? 1U << lane : 0U, place, [](uint32_t a, uint32_t b) { return a | b; });
}
inline unsigned __reduce_add_sync(unsigned, unsigned value, STEPGRAPH_PLACE) {
    return stepgraph::emulation::reduce(value, place, [](uint32_t a, uint32_t b) { return a + b; });
}
inline unsigned __reduce_min_sync(unsigned, unsigned value, STEPGRAPH_PLACE) {
    return stepgraph::emulation::reduce(value, place, [](uint32_t a, uint32_t b) { return std::min(a, b); });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value, STEPGRAPH_PLACE) {
    return stepgraph::emulation::reduce(value, place, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}

template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Parameters...)) {
    return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
    *blocks = 1;
    return cudaSuccess;
}
/// Returns when the grid has ended. Its clusters run one behind the other.
template <typename... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               std::type_identity_t<Parameters>... parameters) {
    unsigned cluster_blocks = 1;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
            cluster_blocks = config->attrs[i].val.clusterDim.x;
        }
    }
    for (unsigned cluster = 0; cluster < config->gridDim.x / cluster_blocks; ++cluster) {
        stepgraph::emulation::run({.kernel = [&] { kernel(parameters...); },
                                   .blocks = static_cast<int>(cluster_blocks),
                                   .threads = static_cast<int>(config->blockDim.x),
                                   .cluster_number = cluster,
                                   .grid_blocks = config->gridDim.x,
                                   .shared_bytes = config->dynamicSmemBytes,
                                   .all_is_readable = true,
                                   .seed = stepgraph::emulation::seed_of_launch()});
    }
    return cudaSuccess;
}

template <typename Value>
Value __ldcg(const Value* from) {
    stepgraph::emulation::check_readable(from, sizeof(Value), sizeof(Value));
    return *from;
}
template <typename Value>
Value atomicAdd(Value* to, std::type_identity_t<Value> value) {
    const Value before = *to;  // fibers change at barriers and warp functions alone
    *to += value;
    return before;
}

inline void* __cvta_shared_to_generic(uint32_t address) {
    return static_cast<unsigned char*>(stepgraph::emulation::shared_memory()) + address;
}

/// The larger halves of two words.
inline unsigned __vmaxu2(unsigned x, unsigned y) {
    return std::max(x & 0xFFFFU, y & 0xFFFFU) | std::max(x >> 16U, y >> 16U) << 16U;
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline int __clz(int x) {
    return std::countl_zero(static_cast<unsigned>(x));
}
inline float __fdividef(float x, float y) {
    return x / y;
}
inline float __fmaf_rn(float x, float y, float z) {
    return std::fma(x, y, z);
}
inline float rsqrtf(float x) {
    return 1.0F / std::sqrt(x);
}
using std::isfinite;
using std::isnan;
using std::max;
using std::min;
