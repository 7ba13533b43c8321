// Index inputs on the host: quantise the query, fold the head weights, normalise, quantise and insert the key.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include <stepgraph/layouts/cache_page.h>
#include <stepgraph/layouts/step_status.h>

namespace stepgraph::reference {

struct IndexInputsArgs {
    CacheFormat format;
    int heads;
    int rows;                        // live ones: padding behind them is left alone
    int max_rows;                    // of the query buffer
    const __nv_bfloat16* iq;         // [rows, heads * 128]
    const __nv_bfloat16* projected;  // [rows, projected_columns]
    int projected_columns;
    int key_column;
    int weight_column;
    const float* k_norm_weight;  // [128]
    const float* k_norm_bias;    // [128]
    float k_norm_eps;
    const int64_t* slots;  // [rows]
    uint8_t* cache;        // [pages] of page_stride_bytes
    int64_t pages;
    int64_t page_stride_bytes;

    uint8_t* query;       // query_bytes(), see query_row.h
    float* head_weights;  // [max_rows, heads]
    StepStatus* status;
};

void index_inputs(const IndexInputsArgs& args);

/// The key of one row after LayerNorm, rounded to BF16: what is quantised into the cache.
void normalised_key(const __nv_bfloat16* key, const float* weight, const float* bias, float eps, float* out /* [128] */);

/// Quantises a normalised key [128] into token `token` of a page.
void store_key(CacheFormat format, const float* key, uint8_t* page, int token);

}  // namespace stepgraph::reference
