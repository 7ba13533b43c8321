// The slice of a production request trace that the command carries: see data/README.md.
#pragma once

#include <span>

#include "trace_file.h"

namespace stepgraph::tools {

std::span<const TraceRequest> conversation_trace();

}  // namespace stepgraph::tools
