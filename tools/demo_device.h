// The demonstration's step on a GPU: one captured graph per bucket, replayed.
#pragma once

#include <memory>
#include <vector>

#include <stepgraph/kernels/reference/step.h>
#include <stepgraph/pipeline/pipeline.h>

#include "demo_model.h"
#include "serving_batch.h"

namespace stepgraph::tools {

/// What the device made of one layer, on the host.
struct DeviceLayerResult {
    std::vector<__nv_bfloat16> iq, projected;  // [bucket, ...]
    std::vector<float> logits;                 // [bucket, width]
    std::vector<int32_t> indices, counts;      // [bucket, top_k], [bucket]
    std::vector<uint8_t> cache;
};

struct DeviceStepResult {
    int bucket = 0;
    double microseconds = 0;  // of the replay, on the device
    std::vector<DeviceLayerResult> layers;
    StepStatus status;  // cumulative
};

class DemoDevice {
public:
    /// Allocates, binds and captures buckets of powers of two up to max_rows. Throws Error.
    DemoDevice(const Geometry& geometry, const Options& options, const DemoModel& model);
    ~DemoDevice();
    DemoDevice(const DemoDevice&) = delete;
    DemoDevice& operator=(const DemoDevice&) = delete;

    /// Copies the caches of the model to the device: prompts have been written.
    void upload_caches(const DemoModel& model);
    /// Uploads the step's inputs, replays the graph and reads everything back.
    DeviceStepResult step(const ServingBatch& batch, const DemoModel& model);

    /// Edges of the largest bucket's graph.
    [[nodiscard]] int programmatic_edges() const { return programmatic_edges_; }
    [[nodiscard]] int full_edges() const { return full_edges_; }

private:
    struct Memory;
    std::unique_ptr<Memory> memory_;
    Pipeline pipeline_;
    int programmatic_edges_ = 0;
    int full_edges_ = 0;
};

}  // namespace stepgraph::tools
