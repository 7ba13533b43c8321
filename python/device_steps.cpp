#include "steps.h"

namespace stepgraph::python {
namespace {

class DeviceSteps : public Steps {
public:
    DeviceSteps(const Geometry& geometry, const Options& options) : pipeline_(geometry, options) {}

    [[nodiscard]] const Geometry& geometry() const override { return pipeline_.geometry(); }
    [[nodiscard]] int tile_rows() const override { return pipeline_.tile_rows(); }
    [[nodiscard]] size_t workspace_bytes() const override { return pipeline_.workspace_bytes(); }
    [[nodiscard]] std::vector<int> buckets() const override { return pipeline_.buckets(); }

    void bind(const StepBuffers& step, const std::vector<LayerBuffers>& layers, const Workspace& workspace) override {
        pipeline_.bind(step, layers, workspace);
    }
    void capture(const std::vector<int>& buckets, const Pipeline::AfterLayer& after_layer) override {
        pipeline_.capture(buckets, after_layer);
    }
    void replay(int rows, cudaStream_t stream, const Pipeline::AfterLayer& /*captured*/) override {
        pipeline_.replay(rows, stream);
    }
    void enqueue_layout(int rows, cudaStream_t stream) override { pipeline_.enqueue_layout(rows, stream); }
    void enqueue_layer(int layer, int rows, cudaStream_t stream) override { pipeline_.enqueue_layer(layer, rows, stream); }
    StepStatus read_status(cudaStream_t stream) override { return pipeline_.read_status(stream); }
    void reset_status(cudaStream_t stream) override { pipeline_.reset_status(stream); }

private:
    Pipeline pipeline_;
};

}  // namespace

std::unique_ptr<Steps> make_device_steps(const Geometry& geometry, const Options& options) {
    return std::make_unique<DeviceSteps>(geometry, options);
}

}  // namespace stepgraph::python
