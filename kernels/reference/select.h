// Exact top-K on the host.
#pragma once

#include <cstdint>

namespace stepgraph::reference {

struct SelectArgs {
    int rows;
    int top_k;
    const int32_t* ends;  // [rows]
    const float* logits;  // [rows, logits_stride]; not read where ends <= top_k, unless winner_logits is asked for
    int64_t logits_stride;
    const int32_t* row_request;  // [rows], for physical_slots
    const int32_t* block_table;  // [requests, columns], for physical_slots
    int64_t block_table_stride;  // entries
    int64_t pages;

    int32_t* indices;         // [rows, top_k] ascending positions, -1 behind them
    int32_t* counts;          // [rows]; may be null
    int64_t* physical_slots;  // [rows, top_k], -1 for padding or an invalid block; may be null
    float* winner_logits;     // [rows, top_k], -inf behind the winners; may be null
};

/// The K best positions of each row by (logit descending, position ascending), written in ascending order.
void select(const SelectArgs& args);

}  // namespace stepgraph::reference
