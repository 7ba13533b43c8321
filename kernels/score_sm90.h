// Score on Hopper: pages by the bulk copy engine into a ring, products by the matrix units, sums in registers.
#pragma once

#include "score.h"

namespace stepgraph {

/// Whether score_sm90() can read such pages here: a GPU of compute capability 9.0, kernels compiled for sm_90a, pages
/// whose base and stride are multiples of 16 bytes. Throws Error(cuda).
bool can_score_sm90(CacheFormat format, const uint8_t* cache, int64_t page_stride_bytes);

/// Query rows that share one reading of a request's keys: 256 / heads.
int score_sm90_rows_a_pass(int heads);

/// Rows with no more keys than this are scored by products that are exact but for the order of their FP32 sums. Longer ones
/// are scored by E4M3 products, whose sums keep some 14 bits: of a row with many keys the largest logit is far above what is
/// lost; of a row with few it may itself be what is left of a cancellation.
inline constexpr int score_sm90_exact_keys = 1024;

/// Enqueues `blocks` blocks, those that schedule() made args.pieces for, with score_sm90_rows_a_pass(args.heads) rows a
/// pass. can_score_sm90() holds and prepare_score_sm90(args.format, args.heads) was called. The logits of score() within
/// 2e-3 (FP8) or 4e-3 (MXFP4) of a row's largest, and the same bits for a row whatever the batch, the tile or the number of
/// blocks. Throws Error.
void score_sm90(const ScoreArgs& args, int blocks, LaunchContext context);
void prepare_score_sm90(CacheFormat format, int heads);

/// Blocks that fill the current device. Throws Error.
int score_sm90_blocks();

}  // namespace stepgraph
