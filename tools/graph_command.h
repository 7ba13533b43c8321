// `stepgraph graph`: the nodes and edges of a captured step.
#pragma once

#include <string>
#include <vector>

#include <stepgraph/pipeline/graph.h>

#include "model_shape.h"

namespace stepgraph::tools {

struct GraphOptions {
    ModelShape shape;
    int layers = 1;
    bool dot = false;
};

/// One line a node with the nodes it follows, and a closing line that counts.
std::string graph_table(const std::vector<GraphNode>& nodes, const std::vector<GraphEdge>& edges);

/// Captures a step of that shape on the current GPU; nothing of it is executed. Returns the exit code. Throws Error.
int graph(const GraphOptions& options);

}  // namespace stepgraph::tools
