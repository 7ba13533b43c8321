// A pipeline's geometry as the reference wants it.
#pragma once

#include <stepgraph/kernels/reference/step.h>
#include <stepgraph/pipeline/geometry.h>

namespace stepgraph::tools {

/// `geometry` is validated; `rows` of the bucket.
inline reference::Shape reference_shape(const Geometry& geometry, int rows) {
    return {.format = geometry.cache_format,
            .heads = geometry.heads,
            .top_k = geometry.top_k,
            .rows = rows,
            .max_requests = geometry.max_requests,
            .columns = geometry.block_table_columns,
            .block_table_stride = geometry.block_table_stride,
            .pages = geometry.pages,
            .page_stride_bytes = geometry.page_stride_bytes,
            .projected_columns = geometry.projected_columns,
            .key_column = geometry.key_column,
            .weight_column = geometry.weight_column,
            .q_lora_rank = geometry.q_lora_rank,
            .hidden_size = geometry.hidden_size,
            .k_norm_eps = geometry.k_norm_eps,
            .dcp = geometry.dcp};
}

}  // namespace stepgraph::tools
