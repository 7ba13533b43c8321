#include "workspace.h"

#include <stepgraph/kernels/project.h>
#include <stepgraph/layouts/decode_layout.h>
#include <stepgraph/layouts/query_row.h>
#include <stepgraph/layouts/tiles.h>

namespace stepgraph {
namespace {

class Arena {
public:
    explicit Arena(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

    template <typename Element>
    Element* take(int64_t elements) {
        const uintptr_t at = base_ + used_;
        used_ += (static_cast<size_t>(elements) * sizeof(Element) + 255) / 256 * 256;
        return reinterpret_cast<Element*>(at);
    }

    [[nodiscard]] size_t used() const { return used_; }

private:
    uintptr_t base_;
    size_t used_ = 0;
};

}  // namespace

WorkspaceParts lay_out_workspace(const Geometry& g, int tile_rows, void* base) {
    Arena arena(base);
    const int64_t rows = g.max_rows;
    WorkspaceParts parts{};
    parts.status = arena.take<StepStatus>(1);
    parts.starts = arena.take<int32_t>(int64_t{g.max_requests} + 1);
    parts.row_request = arena.take<int32_t>(rows);
    parts.ends = arena.take<int32_t>(rows);
    parts.slots = arena.take<int64_t>(rows);
    parts.page_prefix = arena.take<int32_t>(rows);
    parts.shape = arena.take<TileShape>(1);
    const int64_t tiles = tile_count(g.max_rows, tile_rows);
    parts.drawn = arena.take<int32_t>(tiles);
    parts.layout_bytes = arena.used();
    parts.pieces_a_tile = most_score_pieces(g.max_rows, tile_rows, g.block_table_columns);
    parts.pieces = arena.take<ScorePiece>(tiles * parts.pieces_a_tile);
    parts.layout_temporary_bytes = decode_layout_temporary_bytes(g.max_requests);
    parts.layout_temporaries = arena.take<char>(static_cast<int64_t>(parts.layout_temporary_bytes));
    if (g.projects()) {
        parts.iq = arena.take<__nv_bfloat16>(rows * g.heads * head_dim);
        parts.projected = arena.take<__nv_bfloat16>(rows * g.projected_columns);
        parts.product_workspace = arena.take<char>(static_cast<int64_t>(product_workspace_bytes));
    }
    parts.query = arena.take<uint8_t>(query_bytes(g.cache_format, g.heads, rows));
    parts.head_weights = arena.take<float>(rows * g.heads);
    if (is_mxfp4(g.cache_format)) {
        parts.widened_query = arena.take<uint8_t>(rows * g.heads * head_dim);
        parts.widened_weights = arena.take<float>(rows * g.heads);
    }
    parts.logits = arena.take<float>(tile_rows * g.width());
    parts.bytes = arena.used();
    return parts;
}

}  // namespace stepgraph
