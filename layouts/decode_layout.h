// Decode layout: which request a query row belongs to, how many keys it sees, and the slot its own key goes to.
//
// Written once over a Thrust execution policy: the host and the device form are the same code and give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "cache_page.h"
#include "step_status.h"

namespace stepgraph {

/// Decode context parallelism: position t of a sequence belongs to rank (t / interleave) % world_size.
struct ContextParallel {
    int world_size = 1;
    int rank = 0;
    int interleave = 1;
};

/// How many of the first `global_end` positions of a sequence belong to this rank.
STEPGRAPH_HD constexpr int64_t local_bound(int64_t global_end, ContextParallel dcp) {
    if (dcp.world_size == 1) {
        return global_end;
    }
    const int64_t full = global_end / (static_cast<int64_t>(dcp.world_size) * dcp.interleave) * dcp.interleave;
    const int64_t rest = global_end - full * dcp.world_size - static_cast<int64_t>(dcp.rank) * dcp.interleave;
    return full + (rest < 0 ? 0 : rest > dcp.interleave ? dcp.interleave : rest);
}

/// Position in the whole sequence of this rank's local position `j`.
STEPGRAPH_HD constexpr int64_t global_position(int64_t j, ContextParallel dcp) {
    return j / dcp.interleave * (static_cast<int64_t>(dcp.world_size) * dcp.interleave) +
           static_cast<int64_t>(dcp.rank) * dcp.interleave + j % dcp.interleave;
}

/// Local position of global position `p` >= 0, or -1 where another rank owns it.
STEPGRAPH_HD constexpr int64_t local_position(int64_t p, ContextParallel dcp) {
    if (p / dcp.interleave % dcp.world_size != dcp.rank) {
        return -1;
    }
    return p / (static_cast<int64_t>(dcp.world_size) * dcp.interleave) * dcp.interleave + p % dcp.interleave;
}

struct DecodeLayoutArgs {
    const int32_t* seq_lens;      // [max_requests] tokens, the step's own included
    const int32_t* query_lens;    // [max_requests] rows
    const int32_t* num_requests;  // [1]; may be null: all max_requests are live
    const int32_t* block_table;   // [max_requests, columns]; may be null where slots is
    int64_t block_table_stride;   // entries
    int max_requests;
    int rows;     // of the bucket
    int columns;  // of the block table
    int64_t pages;
    ContextParallel dcp;

    int32_t* starts;       // [max_requests + 1] first row of each request; entries behind the live requests hold the total
    int32_t* row_request;  // [rows] request of each row, -1 for padding
    int32_t* ends;         // [rows] exclusive bound in local positions, 0 for padding
    int64_t* slots;        // [rows] derived slots; null: the engine hands its own
    StepStatus* status;
};

/// Up to so many requests, each row finds its own by counting from the first: one kernel instead of three.
inline constexpr int most_counted_requests = 256;

/// Computes the layout on the host. Pointers are host memory; throws nothing but std::bad_alloc.
void decode_layout_host(const DecodeLayoutArgs& args);

/// Enqueues the layout on `stream`: one kernel, three where there may be many requests; no synchronisation, no allocation,
/// legal in capture. Pointers are device memory. `temporaries` (256-byte aligned, decode_layout_temporary_bytes() of it)
/// must live as long as a captured graph.
void decode_layout_device(const DecodeLayoutArgs& args, void* temporaries, size_t temporary_bytes, cudaStream_t stream);

/// Bytes that decode_layout_device() needs for its scan; the same on every device.
size_t decode_layout_temporary_bytes(int max_requests);

}  // namespace stepgraph
