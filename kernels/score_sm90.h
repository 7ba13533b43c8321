// Score on Hopper: FP8 pages by the tensor copy engine into a ring, products by the matrix units, sums in registers.
#pragma once

#include <cuda.h>

#include "score.h"

namespace stepgraph {

/// Whether score_sm90() can read such pages here: a GPU of compute capability 9.0, kernels compiled for sm_90a, FP8 pages
/// whose base and stride are multiples of 16 bytes, the stride below 2^40. Throws Error(cuda).
bool can_score_sm90(CacheFormat format, const uint8_t* cache, int64_t page_stride_bytes);

/// Query rows that share one reading of a request's keys: 128 / heads.
int score_sm90_rows_a_pass(int heads);

/// The tensor map of a layer's payloads: [pages][64 tokens][128 bytes]. Made once, passed by value. Throws Error(cuda).
CUtensorMap make_page_map(const uint8_t* cache, int64_t pages, int64_t page_stride_bytes);

/// Enqueues one block a multiprocessor. The same logits as score() but for the order of its FP32 sums, and the same bits for
/// a row whatever the batch or tile. Throws Error.
void score_sm90(const ScoreArgs& args, const CUtensorMap& pages, int blocks, LaunchContext context);
void prepare_score_sm90(int heads);

/// Multiprocessors of the current device. Throws Error.
int score_sm90_blocks();

}  // namespace stepgraph
