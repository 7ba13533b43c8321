// Runs the blocks of one cluster on the host, each thread of a kernel a fiber, in an order drawn anew, and faults on what a
// GPU does not forgive: barriers and warp functions that not all threads reach at the same place, threads that leave others
// waiting, remote reads of a block that has left or before any barrier of the cluster, reads outside the memory that was
// given, addresses that are not aligned.
//
// What it does not know: the memory model. A write is seen at once by all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace stepgraph::emulation {

struct Launch {
    std::function<void()> kernel;  // what each thread does
    int blocks = 1;                // of the cluster, at most 16
    int threads = 32;              // of a block, whole warps
    unsigned cluster_number = 0;   // in the grid
    unsigned grid_blocks = 0;      // of the whole grid
    size_t shared_bytes = 0;       // of a block, random at the beginning, with pages behind it that fault
    std::vector<std::span<const std::byte>> readable{};  // of global memory, for loads and copies that are checked
    bool all_is_readable = false;
    uint64_t seed = 1;
};

/// Returns when all threads have returned: how many bytes of the readable memory they read, one by one counted. Throws
/// std::runtime_error that names the fault, the block and the thread, or the exception of a thread.
uint64_t run(const Launch& launch);

/// Sets what the seeds of launches are drawn from that have none of their own.
void seed_launches(uint64_t seed);
[[nodiscard]] uint64_t seed_of_launch();

// ---- what the emulated instructions are made of; each by a thread of the kernel ------------------------------------------
// `place`: of the call, the same for all threads that meet.

[[nodiscard]] int thread();
[[nodiscard]] int cluster_rank();
[[nodiscard]] int cluster_blocks();
[[nodiscard]] unsigned cluster_number();
[[nodiscard]] unsigned grid_blocks();
[[nodiscard]] void* shared_memory();
/// Of a byte of this block's shared memory.
[[nodiscard]] uint32_t shared_address(const void* byte);
/// `bytes` of another block's shared memory.
[[nodiscard]] const void* in_block(uint32_t shared_address, int rank, size_t bytes);

/// Goes on when no other thread can, for one that looks again and again for what others do.
void look_later();
void block_barrier(uintptr_t place);
/// Of the first `threads` threads that reach it.
void partial_barrier(int threads);
void cluster_arrive();
void cluster_wait();
/// Hands each lane's value over and returns all 32, which stay until the warp's next meeting but one.
[[nodiscard]] const uint32_t* meet_warp(uint32_t value, uintptr_t place);

/// Ends the launch.
[[noreturn]] void fail(const char* what);
void check_readable(const void* from, size_t bytes, size_t alignment);
/// Copies `bytes` bytes, zeros from null, when finish_copies() is called, not before.
void start_copy(void* to, const void* from, size_t bytes = 16);
void finish_copies();
/// Ends a batch of the copies that this thread started.
void commit_copies();
/// Of this thread's batches, all but the last `left`.
void finish_batches(int left);

/// Has `product` run when its group is finished, not before.
void start_product(std::function<void()> product);
/// Ends a group of the products that this thread started.
void commit_products();
/// Runs this thread's groups, all but the last `left`.
void finish_products(int left);

}  // namespace stepgraph::emulation
