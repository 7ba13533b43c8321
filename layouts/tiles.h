// How many query rows share one tile of logits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host_device.h"

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

/// How the rows of a step are cut: so many a tile, their logits so many floats apart.
struct alignas(8) TileShape {
    int32_t rows;
    int32_t stride;  // a multiple of 4
};

/// How many times its least rows a tile may have. The workspace holds pieces for every tile as if it had them all: without a
/// limit that would grow with the square of the rows.
inline constexpr int most_tile_growth = 16;

/// The most rows that a tile of a bucket of `rows` rows may have, whatever the step's lengths.
STEPGRAPH_HD constexpr int most_tile_rows(int rows, int least_rows) {
    const int64_t most = int64_t{least_rows} * most_tile_growth;
    return static_cast<int>(rows < most ? rows : most);
}

/// As many of the `rows` rows of a step as fit where tiles of the shape `least` have room, when no row has more than
/// `longest` <= least.stride keys: never less than least.rows, if there are as many, nor more than most_tile_rows().
STEPGRAPH_HD constexpr TileShape tile_shape(int rows, int32_t longest, const TileShape& least) {
    const int64_t stride = (int64_t{longest > 1 ? longest : 1} + 3) / 4 * 4;
    const int64_t fit = int64_t{least.rows} * least.stride / stride;
    const int most = most_tile_rows(rows, least.rows);
    return {static_cast<int32_t>(fit < most ? fit : most), static_cast<int32_t>(stride)};
}

/// A tile, as the kernels that work on it are told.
struct Tile {
    int number;
    int rows;                // of the bucket
    TileShape least;         // the shape of tiles for rows of any length
    const TileShape* shape;  // on the device, the one for the step's lengths; null: `least`

    [[nodiscard]] STEPGRAPH_HD constexpr TileShape shape_of_step() const { return shape == nullptr ? least : *shape; }
    /// The most rows that it can have.
    [[nodiscard]] STEPGRAPH_HD constexpr int most_rows() const {
        const int left = rows - number * least.rows;
        const int most = shape == nullptr ? least.rows : most_tile_rows(rows, least.rows);
        return most < left ? most : left;
    }
};

/// The rows [begin, end) of a tile; none behind the last row.
struct TileRows {
    int begin;
    int end;

    STEPGRAPH_HD constexpr TileRows(const Tile& tile, const TileShape& shape) : begin(tile.rows), end(tile.rows) {
        const int64_t first = int64_t{tile.number} * shape.rows;
        if (first < tile.rows) {
            begin = static_cast<int>(first);
            end = static_cast<int>(first + shape.rows < tile.rows ? first + shape.rows : tile.rows);
        }
    }
    [[nodiscard]] STEPGRAPH_HD constexpr int count() const { return end - begin; }
};

}  // namespace stepgraph
