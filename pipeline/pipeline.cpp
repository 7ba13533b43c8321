#include "pipeline.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include <stepgraph/kernels/index_inputs.h>
#include <stepgraph/kernels/project.h>
#include <stepgraph/kernels/project_sm90.h>
#include <stepgraph/kernels/schedule.h>
#include <stepgraph/kernels/score.h>
#include <stepgraph/kernels/score_sm90.h>
#include <stepgraph/kernels/select.h>
#include <stepgraph/kernels/select_sm90.h>
#include <stepgraph/layouts/tiles.h>

#include "capture_mode.h"
#include "check_buffers.h"
#include "check_calls.h"
#include "own_stream.h"
#include "workspace.h"

namespace stepgraph {
namespace {

/// A branch of a capture beside its main stream.
class Branch {
public:
    Branch() {
        const UnhinderedByOtherCaptures unhindered;
        check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    }
    ~Branch() {
        const UnhinderedByOtherCaptures unhindered;
        cudaEventDestroy(event_);
    }
    Branch(const Branch&) = delete;
    Branch& operator=(const Branch&) = delete;

    cudaStream_t fork(cudaStream_t main) {
        follow(main, stream_);
        return stream_;
    }
    void join(cudaStream_t main) { follow(stream_, main); }

private:
    void follow(cudaStream_t first, cudaStream_t second) {
        check_cuda(cudaEventRecord(event_, first), "cudaEventRecord");
        check_cuda(cudaStreamWaitEvent(second, event_, 0), "cudaStreamWaitEvent");
    }

    OwnStream stream_;
    cudaEvent_t event_ = nullptr;
};

bool hands_out_logits(const LayerBuffers& layer) {
    return layer.logits != nullptr;
}

}  // namespace

/// What bind() fixes.
struct Pipeline::Bound {
    Geometry geometry;
    Options options;
    int tile_rows;
    StepBuffers step;
    std::vector<LayerBuffers> layers;
    WorkspaceParts work;
    int unscored_bound;  // rows with ends <= this need no logits
    int score_blocks;    // of the scorer in use
    bool portable_scorer;
    bool portable_select;
    // By cuBLASLt, for buckets of every size; empty: by Hopper's kernel, likewise, or by the engine. A row's bits are the
    // same in each bucket.
    std::optional<Product> query_product;
    std::optional<Product> packed_product;
    std::map<int, CapturedGraph> graphs;  // by bucket
    mutable int layout_rows = 0;          // that the last layout was enqueued for; 0: none was

    [[nodiscard]] LaunchContext on(cudaStream_t stream) const { return {stream, options.programmatic_edges}; }
    [[nodiscard]] const int64_t* slots() const { return step.slots != nullptr ? step.slots : work.slots; }
    [[nodiscard]] TileShape least_tile() const { return {tile_rows, static_cast<int32_t>(geometry.width())}; }
    /// Where a step of a bucket of `rows` rows says how its tiles are cut; null: as the least one.
    [[nodiscard]] TileShape* tile_shape_for(int rows) const {
        return rows <= tile_rows || std::any_of(layers.begin(), layers.end(), hands_out_logits) ? nullptr : work.shape;
    }
    void enqueue_layout(int rows, cudaStream_t stream) const;
    [[nodiscard]] ProjectArgs project_args(const LayerBuffers& layer, int rows) const;
    void prepare_projections();
    void enqueue_projections(const LayerBuffers& layer, int rows, cudaStream_t stream) const;
    void enqueue_index_inputs(const LayerBuffers& layer, int rows, cudaStream_t stream) const;
    void enqueue_tile(const LayerBuffers& layer, const Tile& tile, cudaStream_t stream) const;
    void enqueue_behind_projections(const LayerBuffers& layer, int rows, cudaStream_t stream) const;
    void enqueue_step(int rows, const AfterLayer& after_layer, Branch& branch, cudaStream_t stream) const;
    static void call_engine(const AfterLayer& after_layer, int layer, int rows, cudaStream_t stream);
};

struct Pipeline::Parts {
    Geometry geometry;
    Options options;
    int tile_rows;
    size_t workspace_bytes;
    std::unique_ptr<Bound> bound;
    bool capturing = false;

