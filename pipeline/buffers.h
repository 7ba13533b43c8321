// What an engine hands over: device pointers, fixed from bind on.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>

namespace stepgraph {

/// Shared by all layers. The engine updates the contents between replays, on the stream of the replay or ordered by events.
struct StepBuffers {
    const int32_t* seq_lens = nullptr;      // [max_requests] tokens, the step's own included
    const int32_t* query_lens = nullptr;    // [max_requests] rows of each request; 0 allowed
    const int32_t* num_requests = nullptr;  // [1]; may be null: all max_requests are live
    const int32_t* block_table = nullptr;   // [max_requests, block_table_columns], rows block_table_stride apart
    const int64_t* slots = nullptr;         // [max_rows] page * 64 + offset, negative: not stored; may be null: derived
};

/// One layer's. The step's keys are inserted into `cache` before they are scored: a row sees its own key.
struct LayerBuffers {
    // Projected here: all four, 16-byte aligned. Null: iq and projected are the engine's.
    const __nv_bfloat16* q_c = nullptr;     // [max_rows, q_lora_rank]
    const __nv_bfloat16* hidden = nullptr;  // [max_rows, hidden_size]
    // Weights: no kernel of the step, or in front of it in a capture, may write them.
    const __nv_bfloat16* wq_b = nullptr;  // [heads * 128, q_lora_rank]
    const __nv_bfloat16* w_kv = nullptr;  // [projected_columns, hidden_size]

    // Projected by the engine: both, 16-byte aligned. Null: projected here.
    const __nv_bfloat16* iq = nullptr;         // [max_rows, heads * 128]
    const __nv_bfloat16* projected = nullptr;  // [max_rows, projected_columns]

    const float* k_norm_weight = nullptr;  // [128], 16-byte aligned
    const float* k_norm_bias = nullptr;    // [128], 16-byte aligned
    uint8_t* cache = nullptr;  // [pages] of page_stride_bytes, 4-byte aligned; for Hopper's scorer 16-byte, see Options

    int32_t* indices = nullptr;  // [max_rows, top_k] local positions, ascending, -1 behind them
    // Outputs that are not wanted are null.
    int32_t* counts = nullptr;          // [max_rows] winners of each row
    int64_t* physical_slots = nullptr;  // [max_rows, top_k] the winners' slots, -1 for padding or an invalid block
    float* winner_logits = nullptr;     // [max_rows, top_k], -inf behind the winners
    float* logits = nullptr;            // [max_rows, width], -inf from a row's bound on; for tests, slows select down
};

/// Device memory that the pipeline may use between bind and its end, 256-byte aligned, at least workspace_bytes() of it.
struct Workspace {
    void* data = nullptr;
    size_t bytes = 0;
};

}  // namespace stepgraph
