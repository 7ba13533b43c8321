// A serving loop's step on a GPU: one captured graph per bucket, replayed; and once more with every logit kept, to be
// checked.
#pragma once

#include <memory>
#include <vector>

#include <stepgraph/pipeline/pipeline.h>

#include "serving_batch.h"
#include "serving_model.h"

namespace stepgraph::tools {

/// What the device made of one layer, on the host.
struct DeviceLayerResult {
    std::vector<int32_t> indices, counts;      // [bucket, top_k], [bucket]; by the replay
    std::vector<uint8_t> cache;                // after it
    std::vector<__nv_bfloat16> iq, projected;  // [bucket, ...]; these and the logits by the same kernels, once more
    std::vector<float> logits;                 // [bucket, width]
};

class ServingDevice {
public:
    /// Allocates, binds and captures the buckets. Throws Error.
    ServingDevice(const Geometry& geometry, const Options& options, const ServingModel& model);
    ~ServingDevice();
    ServingDevice(const ServingDevice&) = delete;
    ServingDevice& operator=(const ServingDevice&) = delete;

    /// Enqueues the copies of a prompt's keys to its pages.
    void write(const std::vector<PromptPage>& prompt);
    /// Fills the outputs with what no result is.
    void poison_outputs();
    /// Enqueues the copies of the step's inputs and the replay behind them, and waits. Microseconds of the replay.
    double step(const ServingBatch& batch, const ServingModel& model);
    /// What the last step of `bucket` rows made of a layer. The layers in ascending order, each once.
    DeviceLayerResult result(int layer, int bucket);
    [[nodiscard]] std::vector<uint8_t> cache(int layer) const;
    [[nodiscard]] StepStatus status() const;  ///< cumulative

    /// Edges of the largest bucket's graph.
    [[nodiscard]] int programmatic_edges() const { return programmatic_edges_; }
    [[nodiscard]] int full_edges() const { return full_edges_; }

private:
    struct Memory;
    std::unique_ptr<Memory> memory_;
    Pipeline pipeline_;
    Pipeline with_logits_;
    int programmatic_edges_ = 0;
    int full_edges_ = 0;
};

}  // namespace stepgraph::tools
