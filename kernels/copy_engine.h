// Barriers in shared memory and copies into it that go on while threads do other things.
#pragma once

#include <cstdint>

#include "block_instructions.h"

#if defined(STEPGRAPH_EMULATED)
#include "emulated_copy_engine.h"
#else

#include <cuda.h>

namespace stepgraph::sm90 {

using device::shared_address;

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

/// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/// Arrives, and expects the copy engine to bring `bytes` before the phase ends.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

/// Waits for the end of the phase of parity `parity`.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

/// What ordinary stores wrote to global memory becomes visible to the copy engine.
__device__ __forceinline__ void async_proxy_fence_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
/// What ordinary stores wrote to shared memory becomes visible to the matrix units.
__device__ __forceinline__ void async_proxy_fence_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// A hint for data that is read once: it leaves the L2 first.
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/// A hint for data that is read or written again soon: it leaves the L2 last.
__device__ __forceinline__ uint64_t evict_last() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void store(float* to, float x, uint64_t policy) {
    asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(to), "f"(x), "l"(policy) : "memory");
}

/// Copies bytes that are a multiple of 16, both sides aligned to 16.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

/// Where the engine finds the boxes of a matrix, see tensor_map.h.
using TensorMap = CUtensorMap;

__device__ __forceinline__ void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Copies the box that begins at (row, column) of a matrix; `to` is aligned to 1024 bytes.
__device__ __forceinline__ void copy_box(void* to, const TensorMap& map, int column, int row, uint64_t* barrier,
                                         uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], "
        "[%4], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

/// Starts to copy four bytes into shared memory, by the ordinary way of this thread.
__device__ __forceinline__ void copy_word(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
/// Starts to copy 16 bytes into shared memory by this thread's ordinary way, or zeros if the source is not there. Both sides
/// are aligned to 16.
__device__ __forceinline__ void start_copy(void* to, const void* from, bool is_there, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(to)), "l"(from),
                 "r"(is_there ? 16 : 0), "l"(policy)
                 : "memory");
}
/// Makes a batch of the copies that this thread started since the last one.
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until at most `left` of this thread's batches are not complete.
template <int left>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}
/// Waits for the words that this thread copies.
__device__ __forceinline__ void wait_for_copied_words() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace stepgraph::sm90

#endif
