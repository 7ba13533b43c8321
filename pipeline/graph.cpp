#include "graph.h"

#include <algorithm>
#include <memory>
#include <sstream>
#include <utility>

#include <cuda.h>
#include <cxxabi.h>

#include <stepgraph/kernels/driver_function.h>

#include "capture_mode.h"
#include "own_stream.h"

namespace stepgraph {
namespace {

std::string demangle(const char* symbol) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(symbol, nullptr, nullptr, &status),
                                                           &std::free);
    return status == 0 ? text.get() : symbol;
}

/// "void stepgraph::(anonymous namespace)::score_kernel(stepgraph::ScoreArgs)" becomes "stepgraph::score_kernel".
std::string function_name(const char* symbol) {
    std::string name = demangle(symbol);
    const std::string unnamed = "(anonymous namespace)::";
    for (size_t at = name.find(unnamed); at != std::string::npos; at = name.find(unnamed)) {
        name.erase(at, unnamed.size());
    }
    name = name.substr(0, name.find_first_of("<("));
    return name.substr(name.rfind(' ') + 1);
}

std::string kernel_name(cudaGraphNode_t node) {
    CUDA_KERNEL_NODE_PARAMS params{};
    const auto get_params = driver_function<decltype(&cuGraphKernelNodeGetParams)>("cuGraphKernelNodeGetParams");
    const auto kernel_symbol = driver_function<decltype(&cuKernelGetName)>("cuKernelGetName");
    const auto function_symbol = driver_function<decltype(&cuFuncGetName)>("cuFuncGetName");
    const char* symbol = nullptr;
    if (get_params(node, &params) != CUDA_SUCCESS ||
        (params.func != nullptr ? function_symbol(&symbol, params.func) : kernel_symbol(&symbol, params.kern)) !=
            CUDA_SUCCESS) {
        return "kernel";
    }
    return function_name(symbol);
}

std::string node_name(cudaGraphNode_t node, cudaGraphNodeType type) {
    switch (type) {
    case cudaGraphNodeTypeKernel:
        return kernel_name(node);
    case cudaGraphNodeTypeMemcpy:
        return "memcpy";
    case cudaGraphNodeTypeMemset:
        return "memset";
    case cudaGraphNodeTypeHost:
        return "host function";
    case cudaGraphNodeTypeGraph:
        return "child graph";
    case cudaGraphNodeTypeEmpty:
        return "empty";
    default:
        return "node of type " + std::to_string(static_cast<int>(type));
    }
}

std::vector<cudaGraphNode_t> handles(cudaGraph_t graph) {
    size_t count = 0;
    check_cuda(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
    std::vector<cudaGraphNode_t> nodes(count);
    check_cuda(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
    return nodes;
}

}  // namespace

CapturedGraph::~CapturedGraph() {
    const UnhinderedByOtherCaptures unhindered;
    if (executable_ != nullptr) {
        cudaGraphExecDestroy(executable_);
    }
    if (graph_ != nullptr) {
        cudaGraphDestroy(graph_);
    }
}

CapturedGraph::CapturedGraph(CapturedGraph&& other) noexcept
    : graph_(std::exchange(other.graph_, nullptr)), executable_(std::exchange(other.executable_, nullptr)) {}

CapturedGraph& CapturedGraph::operator=(CapturedGraph&& other) noexcept {
    std::swap(graph_, other.graph_);
    std::swap(executable_, other.executable_);
    return *this;
}

CapturedGraph CapturedGraph::capture(const std::function<void(cudaStream_t)>& enqueue, cudaStreamCaptureMode mode) {
    const OwnStream stream;
    check_cuda(cudaStreamBeginCapture(stream, mode), "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
        enqueue(stream);
    } catch (...) {
        cudaStreamEndCapture(stream, &graph);
        if (graph != nullptr) {
            cudaGraphDestroy(graph);
        }
        cudaGetLastError();  // an ended capture's error is not the caller's next one
        throw;
    }
    const UnhinderedByOtherCaptures unhindered;
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    if (ended != cudaSuccess || graph == nullptr) {
        cudaGetLastError();
        throw Error(ErrorCode::invalid_capture, std::string("what was enqueued cannot be captured: ") +
                                                    cudaGetErrorString(ended) + " (" + cudaGetErrorName(ended) + ")");
    }
    CapturedGraph captured = adopt(graph);
    check_cuda(cudaGraphUpload(captured.executable_, stream), "cudaGraphUpload");
    stream.synchronise();
    return captured;
}

CapturedGraph CapturedGraph::adopt(cudaGraph_t graph) {
    CapturedGraph captured;
    captured.graph_ = graph;
    check_cuda(cudaGraphInstantiate(&captured.executable_, graph, 0), "cudaGraphInstantiate");
    return captured;
}

void CapturedGraph::launch(cudaStream_t stream) const {
    check_cuda(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
}

std::vector<GraphNode> CapturedGraph::nodes() const {
    std::vector<GraphNode> nodes;
    for (cudaGraphNode_t node : handles(graph_)) {
        cudaGraphNodeType type{};
        check_cuda(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
        nodes.push_back({type, node_name(node, type)});
    }
    return nodes;
}

std::vector<GraphEdge> CapturedGraph::edges() const {
    size_t count = 0;
    check_cuda(cudaGraphGetEdges(graph_, nullptr, nullptr, nullptr, &count), "cudaGraphGetEdges");
    std::vector<cudaGraphNode_t> from(count);
    std::vector<cudaGraphNode_t> to(count);
    std::vector<cudaGraphEdgeData> data(count);  // without it the query fails on programmatic edges
    check_cuda(cudaGraphGetEdges(graph_, from.data(), to.data(), data.data(), &count), "cudaGraphGetEdges");

    const std::vector<cudaGraphNode_t> nodes = handles(graph_);
    const auto position = [&nodes](cudaGraphNode_t node) {
        return static_cast<size_t>(std::find(nodes.begin(), nodes.end(), node) - nodes.begin());
    };
    std::vector<GraphEdge> edges;
    for (size_t i = 0; i < count; ++i) {
        edges.push_back({position(from[i]), position(to[i]), data[i].type == cudaGraphDependencyTypeProgrammatic});
    }
    std::sort(edges.begin(), edges.end(),
              [](const GraphEdge& a, const GraphEdge& b) { return std::pair(a.to, a.from) < std::pair(b.to, b.from); });
    return edges;
}

std::string CapturedGraph::dot() const {
    std::ostringstream out;
    out << "digraph step {\n    rankdir=LR;\n    node [shape=box];\n";
    const std::vector<GraphNode> all = nodes();
    for (size_t i = 0; i < all.size(); ++i) {
        out << "    n" << i << " [label=\"" << all[i].name << "\"];\n";
    }
    for (const GraphEdge& edge : edges()) {
        out << "    n" << edge.from << " -> n" << edge.to << (edge.programmatic ? " [style=dashed]" : "") << ";\n";
    }
    out << "}\n";
    return out.str();
}

}  // namespace stepgraph
