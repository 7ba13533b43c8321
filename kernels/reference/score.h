// Paged scoring on the host.
#pragma once

#include <cstdint>

#include <stepgraph/layouts/cache_page.h>
#include <stepgraph/layouts/step_status.h>

namespace stepgraph::reference {

struct ScoreArgs {
    CacheFormat format;
    int heads;
    int rows;                   // of the bucket
    int max_rows;               // of the query buffer
    const uint8_t* query;       // query_bytes(), see query_row.h
    const float* head_weights;  // [max_rows, heads]
    const uint8_t* cache;       // [pages] of page_stride_bytes
    int64_t pages;
    int64_t page_stride_bytes;
    const int32_t* block_table;  // [requests, columns]
    int64_t block_table_stride;  // entries
    const int32_t* starts;       // [max_requests + 1]
    const int32_t* row_request;  // [rows]
    const int32_t* ends;         // [rows]
    int unscored_bound;          // rows with ends <= this need no logits: top_k, or 0 where logits are asked for

    float* logits;  // [rows, logits_stride]; [r, j] is written for j < ends[r] of the rows that need logits
    int64_t logits_stride;
    StepStatus* status;
};

/// Sums run over the columns, then over the heads, left to right in FP32: the order of the portable scorer.
void score(const ScoreArgs& args);

}  // namespace stepgraph::reference
