#include "step.h"

#include <algorithm>
#include <limits>

#include <stepgraph/layouts/query_row.h>

#include "index_inputs.h"
#include "project.h"
#include "score.h"
#include "select.h"

namespace stepgraph::reference {
namespace {

size_t elements(int64_t a, int64_t b = 1) {
    return static_cast<size_t>(a) * static_cast<size_t>(b);
}

int live_rows(const Shape& shape, const Layout& layout) {
    return std::min(layout.starts.back(), shape.rows);
}

void project_or_copy(const Shape& shape, const LayerInputs& inputs, LayerOutputs& out) {
    const int iq_columns = shape.heads * head_dim;
    out.iq.resize(elements(shape.rows, iq_columns));
    out.projected.resize(elements(shape.rows, shape.projected_columns));
    if (inputs.iq != nullptr) {
        std::copy_n(inputs.iq, out.iq.size(), out.iq.begin());
        std::copy_n(inputs.projected, out.projected.size(), out.projected.begin());
        return;
    }
    project(inputs.q_c, inputs.wq_b, shape.rows, iq_columns, shape.q_lora_rank, out.iq.data());
    project(inputs.hidden, inputs.w_kv, shape.rows, shape.projected_columns, shape.hidden_size, out.projected.data());
}

}  // namespace

Layout decode_layout(const Shape& shape, const StepInputs& step, StepStatus* status) {
    Layout layout;
    layout.starts.resize(elements(shape.max_requests + 1));
    layout.row_request.resize(elements(shape.rows));
    layout.ends.resize(elements(shape.rows));
    layout.slots.assign(elements(shape.rows), -1);
    decode_layout_host({.seq_lens = step.seq_lens,
                        .query_lens = step.query_lens,
                        .num_requests = step.num_requests,
                        .block_table = step.block_table,
                        .block_table_stride = shape.block_table_stride,
                        .max_requests = shape.max_requests,
                        .rows = shape.rows,
                        .columns = shape.columns,
                        .pages = shape.pages,
                        .dcp = shape.dcp,
                        .starts = layout.starts.data(),
                        .row_request = layout.row_request.data(),
                        .ends = layout.ends.data(),
                        .slots = step.slots != nullptr ? nullptr : layout.slots.data(),
                        .status = status});
    if (step.slots != nullptr) {
        std::copy_n(step.slots, live_rows(shape, layout), layout.slots.begin());
    }
    return layout;
}

LayerOutputs layer(const Shape& shape, const StepInputs& step, const LayerInputs& inputs, const Layout& layout,
                   bool all_logits, StepStatus* status) {
    LayerOutputs out;
    project_or_copy(shape, inputs, out);

    out.query.assign(static_cast<size_t>(query_bytes(shape.format, shape.heads, shape.rows)), 0);
    out.head_weights.assign(elements(shape.rows, shape.heads), 0.0F);
    index_inputs({.format = shape.format,
                  .heads = shape.heads,
                  .rows = live_rows(shape, layout),
                  .max_rows = shape.rows,
                  .iq = out.iq.data(),
                  .projected = out.projected.data(),
                  .projected_columns = shape.projected_columns,
                  .key_column = shape.key_column,
                  .weight_column = shape.weight_column,
                  .k_norm_weight = inputs.k_norm_weight,
                  .k_norm_bias = inputs.k_norm_bias,
                  .k_norm_eps = shape.k_norm_eps,
                  .slots = layout.slots.data(),
                  .cache = inputs.cache,
                  .pages = shape.pages,
                  .page_stride_bytes = shape.page_stride_bytes,
                  .query = out.query.data(),
                  .head_weights = out.head_weights.data(),
                  .status = status});

    out.logits.assign(elements(shape.rows, shape.width()), -std::numeric_limits<float>::infinity());
    score({.format = shape.format,
           .heads = shape.heads,
           .rows = shape.rows,
           .max_rows = shape.rows,
           .query = out.query.data(),
           .head_weights = out.head_weights.data(),
           .cache = inputs.cache,
           .pages = shape.pages,
           .page_stride_bytes = shape.page_stride_bytes,
           .block_table = step.block_table,
           .block_table_stride = shape.block_table_stride,
           .starts = layout.starts.data(),
           .row_request = layout.row_request.data(),
           .ends = layout.ends.data(),
           .unscored_bound = all_logits ? 0 : shape.top_k,
           .logits = out.logits.data(),
           .logits_stride = shape.width(),
           .status = status});

    out.indices.resize(elements(shape.rows, shape.top_k));
    out.counts.resize(elements(shape.rows));
    out.physical_slots.resize(elements(shape.rows, shape.top_k));
    if (all_logits) {
        out.winner_logits.resize(elements(shape.rows, shape.top_k));
    }
    select({.rows = shape.rows,
            .top_k = shape.top_k,
            .ends = layout.ends.data(),
            .logits = out.logits.data(),
            .logits_stride = shape.width(),
            .row_request = layout.row_request.data(),
            .block_table = step.block_table,
            .block_table_stride = shape.block_table_stride,
            .pages = shape.pages,
            .indices = out.indices.data(),
            .counts = out.counts.data(),
            .physical_slots = out.physical_slots.data(),
            .winner_logits = all_logits ? out.winner_logits.data() : nullptr});
    return out;
}

}  // namespace stepgraph::reference