    Bound& bound_for(const char* call) const {
        check_bound(bound != nullptr, call);
        return *bound;
    }
};

/// While it lives, the pipeline is being captured; what was enqueued into the graph is no layout of the eager kind.
class Pipeline::Capturing {
public:
    explicit Capturing(Parts& parts) : parts_(parts) { parts_.capturing = true; }
    ~Capturing() {
        parts_.capturing = false;
        parts_.bound->layout_rows = 0;
    }
    Capturing(const Capturing&) = delete;
    Capturing& operator=(const Capturing&) = delete;

private:
    Parts& parts_;
};

void Pipeline::Bound::enqueue_layout(int rows, cudaStream_t stream) const {
    layout_rows = rows;
    cudaGetLastError();  // Thrust would take an error that an earlier call of this thread left for its own
    try {
        decode_layout_device({.seq_lens = step.seq_lens,
                              .query_lens = step.query_lens,
                              .num_requests = step.num_requests,
                              .block_table = step.block_table,
                              .block_table_stride = geometry.block_table_stride,
                              .max_requests = geometry.max_requests,
                              .rows = rows,
                              .columns = geometry.block_table_columns,
                              .pages = geometry.pages,
                              .dcp = geometry.dcp,
                              .starts = work.starts,
                              .row_request = work.row_request,
                              .ends = work.ends,
                              .slots = step.slots != nullptr ? nullptr : work.slots,
                              .status = work.status},
                             work.layout_temporaries, work.layout_temporary_bytes, stream);
    } catch (const std::runtime_error& failure) {  // Thrust reports in exceptions of its own
        throw Error(ErrorCode::cuda, std::string("decode layout failed: ") + failure.what());
    }
    schedule({.starts = work.starts,
              .row_request = work.row_request,
              .ends = work.ends,
              .rows = rows,
              .least = least_tile(),
              .unscored_bound = unscored_bound,
              .shape = tile_shape_for(rows),
              .page_prefix = portable_scorer ? work.page_prefix : nullptr,
              .pieces = portable_scorer ? nullptr : work.pieces,
              .pieces_a_tile = work.pieces_a_tile,
              .drawn = work.drawn,
              .block_table = step.block_table,
              .block_table_stride = geometry.block_table_stride,
              .rows_a_pass = score_sm90_rows_a_pass(geometry.heads),
              .blocks = score_blocks},
             on(stream));
}

ProjectArgs Pipeline::Bound::project_args(const LayerBuffers& layer, int rows) const {
    // The packed product first: its sums pass between blocks, which takes longest.
    return {{{layer.hidden, layer.w_kv, work.projected, geometry.projected_columns, geometry.hidden_size},
             {layer.q_c, layer.wq_b, work.iq, geometry.heads * head_dim, geometry.q_lora_rank}},
            rows};
}

void Pipeline::Bound::enqueue_projections(const LayerBuffers& layer, int rows, cudaStream_t stream) const {
    if (layer.iq != nullptr) {
        return;
    }
    if (!query_product.has_value()) {
        project_sm90(project_args(layer, rows), on(stream));
    } else {
        query_product->enqueue(layer.q_c, layer.wq_b, work.iq, rows, work.product_workspace, stream);
        packed_product->enqueue(layer.hidden, layer.w_kv, work.projected, rows, work.product_workspace, stream);
    }
}

void Pipeline::Bound::prepare_projections() {
    if (can_project_sm90(geometry.hidden_size, geometry.q_lora_rank)) {
        prepare_project_sm90(project_args({}, 1));
    } else {
        query_product.emplace(ProductShape{geometry.heads * head_dim, geometry.q_lora_rank}, geometry.max_rows);
        packed_product.emplace(ProductShape{geometry.projected_columns, geometry.hidden_size}, geometry.max_rows);
    }
}

void Pipeline::Bound::enqueue_index_inputs(const LayerBuffers& layer, int rows, cudaStream_t stream) const {
    index_inputs({.format = geometry.cache_format,
                  .heads = geometry.heads,
                  .rows = rows,
                  .max_rows = geometry.max_rows,
                  .max_requests = geometry.max_requests,
                  .starts = work.starts,
                  .iq = layer.iq != nullptr ? layer.iq : work.iq,
                  .projected = layer.projected != nullptr ? layer.projected : work.projected,
                  .projected_columns = geometry.projected_columns,
                  .key_column = geometry.key_column,
                  .weight_column = geometry.weight_column,
                  .k_norm_weight = layer.k_norm_weight,
                  .k_norm_bias = layer.k_norm_bias,
                  .k_norm_eps = geometry.k_norm_eps,
                  .slots = slots(),
                  .cache = layer.cache,
                  .pages = geometry.pages,
                  .page_stride_bytes = geometry.page_stride_bytes,
                  .query = work.query,
                  .head_weights = work.head_weights,
                  .widened_query = portable_scorer ? nullptr : work.widened_query,
                  .widened_weights = portable_scorer ? nullptr : work.widened_weights,
                  .status = work.status},
                 on(stream));
}

void Pipeline::Bound::enqueue_tile(const LayerBuffers& layer, const Tile& tile, cudaStream_t stream) const {
    // Where logits are handed out, every tile has the least shape.
    float* logits =
        layer.logits != nullptr ? layer.logits + int64_t{tile.number} * tile.least.rows * geometry.width() : work.logits;
    const ScoreArgs args{.format = geometry.cache_format,
                         .heads = geometry.heads,
                         .tile = tile,
                         .max_rows = geometry.max_rows,
                         .query = work.query,
                         .head_weights = work.head_weights,
                         .widened_query = work.widened_query,
                         .widened_weights = work.widened_weights,
                         .cache = layer.cache,
                         .pages = geometry.pages,
                         .page_stride_bytes = geometry.page_stride_bytes,
                         .block_table = step.block_table,
                         .block_table_stride = geometry.block_table_stride,
                         .starts = work.starts,
                         .row_request = work.row_request,
                         .ends = work.ends,
                         .page_prefix = work.page_prefix,
                         .pieces = work.pieces + tile.number * work.pieces_a_tile,
                         .drawn = work.drawn + tile.number,
                         .unscored_bound = unscored_bound,
                         .logits = logits,
                         .status = work.status};
    if (portable_scorer) {
        const auto most_pieces = int64_t{tile.most_rows()} * geometry.block_table_columns;
        score(args, static_cast<int>(std::min<int64_t>(score_blocks, most_pieces)), on(stream));
    } else {
        score_sm90(args, score_blocks, on(stream));
    }

    const SelectArgs select_args{.tile = tile,
                                 .top_k = geometry.top_k,
                                 .ends = work.ends,
                                 .logits = logits,
                                 .row_request = work.row_request,
                                 .block_table = step.block_table,
                                 .block_table_stride = geometry.block_table_stride,
                                 .pages = geometry.pages,
                                 .indices = layer.indices,
                                 .counts = layer.counts,
                                 .physical_slots = layer.physical_slots,
                                 .winner_logits = layer.winner_logits,
                                 .padded_logits = layer.logits != nullptr ? logits : nullptr,
                                 .width = geometry.width(),
                                 .last_of_layer = tile.number + 1 == tile_count(tile.rows, tile.least.rows)};
    if (portable_select) {
        select(select_args, on(stream));
    } else {
        select_sm90(select_args, on(stream));
    }
}

void Pipeline::Bound::enqueue_behind_projections(const LayerBuffers& layer, int rows, cudaStream_t stream) const {
    enqueue_index_inputs(layer, rows, stream);
    for (int number = 0; number < tile_count(rows, tile_rows); ++number) {
        enqueue_tile(layer, {.number = number, .rows = rows, .least = least_tile(), .shape = tile_shape_for(rows)}, stream);
    }
}

void Pipeline::Bound::enqueue_step(int rows, const AfterLayer& after_layer, Branch& branch, cudaStream_t stream) const {
    for (int layer = 0; layer < static_cast<int>(layers.size()); ++layer) {
        const LayerBuffers& buffers = layers[static_cast<size_t>(layer)];
        const bool beside_layout = layer == 0 && buffers.iq == nullptr;
        if (layer == 0) {
            enqueue_layout(rows, beside_layout ? branch.fork(stream) : stream);
        }
        enqueue_projections(buffers, rows, stream);
        if (beside_layout) {
            branch.join(stream);
        }
        enqueue_behind_projections(buffers, rows, stream);
        if (after_layer) {
            call_engine(after_layer, layer, rows, stream);
        }
    }
}

void Pipeline::Bound::call_engine(const AfterLayer& after_layer, int layer, int rows, cudaStream_t stream) {
    cudaGetLastError();
    after_layer(layer, rows, stream);
    // A launch that failed is missing from the graph, and nothing else would say so.
    const cudaError_t left = cudaGetLastError();
    if (left != cudaSuccess) {
        throw Error(ErrorCode::invalid_capture, "after_layer left the CUDA error " + std::string(cudaGetErrorName(left)) +
                                                    " behind for layer " + std::to_string(layer) + " of bucket " +
                                                    std::to_string(rows) + ": " + cudaGetErrorString(left));
    }
}

Pipeline::Pipeline(const Geometry& geometry, const Options& options) {
    const Geometry valid = validate(geometry);
    const int tile_rows = resolve_tile_rows(valid, options);
    parts_ = std::make_unique<Parts>(Parts{.geometry = valid,
                                           .options = options,
                                           .tile_rows = tile_rows,
                                           .workspace_bytes = lay_out_workspace(valid, tile_rows, nullptr).bytes,
                                           .bound = nullptr});
}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

const Geometry& Pipeline::geometry() const noexcept {
    return parts_->geometry;
}
int Pipeline::tile_rows() const noexcept {
    return parts_->tile_rows;
}
size_t Pipeline::workspace_bytes() const noexcept {
    return parts_->workspace_bytes;
}

void Pipeline::bind(const StepBuffers& step, std::span<const LayerBuffers> layers, const Workspace& workspace) {
    check_outside_callback(parts_->capturing, "bind");
    const Geometry& geometry = parts_->geometry;
    check_addresses(geometry, step, layers, workspace, parts_->workspace_bytes);
    const UnhinderedByOtherCaptures unhindered;
    check_device_memory(step, layers, workspace);

    const bool all_logits = std::any_of(layers.begin(), layers.end(), [](const LayerBuffers& layer) {
        return layer.logits != nullptr || layer.winner_logits != nullptr;
    });
    auto bound = std::make_unique<Bound>(Bound{.geometry = geometry,
                                               .options = parts_->options,
                                               .tile_rows = parts_->tile_rows,
                                               .step = step,
                                               .layers = {layers.begin(), layers.end()},
                                               .work = lay_out_workspace(geometry, parts_->tile_rows, workspace.data),
                                               .unscored_bound = all_logits ? 0 : geometry.top_k,
                                               .score_blocks = stepgraph::score_blocks(geometry.heads),
                                               .portable_scorer = true,
                                               .portable_select = parts_->options.portable_select || !can_select_sm90(),
                                               .query_product = std::nullopt,
                                               .packed_product = std::nullopt,
                                               .graphs = {}});
    prepare_schedule();
    prepare_index_inputs();
    prepare_score();
    prepare_select();
    if (!bound->portable_select) {
        prepare_select_sm90();
    }
    bound->portable_scorer =
        parts_->options.portable_scorer || !std::all_of(layers.begin(), layers.end(), [&](const auto& layer) {
            return can_score_sm90(geometry.cache_format, layer.cache, geometry.page_stride_bytes);
        });
    if (!bound->portable_scorer) {
        prepare_score_sm90(geometry.cache_format, geometry.heads);
        bound->score_blocks = score_sm90_blocks();
    }
    if (std::any_of(layers.begin(), layers.end(), [](const LayerBuffers& layer) { return layer.iq == nullptr; })) {
        bound->prepare_projections();
    }
    // One step thrown away: it loads the kernels that Thrust makes of the layout, and finds what a capture would not bear.
    Branch branch;
    static_cast<void>(
        CapturedGraph::capture([&](cudaStream_t trial) { bound->enqueue_step(geometry.max_rows, nullptr, branch, trial); },
                               cudaStreamCaptureModeRelaxed));
    // Status and layout: before its first layout a pipeline has no live row.
    const OwnStream stream;
    check_cuda(cudaMemsetAsync(workspace.data, 0, bound->work.layout_bytes, stream), "cudaMemsetAsync");
    stream.synchronise();
    bound->layout_rows = 0;
    parts_->bound = std::move(bound);
}

void Pipeline::capture(std::vector<int> buckets, const AfterLayer& after_layer) {
    Bound& bound = parts_->bound_for("capture");
    check_outside_callback(parts_->capturing, "capture");
    buckets = checked_buckets(std::move(buckets), bound.geometry.max_rows);
    const Capturing capturing(*parts_);
    std::map<int, CapturedGraph> graphs;
    for (const int rows : buckets) {
        Branch branch;
        graphs[rows] =
            CapturedGraph::capture([&](cudaStream_t stream) { bound.enqueue_step(rows, after_layer, branch, stream); });
    }
    bound.graphs = std::move(graphs);
}

void Pipeline::replay(int rows, cudaStream_t stream) const {
    const Bound& bound = parts_->bound_for("replay");
    check_replay(rows, bound.graphs.empty() ? 0 : bound.graphs.rbegin()->first);
    bound.layout_rows = 0;  // the replay lays out a step of its own, in the same workspace
    bound.graphs.lower_bound(rows)->second.launch(stream);
}

void Pipeline::enqueue_layout(int rows, cudaStream_t stream) const {
    const Bound& bound = parts_->bound_for("enqueue_layout");
    check_rows(rows, bound.geometry.max_rows);
    bound.enqueue_layout(rows, stream);
}

void Pipeline::enqueue_layer(int layer, int rows, cudaStream_t stream) const {
    const Bound& bound = parts_->bound_for("enqueue_layer");
    check_layer(layer, bound.layers.size());
    check_rows(rows, bound.geometry.max_rows);
    check_layout(bound.layout_rows, rows);
    const LayerBuffers& buffers = bound.layers[static_cast<size_t>(layer)];
    bound.enqueue_projections(buffers, rows, stream);
    bound.enqueue_behind_projections(buffers, rows, stream);
}

std::vector<int> Pipeline::buckets() const {
    std::vector<int> rows;
    if (parts_->bound != nullptr) {
        for (const auto& [bucket, graph] : parts_->bound->graphs) {
            rows.push_back(bucket);
        }
    }
    return rows;
}

const CapturedGraph& Pipeline::graph(int bucket) const {
    const Bound& bound = parts_->bound_for("graph");
    const auto found = bound.graphs.find(bucket);
    if (found == bound.graphs.end()) {
        throw Error(ErrorCode::invalid_rows, "bucket is " + std::to_string(bucket) + ", must be one that was captured");
    }
    return found->second;
}

StepState Pipeline::state() const {
    const Bound& bound = parts_->bound_for("state");
    return {.starts = bound.work.starts,
            .row_request = bound.work.row_request,
            .ends = bound.work.ends,
            .slots = bound.slots(),
            .iq = bound.work.iq,
            .projected = bound.work.projected,
            .query = bound.work.query,
            .head_weights = bound.work.head_weights,
            .status = bound.work.status};
}

StepStatus Pipeline::read_status(cudaStream_t stream) const {
    const Bound& bound = parts_->bound_for("read_status");
    StepStatus status;
    check_cuda(cudaMemcpyAsync(&status, bound.work.status, sizeof status, cudaMemcpyDeviceToHost, stream),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return status;
}

void Pipeline::reset_status(cudaStream_t stream) const {
    const Bound& bound = parts_->bound_for("reset_status");
    check_cuda(cudaMemsetAsync(bound.work.status, 0, sizeof(StepStatus), stream), "cudaMemsetAsync");
}

}  // namespace stepgraph
