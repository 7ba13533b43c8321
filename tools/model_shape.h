// A model's numbers as the command line gives them.
#pragma once

#include <cstdint>

#include <stepgraph/pipeline/geometry.h>

namespace stepgraph::tools {

/// Kimi K3.1's indexer, unless other numbers are given.
struct ModelShape {
    int heads = 32;
    int top_k = 2048;
    int rows = 64;                   // of the bucket; as many requests
    int64_t max_model_len = 131072;  // tokens over all ranks
    int dcp_world_size = 1;
    int tile_rows = 0;  // 0: the default
    CacheFormat format = CacheFormat::fp8;
    bool engine_projects = false;
    bool full_edges = false;
    bool portable_scorer = false;
};

/// Not validated. One page stands for the cache: neither the workspace nor the graph depends on how many there are.
inline Geometry geometry_of(const ModelShape& shape) {
    Geometry geometry;
    geometry.heads = shape.heads;
    geometry.top_k = shape.top_k;
    geometry.max_rows = shape.rows;
    geometry.max_requests = shape.rows;
    geometry.max_model_len = shape.max_model_len;
    geometry.dcp.world_size = shape.dcp_world_size;
    const int64_t page_positions = int64_t{page_tokens} * (shape.dcp_world_size > 0 ? shape.dcp_world_size : 1);
    const int64_t columns = shape.max_model_len / page_positions + (shape.max_model_len % page_positions > 0 ? 1 : 0);
    geometry.block_table_columns = columns > INT32_MAX ? INT32_MAX : static_cast<int>(columns);
    geometry.cache_format = shape.format;
    geometry.pages = 1;
    if (!shape.engine_projects) {
        geometry.q_lora_rank = 1536;
        geometry.hidden_size = 7168;
    }
    return geometry;
}

inline Options options_of(const ModelShape& shape) {
    return {.programmatic_edges = !shape.full_edges, .portable_scorer = shape.portable_scorer, .tile_rows = shape.tile_rows};
}

}  // namespace stepgraph::tools
