// The demonstration: a batch of requests decodes, and every step is checked.
#pragma once

#include <cstdint>

#include <stepgraph/layouts/cache_page.h>

#include "run_command.h"

namespace stepgraph::tools {

struct DemoOptions {
    Device device = Device::automatic;
    CacheFormat format = CacheFormat::fp8;
    int steps = 40;
    int layers = 4;
    int requests = 10;
    int top_k = 512;
    int shrink = 16;               // of the trace's lengths
    bool portable_scorer = false;  // see Options
    uint64_t seed = 0;             // 0: a fresh one, which is printed
};

/// Prints a line a step and a closing one. Returns 0 where every step was right, 1 where one was not. Throws Error.
int demo(const DemoOptions& options);

}  // namespace stepgraph::tools
