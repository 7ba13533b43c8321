#include "geometry.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>

#include <stepgraph/layouts/query_row.h>
#include <stepgraph/layouts/tiles.h>

namespace stepgraph {
namespace {

constexpr int64_t int32_limit = std::numeric_limits<int32_t>::max();
constexpr int64_t most_positions = int64_t{1} << 30;  // what a block steps over at its end still fits 32 bits

template <typename Value>
void require(bool holds, const char* name, Value value, const std::string& must) {
    if (!holds) {
        std::ostringstream sentence;  // std::to_string would round a small k_norm_eps to 0
        sentence << "geometry: " << name << " is " << value << ", must be " << must;
        throw Error(ErrorCode::invalid_geometry, sentence.str());
    }
}

void check_rows(const Geometry& g) {
    require(valid_heads(g.heads), "heads", g.heads, "16, 32 or 64");
    require(g.top_k >= 1 && g.top_k <= 4096, "top_k", g.top_k, "1 to 4096");
    require(g.max_rows >= 1, "max_rows", g.max_rows, "at least 1");
    require(g.max_requests >= 1 && g.max_requests < int32_limit, "max_requests", g.max_requests,
            "1 to 2^31 - 2, for their starts are one more");
    require(int64_t{g.max_requests} * g.max_rows <= int32_limit, "max_requests * max_rows",
            int64_t{g.max_requests} * g.max_rows, "at most 2^31 - 1, for row numbers are 32-bit");
    require(int64_t{g.max_rows} * g.top_k <= int32_limit, "max_rows * top_k", int64_t{g.max_rows} * g.top_k,
            "at most 2^31 - 1");
}

void check_lengths(const Geometry& g) {
    require(g.block_table_columns >= 1 && g.width() <= most_positions, "block_table_columns", g.block_table_columns,
            "1 to 16777216, for positions are 32-bit");
    require(g.block_table_stride >= g.block_table_columns, "block_table_stride", g.block_table_stride,
            "0 or at least block_table_columns (" + std::to_string(g.block_table_columns) + ")");
    require(g.block_table_stride <= std::numeric_limits<int64_t>::max() / 4 / g.max_requests, "block_table_stride",
            g.block_table_stride, "such that the table's bytes fit 63 bits");
    require(g.dcp.world_size >= 1, "dcp.world_size", g.dcp.world_size, "at least 1");
    require(g.dcp.rank >= 0 && g.dcp.rank < g.dcp.world_size, "dcp.rank", g.dcp.rank,
            "0 to world_size - 1 (" + std::to_string(g.dcp.world_size - 1) + ")");
    require(g.dcp.interleave >= 1, "dcp.interleave", g.dcp.interleave, "at least 1");
    require(int64_t{g.dcp.world_size} * g.dcp.interleave <= int32_limit, "dcp.world_size * dcp.interleave",
            int64_t{g.dcp.world_size} * g.dcp.interleave, "at most 2^31 - 1");
    const int64_t positions = std::min(g.width() * g.dcp.world_size, int32_limit);
    require(g.max_model_len >= 1 && g.max_model_len <= positions, "max_model_len", g.max_model_len,
            "1 to dcp.world_size * 64 * block_table_columns (" + std::to_string(positions) + ")");
}

void check_cache(const Geometry& g) {
    const auto format = static_cast<int32_t>(g.cache_format);
    require(format >= 0 && format <= static_cast<int32_t>(CacheFormat::mxfp4_rowgroup), "cache_format", format,
            "one of fp8 (0), fp8_mx (1), mxfp4 (2), mxfp4_rowgroup (3)");
    require(g.pages >= 1 && g.pages <= int32_limit, "pages", g.pages, "1 to 2^31 - 1, for block numbers are 32-bit");
    const int own = page_bytes(g.cache_format);
    require(g.page_stride_bytes >= own && g.page_stride_bytes % 4 == 0, "page_stride_bytes", g.page_stride_bytes,
            "0 or a multiple of 4 that is at least the page's own " + std::to_string(own));
    require(g.page_stride_bytes <= std::numeric_limits<int64_t>::max() / g.pages, "page_stride_bytes", g.page_stride_bytes,
            "such that pages * page_stride_bytes fits 63 bits");
}

void check_projection(const Geometry& g) {
    require(g.q_lora_rank >= 0 && g.q_lora_rank % 8 == 0, "q_lora_rank", g.q_lora_rank, "0 or a positive multiple of 8");
    require(g.hidden_size >= 0 && g.hidden_size % 8 == 0, "hidden_size", g.hidden_size, "0 or a positive multiple of 8");
    require((g.q_lora_rank == 0) == (g.hidden_size == 0), "hidden_size", g.hidden_size,
            g.q_lora_rank == 0 ? "0 where q_lora_rank is 0: both projections are made here or neither"
                               : "above 0 where q_lora_rank is: both projections are made here or neither");
    require(g.projected_columns >= head_dim + g.heads && int64_t{g.projected_columns} * g.max_rows <= int32_limit,
            "projected_columns", g.projected_columns,
            "0 or at least 128 + heads (" + std::to_string(head_dim + g.heads) + ") and at most 2^31 / max_rows");
    require(g.key_column >= 0 && g.key_column <= g.projected_columns - head_dim, "key_column", g.key_column,
            "0 to projected_columns - 128 (" + std::to_string(g.projected_columns - head_dim) + ")");
    require(g.weight_column >= 0 && g.weight_column <= g.projected_columns - g.heads, "weight_column", g.weight_column,
            "0 to projected_columns - heads (" + std::to_string(g.projected_columns - g.heads) + ")");
    require(
        g.weight_column >= g.key_column + head_dim || g.weight_column + g.heads <= g.key_column, "weight_column",
        g.weight_column,
        "outside the key's columns " + std::to_string(g.key_column) + " to " + std::to_string(g.key_column + head_dim - 1));
    require(std::isfinite(g.k_norm_eps) && g.k_norm_eps >= 0.0F, "k_norm_eps", g.k_norm_eps, "finite and not negative");
}

}  // namespace

Geometry validate(const Geometry& geometry) {
    Geometry g = geometry;
    g.block_table_stride = g.block_table_stride == 0 ? g.block_table_columns : g.block_table_stride;
    check_rows(g);
    g.projected_columns = g.projected_columns == 0 ? head_dim + g.heads : g.projected_columns;
    check_lengths(g);
    if (g.page_stride_bytes == 0 && g.cache_format >= CacheFormat::fp8 && g.cache_format <= CacheFormat::mxfp4_rowgroup) {
        g.page_stride_bytes = page_bytes(g.cache_format);
    }
    check_cache(g);
    check_projection(g);
    return g;
}

int resolve_tile_rows(const Geometry& g, const Options& options) {
    if (options.tile_rows < 0) {
        throw Error(ErrorCode::invalid_geometry, "options: tile_rows is " + std::to_string(options.tile_rows) +
                                                     ", must be 0 (the default) or at least 1");
    }
    const int64_t wanted =
        options.tile_rows != 0 ? options.tile_rows : default_tile_rows(g.max_model_len, g.width(), g.top_k, g.heads);
    const int64_t tile = std::min<int64_t>(wanted, g.max_rows);
    if (tile * g.block_table_columns > most_positions) {
        throw Error(ErrorCode::invalid_geometry, "options: tile_rows is " + std::to_string(tile) +
                                                     ", must be at most 2^30 / block_table_columns (" +
                                                     std::to_string(most_positions / g.block_table_columns) +
                                                     "), for a tile's pages are counted in 32 bits");
    }
    return static_cast<int>(tile);
}

}  // namespace stepgraph
