// A captured CUDA graph that owns itself and can tell what it is made of.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include <stepgraph/kernels/error.h>

namespace stepgraph {

struct GraphNode {
    cudaGraphNodeType type;
    std::string name;  ///< the kernel's function without parameters, or the kind of another node
};

struct GraphEdge {
    size_t from;  ///< positions in nodes()
    size_t to;
    bool programmatic;  ///< the later kernel may start before the earlier one has ended
};

/// Owns a graph and its executable form. Movable, not copyable; empty after a move and by default, when only valid(), the
/// destructor and assignment may be used. One graph may be launched from one thread at a time.
class STEPGRAPH_API CapturedGraph {
public:
    CapturedGraph() = default;
    ~CapturedGraph();
    CapturedGraph(CapturedGraph&& other) noexcept;
    CapturedGraph& operator=(CapturedGraph&& other) noexcept;
    CapturedGraph(const CapturedGraph&) = delete;
    CapturedGraph& operator=(const CapturedGraph&) = delete;

    /// Captures what `enqueue` puts into the stream it is given, instantiates and uploads it. Nothing of it is executed. An
    /// exception of `enqueue` ends the capture and is passed on. Synchronises a stream of its own. Throws Error.
    static CapturedGraph capture(const std::function<void(cudaStream_t)>& enqueue,
                                 cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal);

    /// Takes over a graph that someone else captured, and instantiates it. Throws Error; the graph is then destroyed.
    static CapturedGraph adopt(cudaGraph_t graph);

    [[nodiscard]] bool valid() const noexcept { return executable_ != nullptr; }

    /// Enqueues one execution on `stream`. One CUDA call; no synchronisation, no allocation. Throws Error.
    void launch(cudaStream_t stream) const;

    /// Nodes in the order of their making, and the edges between them. Throws Error.
    [[nodiscard]] std::vector<GraphNode> nodes() const;
    [[nodiscard]] std::vector<GraphEdge> edges() const;

    /// The graph in Graphviz's language; programmatic edges are dashed.
    [[nodiscard]] std::string dot() const;

private:
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
};

}  // namespace stepgraph
