#include "report.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <stdexcept>
#include <utility>

#include <stepgraph/kernels/error.h>
#include <stepgraph/pipeline/graph.h>

namespace stepgraph::bench {
namespace {

constexpr double us_a_measurement = 1000;

std::string utc_date() {
    const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
    char text[32];
    std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
    return text;
}

/// Takes the kernels that `left_out` holds for out of a graph that is one chain; `nodes` are the graph's, in its order.
void leave_out(cudaGraph_t graph, const std::vector<GraphNode>& nodes,
               const std::function<bool(const std::string& kernel)>& left_out) {
    size_t count = nodes.size();
    std::vector<cudaGraphNode_t> handles(count);
    check_cuda(cudaGraphGetNodes(graph, handles.data(), &count), "cudaGraphGetNodes");
    size_t taken = 0;
    for (size_t i = 0; i < count; ++i) {
        if (!left_out(nodes[i].name)) {
            continue;
        }
        cudaGraphNode_t before = nullptr;
        cudaGraphNode_t after = nullptr;
        cudaGraphEdgeData edge{};
        cudaGraphEdgeData edge_after{};
        size_t edges_before = 1;
        size_t edges_after = 1;
        check_cuda(cudaGraphNodeGetDependencies(handles[i], &before, &edge, &edges_before), "cudaGraphNodeGetDependencies");
        check_cuda(cudaGraphNodeGetDependentNodes(handles[i], &after, &edge_after, &edges_after),
                   "cudaGraphNodeGetDependentNodes");
        if (edges_before == 1 && edges_after == 1) {
            check_cuda(cudaGraphAddDependencies(graph, &before, &after, &edge_after, 1), "cudaGraphAddDependencies");
        }
        check_cuda(cudaGraphDestroyNode(handles[i]), "cudaGraphDestroyNode");
        ++taken;
    }
    if (taken == 0) {
        throw std::runtime_error("no kernel of the chain could be left out");
    }
}

}  // namespace

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

Replays::Replays(int launches, const std::function<void(int, cudaStream_t)>& enqueue,
                 const std::function<bool(const std::string& kernel)>& left_out)
    : launches_(launches) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int i = 0; i < launches; ++i) {
        enqueue(i, stream_);
    }
    check_cuda(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    const CapturedGraph captured = CapturedGraph::adopt(graph);
    if (left_out) {
        leave_out(graph, captured.nodes(), left_out);
    }
    check_cuda(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    replay_ = [this](cudaStream_t stream) { check_cuda(cudaGraphLaunch(graph_, stream), "cudaGraphLaunch"); };
    choose_replays();
}

Replays::Replays(int launches, std::function<void(cudaStream_t)> replay) : launches_(launches), replay_(std::move(replay)) {
    choose_replays();
}

Replays::~Replays() {
    if (graph_ != nullptr) {
        cudaGraphExecDestroy(graph_);
    }
}

void Replays::choose_replays() {
    time_us();  // warms up, and tells how many replays a measurement needs
    const double once = time_us() * launches_;
    replays_ = std::max(1, static_cast<int>(std::ceil(us_a_measurement / once)));
}

double Replays::time_us() {
    stopwatch_.start(stream_);
    const auto called = std::chrono::steady_clock::now();
    for (int i = 0; i < replays_; ++i) {
        replay_(stream_);
    }
    const std::chrono::duration<double, std::micro> calls = std::chrono::steady_clock::now() - called;
    host_us_ = calls.count() / replays_;
    return stopwatch_.stop_us(stream_) / (static_cast<double>(replays_) * launches_);
}

Report::Report(std::string revision, std::string driver, double ceiling_tb_s) : ceiling_tb_s_(ceiling_tb_s) {
    cudaDeviceProp properties{};
    int runtime = 0;
    int clock_khz = 0;
    check_cuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    check_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    check_cuda(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, 0), "cudaDeviceGetAttribute");
    json_ = {{"gpu", properties.name},
             {"driver", std::move(driver)},
             {"cuda", std::to_string(runtime / 1000) + "." + std::to_string(runtime % 1000 / 10)},
             {"largest_clock_mhz", clock_khz / 1000},
             {"revision", std::move(revision)},
             {"date", utc_date()},
             {"ceiling_tb_s", ceiling_tb_s},
             {"rows", nlohmann::ordered_json::array()}};
}

void Report::add(nlohmann::ordered_json cell, std::vector<double> times_us) {
    cell["us"] = median(times_us);
    cell["us_min"] = *std::min_element(times_us.begin(), times_us.end());
    cell["us_max"] = *std::max_element(times_us.begin(), times_us.end());
    json_["rows"].push_back(std::move(cell));
}

void Report::write(const std::string& path) const {
    std::ofstream file(path);
    file << json_.dump(1) << '\n';
    if (!file) {
        throw std::runtime_error("could not write " + path);
    }
}

}  // namespace stepgraph::bench
