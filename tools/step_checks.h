// Checks of a step's results that share no code with the stages that made them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <stepgraph/pipeline/geometry.h>

namespace stepgraph::tools {

/// Expects each row's indices to be what a full sort of its logits by (logit descending, position ascending) gives: the
/// first min(top_k, ends) positions, ascending, -1 behind them. Returns an empty string, or a sentence about the first row
/// that is not. ends: [rows], logits: [rows, width], indices: [rows, top_k].
std::string check_selection(const Geometry& geometry, const std::vector<int32_t>& ends, const std::vector<float>& logits,
                            const std::vector<int32_t>& indices);

/// Expects `cache` to hold at `slot` the nearest code of each column of `key` [128]: the decoded value lies within half a
/// step of its format, plus the rounding of BF16. Returns an empty string or a sentence.
std::string check_key(const Geometry& geometry, const std::vector<uint8_t>& cache, int64_t slot,
                      const std::vector<double>& key);

/// LayerNorm of one key in FP64. key, weight, bias: [128].
std::vector<double> exact_key(const std::vector<double>& key, const std::vector<float>& weight,
                              const std::vector<float>& bias, double eps);

/// Expects logits to lie within `tolerance` of the row's largest finite magnitude, and those that are not finite to be the
/// same. `expected` and `actual`: [rows, width]; only
/// positions below ends count. Returns an empty string or a sentence.
std::string check_logits(const Geometry& geometry, const std::vector<int32_t>& ends, const std::vector<float>& expected,
                         const std::vector<float>& actual, double tolerance);

/// Largest deviation of a logit, relative to its row's largest, that is accepted: the formats' rounding, and the short sums
/// of Hopper's FP8 products.
double logit_tolerance(CacheFormat format);

}  // namespace stepgraph::tools
