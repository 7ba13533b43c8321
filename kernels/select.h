// Select: the exact K best positions of each row of a tile.
#pragma once

#include <cstdint>

#include <stepgraph/layouts/tiles.h>

#include "launch.h"

namespace stepgraph {

struct SelectArgs {
    Tile tile;
    int top_k;
    const int32_t* ends;         // [rows] exclusive; 0 for padding
    const float* logits;         // [rows of the tile, stride of the shape]
    const int32_t* row_request;  // [rows]
    const int32_t* block_table;  // [max_requests, columns]
    int64_t block_table_stride;  // entries
    int64_t pages;

    int32_t* indices;         // [rows, top_k] ascending positions, -1 behind them
    int32_t* counts;          // [rows]; may be null
    int64_t* physical_slots;  // [rows, top_k]; -1 for padding or an invalid block; may be null
    float* winner_logits;     // [rows, top_k]; -inf behind the winners; may be null
    float* padded_logits;     // like logits, -inf is written from ends on up to width; may be null
    int64_t width;

    bool last_of_layer;  // the engine's kernels follow: they start when this kernel has ended
};

/// Enqueues one block for each row that the tile may have. By logit descending, then position ascending; NaN counts as -inf,
/// -0 equals +0. Exact for every input and the same bits in every batch and tile. Reads each logit up to five times, and
/// none of a row with ends <= top_k unless winner_logits is asked for. Needs no memory beside its arguments. Throws Error.
void select(const SelectArgs& args, LaunchContext context);
void prepare_select();

}  // namespace stepgraph
