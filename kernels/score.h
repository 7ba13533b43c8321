// Score: the logit of every key position of every row of a tile.
#pragma once

#include <cstdint>

#include <stepgraph/layouts/cache_page.h>
#include <stepgraph/layouts/step_status.h>

#include "launch.h"
#include "schedule.h"

namespace stepgraph {

struct ScoreArgs {
    CacheFormat format;
    int heads;
    Tile tile;
    int max_rows;               // of the query buffer
    const uint8_t* query;       // query_bytes() of max_rows, see query_row.h
    const float* head_weights;  // [max_rows, heads]
    // Of MXFP4 pages, for the Hopper scorer, see index_inputs.h:
    const uint8_t* widened_query;
    const float* widened_weights;
    const uint8_t* cache;  // [pages] of page_stride_bytes, 4-byte aligned
    int64_t pages;
    int64_t page_stride_bytes;
    const int32_t* block_table;  // [max_requests, columns]; entries from ceil(ends / 64) on are not read
    int64_t block_table_stride;  // entries
    const int32_t* starts;       // [max_requests + 1]
    const int32_t* row_request;  // [rows]
    const int32_t* ends;         // [rows] exclusive
    const int32_t* page_prefix;  // [rows], see schedule.h; for the portable scorer
    const ScorePiece* pieces;    // of this tile, see schedule.h; for the Hopper scorer
    int32_t* drawn;  // [1] of this tile: draws, those that came too late included; 0 before and after; for the Hopper scorer
    int unscored_bound;  // as in the schedule

    // [rows of the tile, stride of the shape]; [r, j] is written for j < ends of rows above the bound
    float* logits;
    StepStatus* status;
};

#if defined(__CUDACC__) || defined(STEPGRAPH_EMULATED)
/// Where the logits of a row of the tile begin.
__device__ __forceinline__ float* logits_of_row(const ScoreArgs& args, const TileShape& shape, int row) {
    return args.logits + int64_t{row - args.tile.number * shape.rows} * shape.stride;
}
#endif

/// Enqueues the portable scorer: any page format, any number of rows a request, any page stride that is a multiple of 4.
/// FP32 sums over the columns, then over the heads, left to right: bit-equal to reference::score(), whatever the batch or
/// tile. `blocks`: the most blocks worth launching on this device, see score_blocks(). Throws Error.
void score(const ScoreArgs& args, int blocks, LaunchContext context);
void prepare_score();  ///< for every head count

/// Blocks of the portable scorer that the current device holds at once. A grid of fewer would leave it to chance how many
/// share a multiprocessor when some are still busy with the kernel before. Throws Error.
int score_blocks(int heads);

}  // namespace stepgraph
