// Schedule: cuts the scoring of each tile into parts, from the lengths on the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include <stepgraph/layouts/host_device.h>
#include <stepgraph/layouts/tiles.h>

#include "launch.h"

namespace stepgraph {

/// Work of one block of the Hopper scorer: pages [page_begin, page_end) of a request, for rows [first_row, first_row +
/// rows).
///
/// The pieces of a tile: block b begins with piece 2*b, and 2*b + 1 is its second one, if it has one: both are known at
/// once. From 2 * blocks on stand those that follow others in a block's share, and from drawn_pieces_begin() on those that
/// blocks draw when they have done their share.
struct alignas(32) ScorePiece {
    int32_t request;
    int32_t page_begin, page_end;
    int32_t first_row, rows;
    int32_t block;  // block table entry of page_begin: spares the first page a dependent load
    int32_t next;   // piece that the same block does next; -1: it draws one, or is done where none are drawn
    int32_t drawn;  // pieces of the tile that are drawn

    [[nodiscard]] STEPGRAPH_HD bool empty() const { return page_begin == page_end; }
};

/// Behind two pieces for each block, and one for each request that begins in the midst of a block's share; passes over a
/// request count as requests. `rows`: of the bucket, `least_rows`: of its tiles.
STEPGRAPH_HD constexpr int drawn_pieces_begin(int blocks, int rows, int least_rows) {
    return 2 * blocks + most_tile_rows(rows, least_rows);
}

inline constexpr int most_score_blocks = 256;   // a workspace has room for as many, whatever the device
inline constexpr int least_drawn_pages = 4;     // that the limit of a drawn piece is at least
inline constexpr int most_drawn_pieces = 7168;  // beside one for each request, or pass over one

/// Pieces that a tile of a bucket of `rows` rows may have: tiles of `least_rows` rows, block tables of `columns` columns.
constexpr int64_t most_score_pieces(int rows, int least_rows, int64_t columns) {
    const int64_t most_rows = most_tile_rows(rows, least_rows);
    // However many rows it has: their logits fit where least_rows have room, but for a page of each that is not full.
    const int64_t pages = std::min(rows, least_rows) * columns + most_rows;
    const int64_t drawn = std::min<int64_t>(most_drawn_pieces, pages / (8 * least_drawn_pages) + 1);
    return drawn_pieces_begin(most_score_blocks, rows, least_rows) + drawn + most_rows;
}

struct ScheduleArgs {
    const int32_t* starts;       // [max_requests + 1]
    const int32_t* row_request;  // [rows]
    const int32_t* ends;         // [rows]
    int rows;                    // of the bucket
    TileShape least;             // of the tiles
    int unscored_bound;          // rows with ends <= this need no logits: top_k, or 0 where every logit is wanted
    TileShape* shape;            // [1] set to what the step's lengths allow, see tile_shape(); null: tiles have the least

    /// [rows] pages to read up to and including this row, counted from the first row of its tile. A request's pages are
    /// counted at its last row in the tile, whose bound is the largest. Null: the portable scorer is not used.
    int32_t* page_prefix = nullptr;

    /// [tiles, pieces_a_tile]; null: the Hopper scorer is not used, and nothing below is read.
    ScorePiece* pieces = nullptr;
    int64_t pieces_a_tile = 0;             // at least most_score_pieces()
    int32_t* drawn = nullptr;              // [tiles] set to 0: draws of the scorer's blocks
    const int32_t* block_table = nullptr;  // [max_requests, columns]
    int64_t block_table_stride = 0;        // entries
    int rows_a_pass = 1;                   // of one request, that share a reading of its keys
    int blocks = 1;                        // that score a tile, at most most_score_blocks
};

/// Enqueues one block a tile. Once a step, behind the decode layout.
///
/// Few pages are shared out evenly. Of many, 7/8 are, and the rest is cut into small pieces for blocks to draw that have
/// done their share: some multiprocessors read memory 8 % more slowly than most. Throws Error.
void schedule(const ScheduleArgs& args, LaunchContext context);
void prepare_schedule();

}  // namespace stepgraph
