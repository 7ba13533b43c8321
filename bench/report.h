// What the benchmarks of the stages share: the machine's ceiling, timing of captured launches, and results as a table and
// JSON.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <nlohmann/json.hpp>

namespace stepgraph::bench {

/// Bytes per second, in TB/s, that a plain reading of 4 GiB reaches: median of 11. Allocates and frees; synchronises.
double read_ceiling_tb_s();

/// One replay of a graph of `launches` launches.
class Replays {
public:
    /// Captures enqueue(0, stream) to enqueue(launches - 1, stream) one behind the other.
    Replays(int launches, const std::function<void(int, cudaStream_t)>& enqueue);
    ~Replays();
    Replays(const Replays&) = delete;
    Replays& operator=(const Replays&) = delete;

    /// Microseconds of a launch: of enough replays to take a millisecond, by events.
    double time_us();

private:
    int launches_;
    int replays_ = 1;
    cudaStream_t stream_ = nullptr;
    cudaGraphExec_t graph_ = nullptr;
    cudaEvent_t begin_ = nullptr;
    cudaEvent_t end_ = nullptr;
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
