// Schedule: cuts the scoring of each tile into pages of keys, from the lengths on the device.
#pragma once

#include <cstdint>

#include "launch.h"

namespace stepgraph {

struct ScheduleArgs {
    const int32_t* starts;       // [max_requests + 1]
    const int32_t* row_request;  // [rows]
    const int32_t* ends;         // [rows]
    int rows;                    // of the bucket
    int tile_rows;
    int rows_a_pass;     // of one request, that share a reading of its keys
    int unscored_bound;  // rows with ends <= this need no logits: top_k, or 0 where every logit is wanted

    /// [rows] pages to read up to and including this row, counted from the first row of its tile. A request's pages are
    /// counted at its last row in the tile, whose bound is the largest, once for each pass over its rows.
    int32_t* page_prefix;
};

/// Enqueues one block a tile. Once a step, behind the decode layout. Throws Error.
void schedule(const ScheduleArgs& args, LaunchContext context);
void prepare_schedule();

}  // namespace stepgraph
