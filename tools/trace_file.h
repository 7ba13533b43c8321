// Request traces: when requests came to a serving cluster, and how long they were.
#pragma once

#include <filesystem>
#include <vector>

namespace stepgraph::tools {

struct TraceRequest {
    int arrival_ms;  // from the trace's start
    int prompt_tokens;
    int generated_tokens;
};

/// Reads "arrival_ms,input_tokens,output_tokens" and a line a request, in the order of their arrival. Throws CaseError, one
/// sentence that names the file, the line and the column, what stands there and what must.
std::vector<TraceRequest> read_trace(const std::filesystem::path& path);

}  // namespace stepgraph::tools
