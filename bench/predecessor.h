// A kernel to stand in front of the one that is measured.
#pragma once

#include <cstdint>

#include <stepgraph/kernels/launch.h>
#include <stepgraph/tools/device_buffer.h>

namespace stepgraph::bench {

/// Fills every multiprocessor, one block each of as much shared memory as select's, lets its successor start at once, and
/// reads 20 MB: a prefetch of its successor's counts only where there is room for it beside such a kernel.
class Predecessor {
public:
    Predecessor();
    void enqueue(LaunchContext context) const;

private:
    tools::DeviceBuffer<uint8_t> memory_;
    tools::DeviceBuffer<unsigned> sink_;
    unsigned blocks_ = 0;
};

}  // namespace stepgraph::bench
