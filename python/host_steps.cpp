#include <algorithm>
#include <set>

#include <stepgraph/kernels/reference/step.h>
#include <stepgraph/pipeline/check_buffers.h>
#include <stepgraph/pipeline/check_calls.h>
#include <stepgraph/tools/reference_shape.h>

#include "steps.h"

namespace stepgraph::python {
namespace {

/// Stands where check_addresses() looks for a workspace: the host's stages make their own memory.
alignas(256) std::byte no_workspace[1];

template <typename Element>
void hand_out(const std::vector<Element>& results, Element* to) {
    if (to != nullptr) {
        std::copy(results.begin(), results.end(), to);
    }
}

class HostSteps : public Steps {
public:
    HostSteps(const Geometry& geometry, const Options& options)
        : geometry_(validate(geometry)), tile_rows_(resolve_tile_rows(geometry_, options)) {}

    [[nodiscard]] const Geometry& geometry() const override { return geometry_; }
    [[nodiscard]] int tile_rows() const override { return tile_rows_; }
    [[nodiscard]] size_t workspace_bytes() const override { return 0; }
    [[nodiscard]] std::vector<int> buckets() const override { return {buckets_.begin(), buckets_.end()}; }

    void bind(const StepBuffers& step, const std::vector<LayerBuffers>& layers, const Workspace& workspace) override;
    void capture(const std::vector<int>& buckets, const Pipeline::AfterLayer& after_layer) override;
    void replay(int rows, cudaStream_t stream, const Pipeline::AfterLayer& after_layer) override;
    void enqueue_layout(int rows, cudaStream_t stream) override;
    void enqueue_layer(int layer, int rows, cudaStream_t stream) override;
    StepStatus read_status(cudaStream_t stream) override;
    void reset_status(cudaStream_t stream) override;

private:
    [[nodiscard]] reference::StepInputs inputs() const {
        return {.seq_lens = step_.seq_lens,
                .query_lens = step_.query_lens,
                .num_requests = step_.num_requests,
                .block_table = step_.block_table,
                .slots = step_.slots};
    }
    void check_bound(const char* call) const { stepgraph::check_bound(!layers_.empty(), call); }

    Geometry geometry_;
    int tile_rows_;
    StepBuffers step_;
    std::vector<LayerBuffers> layers_;  // empty: not bound
    bool all_logits_ = false;
    std::set<int> buckets_;
    bool in_callback_ = false;
    reference::Layout layout_;
    int layout_rows_ = 0;
    StepStatus status_;
};

void HostSteps::bind(const StepBuffers& step, const std::vector<LayerBuffers>& layers, const Workspace& /*none*/) {
    check_outside_callback(in_callback_, "bind");
    check_addresses(geometry_, step, layers, {no_workspace, sizeof no_workspace}, workspace_bytes());
    step_ = step;
    layers_ = layers;
    all_logits_ = std::any_of(layers.begin(), layers.end(), [](const LayerBuffers& layer) {
        return layer.logits != nullptr || layer.winner_logits != nullptr;
    });
    buckets_.clear();
    layout_rows_ = 0;
    status_ = {};
}

void HostSteps::capture(const std::vector<int>& buckets, const Pipeline::AfterLayer& /*of each replay*/) {
    check_bound("capture");
    check_outside_callback(in_callback_, "capture");
    const std::vector<int> checked = checked_buckets(buckets, geometry_.max_rows);
    buckets_ = {checked.begin(), checked.end()};
    layout_rows_ = 0;
}

void HostSteps::replay(int rows, cudaStream_t stream, const Pipeline::AfterLayer& after_layer) {
    check_bound("replay");
    check_outside_callback(in_callback_, "replay");
    check_replay(rows, buckets_.empty() ? 0 : *buckets_.rbegin());
    const int bucket = *buckets_.lower_bound(rows);
    enqueue_layout(bucket, stream);
    for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
        enqueue_layer(layer, bucket, stream);
        if (after_layer) {
            in_callback_ = true;
            struct Leave {
                bool& in_callback;
                ~Leave() { in_callback = false; }
            } const leave{in_callback_};
            after_layer(layer, bucket, stream);
        }
    }
    layout_rows_ = 0;
}

void HostSteps::enqueue_layout(int rows, cudaStream_t /*none*/) {
    check_bound("enqueue_layout");
    check_rows(rows, geometry_.max_rows);
    layout_rows_ = rows;
    layout_ = reference::decode_layout(tools::reference_shape(geometry_, rows), inputs(), &status_);
}

void HostSteps::enqueue_layer(int layer, int rows, cudaStream_t /*none*/) {
    check_bound("enqueue_layer");
    check_layer(layer, layers_.size());
    check_rows(rows, geometry_.max_rows);
    check_layout(layout_rows_, rows);
    const LayerBuffers& buffers = layers_[static_cast<size_t>(layer)];
    const reference::LayerOutputs results = reference::layer(tools::reference_shape(geometry_, rows), inputs(),
                                                             {.q_c = buffers.q_c,
                                                              .hidden = buffers.hidden,
                                                              .wq_b = buffers.wq_b,
                                                              .w_kv = buffers.w_kv,
                                                              .iq = buffers.iq,
                                                              .projected = buffers.projected,
                                                              .k_norm_weight = buffers.k_norm_weight,
                                                              .k_norm_bias = buffers.k_norm_bias,
                                                              .cache = buffers.cache},
                                                             layout_, all_logits_, &status_);
    hand_out(results.indices, buffers.indices);
    hand_out(results.counts, buffers.counts);
    hand_out(results.physical_slots, buffers.physical_slots);
    hand_out(results.winner_logits, buffers.winner_logits);
    hand_out(results.logits, buffers.logits);
}

StepStatus HostSteps::read_status(cudaStream_t /*none*/) {
    check_bound("read_status");
    return status_;
}

void HostSteps::reset_status(cudaStream_t /*none*/) {
    check_bound("reset_status");
    status_ = {};
}

}  // namespace

std::unique_ptr<Steps> make_host_steps(const Geometry& geometry, const Options& options) {
    return std::make_unique<HostSteps>(geometry, options);
}

}  // namespace stepgraph::python
