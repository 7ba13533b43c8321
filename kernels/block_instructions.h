// Instructions that C++ has no words for: of clusters, of copies that go on, of shared memory whose size the launch tells. A
// test on the host puts others in their place.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#if defined(STEPGRAPH_EMULATED)
#include "emulated_block_instructions.h"
#else

namespace stepgraph::device {

/// Every thread of the cluster that has not left, whole warps: all have arrived, and what they wrote before is visible.
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

/// `threads` threads of the block, whole warps, while the others go on: all have arrived, and what they wrote before is
/// visible.
template <int threads>
__device__ __forceinline__ void partial_barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(threads) : "memory");
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

/// Blocks of a cluster, a power of two.
__device__ __forceinline__ int cluster_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return static_cast<int>(blocks);
#else
    return 1;
#endif
}

/// Number of this block's cluster in the grid. Not by %clusterid: that goes through FP32, and is wrong beyond 2^24 blocks.
__device__ __forceinline__ unsigned cluster_number() {
    return blockIdx.x >> (31 - __clz(cluster_blocks()));
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

__device__ __forceinline__ float4 load_four_from_block(uint32_t address) {
    float4 four{};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                 : "r"(address)
                 : "memory");
#endif
    return four;
}

__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
    extern __shared__ __align__(128) unsigned char memory[];
    return memory;
}

/// Starts to copy 16 bytes into shared memory; both sides are aligned to 16.
__device__ __forceinline__ void start_copy(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
/// Waits for this thread's copies.
__device__ __forceinline__ void finish_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/// max(x, y), but NaN where either is.
__device__ __forceinline__ float larger_or_nan(float x, float y) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
    return x;
}

/// __byte_perm(), but for the highest bits of the selectors, which that masks out: with it, the selected byte's sign, eight
/// times.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selectors) {
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selectors));
    return result;
}

/// Lets a pointer be computed here, and not where it is used first.
template <typename Element>
__device__ __forceinline__ void compute_here(Element*& pointer) {
    asm volatile("" : "+l"(pointer));
}

}  // namespace stepgraph::device

#endif
