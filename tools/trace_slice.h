// The slice of a production request trace that the command carries: see data/README.md.
#pragma once

#include <span>

namespace stepgraph::tools {

struct TraceRequest {
    int arrival_ms;  // from the trace's start
    int prompt_tokens;
    int generated_tokens;
};

std::span<const TraceRequest> conversation_trace();

}  // namespace stepgraph::tools
