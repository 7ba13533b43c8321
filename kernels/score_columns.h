// Scoring column by column: what the matrix units cannot take.
#pragma once

#include <stepgraph/layouts/query_row.h>

#include "block_instructions.h"
#include "score.h"

namespace stepgraph::sm90 {

/// max(0, x) that keeps a NaN.
__device__ __forceinline__ float relu(float x) {
    return device::larger_or_nan(x, 0.0F);
}

/// Scores a warp's sixteen keys, from `token` of a page on, for a row of which MXFP4 numbers could not be widened, or with
/// keys of which they could not: as the portable scorer does, a lane a key, in no hurry.
template <int heads>
__device__ __noinline__ void score_by_columns(const ScoreArgs& args, const uint8_t* page, int token, int position, int row) {
    token += static_cast<int>(threadIdx.x) % 32;
    position += static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x % 32 >= 16 || position >= args.ends[row]) {
        return;
    }
    float sum = 0.0F;
    for (int head = 0; head < heads; ++head) {
        float dot = 0.0F;
        for (int column = 0; column < head_dim; ++column) {
            const float query = query_value(args.format, args.query, heads, args.max_rows, row, head, column);
            dot = add_rn(dot, mul_rn(query, key_value(args.format, page, token, column)));
        }
        sum = add_rn(sum, mul_rn(args.head_weights[int64_t{row} * heads + head], relu(dot)));
    }
    logits_of_row(args, args.tile.shape_of_step(), row)[position] = sum;
}

}  // namespace stepgraph::sm90
