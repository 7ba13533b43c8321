#include "report.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>

#include <stepgraph/kernels/error.h>
#include <stepgraph/tools/device_buffer.h>

namespace stepgraph::bench {
namespace {

constexpr double us_a_measurement = 1000;

__global__ void __launch_bounds__(512) read_kernel(const uint4* from, size_t n, unsigned* sink) {
    unsigned sum = 0;
    const size_t stride = size_t{gridDim.x} * blockDim.x;
    size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    for (; i + 7 * stride < n; i += 8 * stride) {
        uint4 words[8];
#pragma unroll
        for (size_t k = 0; k < 8; ++k) {
            words[k] = __ldcs(from + i + k * stride);
        }
#pragma unroll
        for (const uint4& word : words) {
            sum += word.x ^ word.y ^ word.z ^ word.w;
        }
    }
    for (; i < n; i += stride) {
        sum += from[i].x ^ from[i].y ^ from[i].z ^ from[i].w;
    }
    if (sum == 0x12345678U) {  // keeps the compiler from leaving the reading out
        *sink = sum;
    }
}

std::string utc_date() {
    const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
    char text[32];
    std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
    return text;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

}  // namespace

double read_ceiling_tb_s() {
    const size_t bytes = size_t{4} << 30U;
    const tools::DeviceBuffer<uint8_t> memory(bytes);
    const tools::DeviceBuffer<unsigned> sink(1);
    check_cuda(cudaMemset(memory.data(), 0x3C, bytes), "cudaMemset");
    int processors = 0;
    check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
    Replays replays(1, [&](int, cudaStream_t stream) {
        read_kernel<<<static_cast<unsigned>(processors) * 4, 512, 0, stream>>>(reinterpret_cast<const uint4*>(memory.data()),
                                                                               bytes / sizeof(uint4), sink.data());
    });
    std::vector<double> times;
    for (int i = 0; i < 11; ++i) {
        times.push_back(replays.time_us());
    }
    return static_cast<double>(bytes) / median(times) * 1e-6;
}

Replays::Replays(int launches, const std::function<void(int, cudaStream_t)>& enqueue) : launches_(launches) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
    check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int i = 0; i < launches; ++i) {
        enqueue(i, stream_);
    }
    check_cuda(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    time_us();  // warms up, and tells how many replays a measurement needs
    const double once = time_us() * launches;
    replays_ = std::max(1, static_cast<int>(std::ceil(us_a_measurement / once)));
}

Replays::~Replays() {
    cudaGraphExecDestroy(graph_);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
}

double Replays::time_us() {
    check_cuda(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    for (int i = 0; i < replays_; ++i) {
        check_cuda(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
    }
    check_cuda(cudaEventRecord(end_, stream_), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return double{milliseconds} * 1e3 / (static_cast<double>(replays_) * launches_);
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
