// What decodes in the demonstration and from traces: the captured graphs on a GPU, or the reference on the host.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "run_command.h"
#include "serving_batch.h"
#include "serving_device.h"
#include "serving_model.h"

namespace stepgraph::tools {

struct ServingStep {
    int bucket;
    double microseconds;  // of the replay on the device, or of the reference
    std::string wrong;    // what was wrong with it, where it was checked; else empty
};

class ServingEngine {
public:
    /// `every_step`: every step will be checked; the exact keys in the caches are then followed on a GPU too. Throws Error.
    ServingEngine(const Geometry& geometry, const Options& options, int layers, bool on_device, bool every_step,
                  uint64_t seed);

    /// Writes the keys of a prompt.
    void admit(const ServingBatch& batch, const ServingBatch::Arrival& arrival);
    /// Decodes a step of the batch. Checked: all rows of all layers.
    ServingStep step(const ServingBatch& batch, bool check);

    [[nodiscard]] const ServingDevice* device() const { return device_.get(); }  ///< null: on the host
    /// What a checked step was compared with, for a closing line.
    [[nodiscard]] const char* how_checked() const;

private:
    ServingStep step_on_host(const ServingBatch& batch, bool check);
    ServingStep step_on_device(const ServingBatch& batch, bool check);
    std::string check_on_host(const ServingBatch& batch, const reference::Layout& layout, ServingLayer& layer,
                              const reference::LayerOutputs& outputs) const;
    std::string compare_with_reference(const ServingBatch& batch, int bucket);
    std::string compare_layer(const ServingBatch& batch, const reference::Layout& layout, ServingLayer& layer,
                              const DeviceLayerResult& device);
    std::string check_products(const ServingBatch& batch, const ServingLayer& layer, const DeviceLayerResult& device) const;

    Geometry geometry_;
    ServingModel model_;
    std::unique_ptr<ServingDevice> device_;
};

/// Whether `device` means the GPU here. Throws Error(cuda) where it must and there is none; `command` names who asks.
bool serves_on_gpu(Device device, const std::string& command);

}  // namespace stepgraph::tools
