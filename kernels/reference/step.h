// The whole step on the host: the CPU device of the command, and what a device step is compared with.
#pragma once

#include <cstdint>
#include <vector>

#include <cuda_bf16.h>

#include <stepgraph/layouts/cache_page.h>
#include <stepgraph/layouts/decode_layout.h>
#include <stepgraph/layouts/step_status.h>

namespace stepgraph::reference {

/// Numbers of a step; the words are those of pipeline/geometry.h. Not validated here.
struct Shape {
    CacheFormat format;
    int heads;
    int top_k;
    int rows;  // of the bucket
    int max_requests;
    int columns;  // of the block table
    int64_t block_table_stride;
    int64_t pages;
    int64_t page_stride_bytes;
    int projected_columns;
    int key_column;
    int weight_column;
    int q_lora_rank;
    int hidden_size;
    float k_norm_eps;
    ContextParallel dcp;

    [[nodiscard]] int64_t width() const { return static_cast<int64_t>(columns) * page_tokens; }
};

/// Host pointers, shapes as in pipeline/buffers.h.
struct StepInputs {
    const int32_t* seq_lens;
    const int32_t* query_lens;
    const int32_t* num_requests;  // may be null
    const int32_t* block_table;
    const int64_t* slots;  // may be null: derived
};

struct LayerInputs {
    const __nv_bfloat16* q_c;  // null: iq and projected are given
    const __nv_bfloat16* hidden;
    const __nv_bfloat16* wq_b;
    const __nv_bfloat16* w_kv;
    const __nv_bfloat16* iq;  // null: projected here
    const __nv_bfloat16* projected;
    const float* k_norm_weight;
    const float* k_norm_bias;
    uint8_t* cache;  // updated in place
};

struct Layout {
    std::vector<int32_t> starts;       // [max_requests + 1]
    std::vector<int32_t> row_request;  // [rows]
    std::vector<int32_t> ends;         // [rows]
    std::vector<int64_t> slots;        // [rows], -1 for padding
};

struct LayerOutputs {
    std::vector<__nv_bfloat16> iq;         // [rows, heads * 128]
    std::vector<__nv_bfloat16> projected;  // [rows, projected_columns]
    std::vector<uint8_t> query;            // query_bytes() of `rows` rows; 0 for padding
    std::vector<float> head_weights;       // [rows, heads]; 0 for padding
    std::vector<float> logits;             // [rows, width], -inf where none was computed
    std::vector<int32_t> indices;          // [rows, top_k]
    std::vector<int32_t> counts;           // [rows]
    std::vector<int64_t> physical_slots;   // [rows, top_k]
    std::vector<float> winner_logits;      // [rows, top_k]; empty unless every logit was asked for
};

/// Once a step.
Layout decode_layout(const Shape& shape, const StepInputs& step, StepStatus* status);

/// Once a layer. `all_logits`: also those of rows whose bound is at most top_k.
LayerOutputs layer(const Shape& shape, const StepInputs& step, const LayerInputs& inputs, const Layout& layout,
                   bool all_logits, StepStatus* status);

}  // namespace stepgraph::reference
