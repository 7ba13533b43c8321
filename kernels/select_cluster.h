// What the blocks of one row say to each other: each publishes its counts in its own shared memory, and reads the others'.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace stepgraph::selecting {

/// The blocks of a row that have keys. A cluster may hold more of them: those without keys have left, and its barriers do
/// not wait for them.
struct RowBlocks {
    int rank;   // of this block
    int count;  // 1: nothing is exchanged
};

inline constexpr int most_row_blocks = 16;

/// Every thread of the row's blocks: all have arrived, and what they wrote before is visible.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// This block's rank in its cluster.
__device__ __forceinline__ int cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
#else
    return 0;
#endif
}

/// Number of this block's cluster in the grid.
__device__ __forceinline__ unsigned cluster_number() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t number;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(number));
    return number;
#else
    return blockIdx.x;
#endif
}

/// Blocks of a cluster.
__device__ __forceinline__ int cluster_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return static_cast<int>(blocks);
#else
    return 1;
#endif
}

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

/// Address of block `rank`'s copy of what this block has at `address`.
__device__ __forceinline__ uint32_t address_in_block(uint32_t address, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
    return address;
}

__device__ __forceinline__ uint32_t load_from_block(uint32_t address) {
    uint32_t word = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
#endif
    return word;
}
__device__ __forceinline__ uint2 load_pair_from_block(uint32_t address) {
    uint2 pair{};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];" : "=r"(pair.x), "=r"(pair.y) : "r"(address) : "memory");
#endif
    return pair;
}

}  // namespace stepgraph::selecting
