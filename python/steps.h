// What the Python package runs steps on: one interface, and behind it the GPU's pipeline or the host's plain loops.
#pragma once

#include <memory>
#include <vector>

#include <stepgraph/pipeline/pipeline.h>

namespace stepgraph::python {

/// The functions of Pipeline, and their contracts. A replay is handed the callback of the capture.
class Steps {
public:
    virtual ~Steps() = default;

    [[nodiscard]] virtual const Geometry& geometry() const = 0;
    [[nodiscard]] virtual int tile_rows() const = 0;
    [[nodiscard]] virtual size_t workspace_bytes() const = 0;
    [[nodiscard]] virtual std::vector<int> buckets() const = 0;

    virtual void bind(const StepBuffers& step, const std::vector<LayerBuffers>& layers, const Workspace& workspace) = 0;
    virtual void capture(const std::vector<int>& buckets, const Pipeline::AfterLayer& after_layer) = 0;
    virtual void replay(int rows, cudaStream_t stream, const Pipeline::AfterLayer& after_layer) = 0;
    virtual void enqueue_layout(int rows, cudaStream_t stream) = 0;
    virtual void enqueue_layer(int layer, int rows, cudaStream_t stream) = 0;
    virtual StepStatus read_status(cudaStream_t stream) = 0;
    virtual void reset_status(cudaStream_t stream) = 0;
};

/// Pipeline itself.
std::unique_ptr<Steps> make_device_steps(const Geometry& geometry, const Options& options);

/// The reference over host memory: every call has run when it returns, streams are not looked at, and there is no workspace.
/// What a capture holds on the device, its callback's work included, runs in each replay.
std::unique_ptr<Steps> make_host_steps(const Geometry& geometry, const Options& options);

}  // namespace stepgraph::python
