// The one block of device memory that a pipeline works in, and what stands where in it.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>

#include <stepgraph/kernels/schedule.h>
#include <stepgraph/layouts/step_status.h>

#include "geometry.h"

namespace stepgraph {

/// Parts of the workspace, each aligned to 256 bytes. `logits` is one tile's, all else is sized for max_rows and one layer:
/// layers follow each other and share it.
struct WorkspaceParts {
    StepStatus* status;
    int32_t* starts;        // [max_requests + 1]
    int32_t* row_request;   // [max_rows]
    int32_t* ends;          // [max_rows]
    int64_t* slots;         // [max_rows]
    int32_t* page_prefix;   // [max_rows]; for the portable scorer
    TileShape* shape;       // [1]
    int32_t* drawn;         // [tiles of max_rows]; this and the pieces for the Hopper scorer
    size_t layout_bytes;    // of all that stands above, from the base on: what bind() clears
    int64_t pieces_a_tile;  // most_score_pieces() of the largest bucket
    ScorePiece* pieces;     // [tiles of max_rows, pieces_a_tile]
    void* layout_temporaries;
    size_t layout_temporary_bytes;
    __nv_bfloat16* iq;         // [max_rows, heads * 128]; null where the engine projects
    __nv_bfloat16* projected;  // [max_rows, projected_columns]; null where the engine projects
    void* product_workspace;   // null where the engine projects
    uint8_t* query;            // query_bytes() of max_rows
    float* head_weights;       // [max_rows, heads]
    // For the Hopper scorer of MXFP4 pages; null with other pages:
    uint8_t* widened_query;  // [max_rows, heads, 128]
    float* widened_weights;  // [max_rows, heads]
    float* logits;           // [tile_rows, width], or more rows of fewer logits
    size_t bytes;            // of the whole
};

/// Lays the parts out from `base` on; from null to learn the size. Needs no GPU.
WorkspaceParts lay_out_workspace(const Geometry& geometry, int tile_rows, void* base);

}  // namespace stepgraph
