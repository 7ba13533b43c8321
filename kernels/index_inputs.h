// Index inputs: quantise the query, fold the head weights, normalise, quantise and insert the key.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include <stepgraph/layouts/cache_page.h>
#include <stepgraph/layouts/step_status.h>

#include "launch.h"

namespace stepgraph {

struct IndexInputsArgs {
    CacheFormat format;
    int heads;
    int rows;                        // of the bucket
    int max_rows;                    // of the query buffer
    int max_requests;                // starts[max_requests] is the number of live rows
    const int32_t* starts;           // [max_requests + 1]
    const __nv_bfloat16* iq;         // [max_rows, heads * 128], 16-byte aligned
    const __nv_bfloat16* projected;  // [max_rows, projected_columns]
    int projected_columns;
    int key_column;
    int weight_column;
    const float* k_norm_weight;  // [128], 16-byte aligned
    const float* k_norm_bias;    // [128], 16-byte aligned
    float k_norm_eps;
    const int64_t* slots;  // [max_rows]; negative: not stored
    uint8_t* cache;        // [pages] of page_stride_bytes, 4-byte aligned
    int64_t pages;
    int64_t page_stride_bytes;

    uint8_t* query;       // query_bytes() of max_rows, see query_row.h
    float* head_weights;  // [max_rows, heads]; rounded to BF16 except for CacheFormat::fp8
    // The same of an MXFP4 query for the Hopper scorer, see widened_mxfp4.h; null where that is not in use. A head whose
    // scales lie too far apart, or too far from 1, gets the weight NaN: the scorer then does without.
    uint8_t* widened_query;  // [max_rows, heads, 128] E4M3, 8-byte aligned
    float* widened_weights;  // [max_rows, heads]
    StepStatus* status;
};

/// Enqueues one block a row; padding rows write nothing. Bit-equal to reference::index_inputs(). Throws Error.
void index_inputs(const IndexInputsArgs& args, LaunchContext context);
void prepare_index_inputs();

}  // namespace stepgraph
