// The step on the GPU: three layers of indexer and attention, captured by the engine as one graph.
#pragma once

#include <memory>
#include <vector>

#include "engine.h"

class DeviceStep {
public:
    /// Allocates everything and captures. Throws stepgraph::Error.
    DeviceStep();
    ~DeviceStep();

    /// Copies the step's lengths, blocks and tokens to the device, launches the graph and waits for its predictions.
    std::vector<int> run(const std::vector<Scheduled>& step);

    /// Throws std::runtime_error if the pipeline met wrong data in any step so far. It waits for the stream: not for the
    /// loop.
    void check_data() const;

private:
    struct Parts;
    std::unique_ptr<Parts> parts_;
};
