#include "graph_command.h"

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <set>
#include <sstream>

#include <stepgraph/pipeline/pipeline.h>

#include "cuda_device.h"
#include "device_buffer.h"

namespace stepgraph::tools {
namespace {

std::string predecessors(const std::vector<GraphEdge>& edges, size_t node) {
    std::string text;
    for (const GraphEdge& edge : edges) {
        if (edge.to == node) {
            text += (text.empty() ? "" : ", ") + std::to_string(edge.from) + (edge.programmatic ? " programmatic" : " full");
        }
    }
    return text.empty() ? "nothing" : text;
}

std::string counted(size_t n, const char* one, const char* many) {
    return std::to_string(n) + " " + (n == 1 ? one : many);
}

std::string closing_line(const std::vector<GraphNode>& nodes, const std::vector<GraphEdge>& edges) {
    const auto kernels = static_cast<size_t>(std::count_if(
        nodes.begin(), nodes.end(), [](const GraphNode& node) { return node.type == cudaGraphNodeTypeKernel; }));
    const auto programmatic = static_cast<size_t>(
        std::count_if(edges.begin(), edges.end(), [](const GraphEdge& edge) { return edge.programmatic; }));
    std::set<std::string> behind_full;
    for (const GraphEdge& edge : edges) {
        if (!edge.programmatic) {
            behind_full.insert(nodes.at(edge.to).name);
        }
    }
    std::string line = counted(kernels, "kernel, ", "kernels, ") +
                       counted(nodes.size() - kernels, "other node, ", "other nodes, ") +
                       counted(programmatic, "programmatic edge, ", "programmatic edges, ") +
                       counted(edges.size() - programmatic, "full edge", "full edges");
    const char* separator = " into ";
    for (const std::string& name : behind_full) {
        line += separator + name;
        separator = ", ";
    }
    return line;
}

/// Buffers of the right size that every layer shares; nobody looks at what is in them.
struct SyntheticStep {
    explicit SyntheticStep(const Geometry& g, size_t workspace_bytes)
        : lengths(size(g.max_requests)),
          block_table(size(g.max_requests, g.block_table_stride)),
          q_c(size(g.max_rows, g.q_lora_rank)),
          hidden(size(g.max_rows, g.hidden_size)),
          wq_b(size(int64_t{g.heads} * head_dim, g.q_lora_rank)),
          w_kv(size(g.projected_columns, g.hidden_size)),
          iq(g.projects() ? 0 : size(g.max_rows, int64_t{g.heads} * head_dim)),
          projected(g.projects() ? 0 : size(g.max_rows, g.projected_columns)),
          norm(head_dim),
          cache(size(g.pages, g.page_stride_bytes)),
          indices(size(g.max_rows, g.top_k)),
          workspace(workspace_bytes) {}

    static size_t size(int64_t a, int64_t b = 1) { return static_cast<size_t>(a) * static_cast<size_t>(b); }

    [[nodiscard]] StepBuffers step_buffers() const {
        return {.seq_lens = lengths.data(),
                .query_lens = lengths.data(),
                .num_requests = nullptr,
                .block_table = block_table.data(),
                .slots = nullptr};
    }
    [[nodiscard]] LayerBuffers layer_buffers() const {
        return {.q_c = q_c.data(),
                .hidden = hidden.data(),
                .wq_b = wq_b.data(),
                .w_kv = w_kv.data(),
                .iq = iq.data(),
                .projected = projected.data(),
                .k_norm_weight = norm.data(),
                .k_norm_bias = norm.data(),
                .cache = cache.data(),
                .indices = indices.data()};
    }

    DeviceBuffer<int32_t> lengths, block_table;
    DeviceBuffer<__nv_bfloat16> q_c, hidden, wq_b, w_kv, iq, projected;
    DeviceBuffer<float> norm;
    DeviceBuffer<uint8_t> cache;
    DeviceBuffer<int32_t> indices;
    DeviceBuffer<uint8_t> workspace;
};

}  // namespace

std::string graph_table(const std::vector<GraphNode>& nodes, const std::vector<GraphEdge>& edges) {
    size_t name_width = 4;
    for (const GraphNode& node : nodes) {
        name_width = std::max(name_width, node.name.size());
    }
    std::ostringstream out;
    out << "node  " << std::left << std::setw(static_cast<int>(name_width)) << "what"
        << "  follows\n";
    for (size_t i = 0; i < nodes.size(); ++i) {
        out << std::right << std::setw(4) << i << "  " << std::left << std::setw(static_cast<int>(name_width))
            << nodes[i].name << "  " << predecessors(edges, i) << "\n";
    }
    out << closing_line(nodes, edges) << "\n";
    return out.str();
}

int graph(const GraphOptions& options) {
    if (options.layers < 1) {
        throw Error(ErrorCode::invalid_geometry, "layers is " + std::to_string(options.layers) + ", must be at least 1");
    }
    Pipeline pipeline(geometry_of(options.shape), options_of(options.shape));
    require_device("graph", "`stepgraph info` and `stepgraph run --device cpu` work without");
    const Geometry& geometry = pipeline.geometry();
    const SyntheticStep step(geometry, pipeline.workspace_bytes());
    const std::vector<LayerBuffers> layers(static_cast<size_t>(options.layers), step.layer_buffers());
    pipeline.bind(step.step_buffers(), layers, {step.workspace.data(), step.workspace.size()});
    pipeline.capture({geometry.max_rows});
    const CapturedGraph& captured = pipeline.graph(geometry.max_rows);
    std::cout << (options.dot ? captured.dot() : graph_table(captured.nodes(), captured.edges()));
    return 0;
}

}  // namespace stepgraph::tools
