// What the benchmarks share: timing of captured launches, and results as JSON.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <nlohmann/json.hpp>

#include <stepgraph/pipeline/own_stream.h>
#include <stepgraph/tools/stopwatch.h>

namespace stepgraph::bench {

double median(std::vector<double> values);

/// One replay of a graph of `launches` launches.
class Replays {
public:
    /// Captures enqueue(0, stream) to enqueue(launches - 1, stream) one behind the other. Kernels whose names `left_out`
    /// holds for are taken out of the chain again: who followed them follows those they followed, by an edge of the same
    /// kind. Throws Error, and std::runtime_error where there is none to leave out.
    Replays(int launches, const std::function<void(int, cudaStream_t)>& enqueue,
            const std::function<bool(const std::string& kernel)>& left_out = nullptr);
    /// Of a graph that someone else captured, and that `replay` enqueues.
    Replays(int launches, std::function<void(cudaStream_t)> replay);
    ~Replays();
    Replays(const Replays&) = delete;
    Replays& operator=(const Replays&) = delete;

    /// Microseconds of a launch: of enough replays to take a millisecond, by events.
    double time_us();
    /// Microseconds of the host for a replay, in the last measurement.
    [[nodiscard]] double host_us() const { return host_us_; }

private:
    void choose_replays();

    int launches_;
    int replays_ = 1;
    double host_us_ = 0;
    OwnStream stream_;
    tools::Stopwatch stopwatch_;
    cudaGraphExec_t graph_ = nullptr;
    std::function<void(cudaStream_t)> replay_;
};

/// The results of one program.
class Report {
public:
    /// `driver`: the driver's version; CUDA's own calls name only the CUDA version that it can serve.
    Report(std::string revision, std::string driver, double ceiling_tb_s);

    /// `cell`: what was measured and how it was checked. Times go to "us", "us_min" and "us_max".
    void add(nlohmann::ordered_json cell, std::vector<double> times_us);
    void write(const std::string& path) const;

    [[nodiscard]] double ceiling_tb_s() const { return ceiling_tb_s_; }
    [[nodiscard]] const nlohmann::ordered_json& json() const { return json_; }

private:
    double ceiling_tb_s_;
    nlohmann::ordered_json json_;
};

}  // namespace stepgraph::bench
