// How many query rows share one tile of logits.
#pragma once

#include <algorithm>
#include <cstdint>

namespace stepgraph {

/// Rows of a tile such that its logits, selection scratch and queries stay within what 32 rows of `max_model_len` keys take.
/// 32 wherever one rank holds the whole context, more under context parallelism. Lengths in tokens; `width` is the number of
/// local positions (64 * block table columns). Source: vLLM's `decode_tile_size` for the MXFP4 indexer.
constexpr int64_t default_tile_rows(int64_t max_model_len, int64_t width, int64_t top_k, int64_t heads) {
    const int64_t row_bytes = 4 * width + 24 * std::min(top_k, width) + 64 * heads + 256;
    return std::max<int64_t>(32, 32 * 4 * max_model_len / std::max<int64_t>(1, row_bytes));
}

/// Tiles that `rows` rows are cut into.
constexpr int tile_count(int rows, int tile_rows) {
    return rows / tile_rows + (rows % tile_rows != 0 ? 1 : 0);
}

}  // namespace stepgraph
