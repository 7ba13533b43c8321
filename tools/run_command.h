// `stepgraph run`: one case file through the whole step, on the host or on the GPU.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include <stepgraph/layouts/step_status.h>

#include "case_file.h"
#include "safetensors.h"

namespace stepgraph::tools {

enum class Device { automatic, cpu, cuda };

/// How a step gets onto the GPU: captured as one bucket and replayed, or its calls on a plain stream.
enum class Launch { graph, eager };

struct RunOptions {
    std::filesystem::path case_path;
    std::filesystem::path out;
    Device device = Device::automatic;  // the GPU where there is one
    Launch launch = Launch::graph;
    bool logits = false;    // also every logit
    bool physical = false;  // also the winners' slots
};

/// R rows, Q requests. A padding row has slot -1, whatever the engine's slots say, and head weights of 0.
struct StepResults {
    std::vector<int32_t> starts;          // [Q + 1]
    std::vector<int32_t> ends;            // [R]
    std::vector<float> head_weights;      // [R, heads]
    std::vector<uint8_t> cache;           // [pages, page_stride] after the step
    std::vector<int32_t> indices;         // [R, top_k]
    std::vector<int64_t> slots;           // [R]
    std::vector<float> logits;            // [R, width]; empty unless asked for
    std::vector<int64_t> physical_slots;  // [R, top_k]
    StepStatus status;
};

/// The step on the host, in plain loops.
StepResults run_on_cpu(const Case& step, bool logits);

/// The step on the current GPU. Outputs are poisoned before, so that what is not written shows. Synchronises. Throws Error.
StepResults run_on_cuda(const Case& step, Launch launch, bool logits, const Options& options = {});

/// The tensors that `run` writes.
Safetensors outputs_of(const Case& step, const StepResults& results, bool logits, bool physical);

/// Loads, runs, writes and says on standard output what was done. Returns the exit code. Throws CaseError, Error,
/// std::runtime_error; the output file is then not written.
int run(const RunOptions& options);

}  // namespace stepgraph::tools
