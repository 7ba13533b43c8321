// A serving loop over a real request trace: what a step costs where lengths grow and requests come and go.
#pragma once

#include <cstdint>
#include <filesystem>

#include <stepgraph/layouts/cache_page.h>

#include "run_command.h"

namespace stepgraph::tools {

/// Numbers left at 0 are the device's: see trace_command.cpp.
struct TraceOptions {
    std::filesystem::path trace;
    Device device = Device::automatic;
    CacheFormat format = CacheFormat::fp8;
    int steps = 0;  // at most
    int layers = 0;
    int rows = 0;  // limit of a step's rows, and of the requests at a time
    int top_k = 0;
    int max_model_len = 0;
    int pages = 0;            // of each layer's cache
    int shrink = 0;           // of the trace's lengths
    double step_ms = 25;      // that a step of the whole model takes on the trace's clock
    int drafts = 3;           // most verify rows of a request beside its own row
    double acceptance = 0.7;  // of a guess, where those before it were right
    int check = -1;           // steps; below 0: the device's
    bool json = false;
    bool portable_scorer = false;  // see Options
    uint64_t seed = 0;             // 0: a fresh one, which is printed
};

/// Decodes the trace and prints a table, or JSON. Returns 0 where every checked step was right, 1 where one was not. Throws
/// CaseError of a trace or an option that cannot be used, Error.
int trace(const TraceOptions& options);

}  // namespace stepgraph::tools
