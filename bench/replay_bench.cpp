// What a replay costs: one layer of the K3 shape from projections to indices, on the device and on the host.
//
// Cold: eight layers with weights and caches of their own follow each other in the graph, so that none finds its own data in
// the L2 where it would not in a model. Device time: events around 20 replays, divided by replays and layers. Host time: the
// same loop's call alone, in bursts that the launch queue takes.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <vector>

#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <stepgraph/pipeline/pipeline.h>
#include <stepgraph/tools/device_buffer.h>

#include "random_pages.h"

namespace {

using stepgraph::check_cuda;
using stepgraph::tools::DeviceBuffer;

constexpr int layers = 8;
constexpr int replays = 20;

std::vector<__nv_bfloat16> random_bf16(size_t n, float deviation) {
    std::normal_distribution<float> normal(0.0F, deviation);
    std::vector<__nv_bfloat16> values(n);
    for (auto& value : values) {
        value = stepgraph::bf16_from_float(normal(stepgraph::bench::random_bits()));
    }
    return values;
}

struct LayerMemory {
    DeviceBuffer<__nv_bfloat16> q_c, hidden, wq_b, w_kv;
    DeviceBuffer<float> norm_weight, norm_bias;
    DeviceBuffer<uint8_t> cache;
    DeviceBuffer<int32_t> indices;
};

/// A bound and captured pipeline of `requests` requests of `context` tokens, one row each.
class Model {
public:
    Model(stepgraph::CacheFormat format, int requests, int context, const stepgraph::Options& options)
        : pipeline_({.heads = 32,
                     .top_k = 2048,
                     .max_rows = requests,
                     .max_requests = requests,
                     .max_model_len = context,
                     .block_table_columns = context / 64,
                     .cache_format = format,
                     .pages = int64_t{requests} * context / 64,
                     .q_lora_rank = 1536,
                     .hidden_size = 7168},
                    options) {
        const stepgraph::Geometry& g = pipeline_.geometry();
        std::vector<int32_t> table(static_cast<size_t>(g.pages));
        for (size_t i = 0; i < table.size(); ++i) {
            table[i] = static_cast<int32_t>(i);
        }
        std::shuffle(table.begin(), table.end(), stepgraph::bench::random_bits());
        seq_lens_ = DeviceBuffer<int32_t>(std::vector<int32_t>(static_cast<size_t>(requests), context));
        query_lens_ = DeviceBuffer<int32_t>(std::vector<int32_t>(static_cast<size_t>(requests), 1));
        block_table_ = DeviceBuffer<int32_t>(table);
        workspace_ = DeviceBuffer<char>(pipeline_.workspace_bytes());
        std::vector<stepgraph::LayerBuffers> buffers;
        for (int i = 0; i < layers; ++i) {
            memory_.push_back(make_layer());
            const LayerMemory& m = memory_.back();
            buffers.push_back({.q_c = m.q_c.data(),
                               .hidden = m.hidden.data(),
                               .wq_b = m.wq_b.data(),
                               .w_kv = m.w_kv.data(),
                               .k_norm_weight = m.norm_weight.data(),
                               .k_norm_bias = m.norm_bias.data(),
                               .cache = m.cache.data(),
                               .indices = m.indices.data()});
        }
        pipeline_.bind({.seq_lens = seq_lens_.data(), .query_lens = query_lens_.data(), .block_table = block_table_.data()},
                       buffers, {workspace_.data(), workspace_.size()});
        pipeline_.capture({requests});
    }

    stepgraph::Pipeline& pipeline() { return pipeline_; }

private:
    LayerMemory make_layer() const {
        const stepgraph::Geometry& g = pipeline_.geometry();
        const auto rows = static_cast<size_t>(g.max_rows);
        LayerMemory m{
            .q_c = DeviceBuffer<__nv_bfloat16>(random_bf16(rows * 1536, 1.0F)),
            .hidden = DeviceBuffer<__nv_bfloat16>(random_bf16(rows * 7168, 1.0F)),
            .wq_b = DeviceBuffer<__nv_bfloat16>(random_bf16(size_t{4096} * 1536, 0.02F)),
            .w_kv = DeviceBuffer<__nv_bfloat16>(random_bf16(size_t{160} * 7168, 0.02F)),
            .norm_weight = DeviceBuffer<float>(std::vector<float>(128, 1.0F)),
            .norm_bias = DeviceBuffer<float>(std::vector<float>(128, 0.0F)),
            .cache = stepgraph::bench::random_cache(g.cache_format, static_cast<size_t>(g.pages * g.page_stride_bytes)),
            .indices = DeviceBuffer<int32_t>(rows * static_cast<size_t>(g.top_k))};
        return m;
    }

    stepgraph::Pipeline pipeline_;
    DeviceBuffer<int32_t> seq_lens_, query_lens_, block_table_;
    DeviceBuffer<char> workspace_;
    std::vector<LayerMemory> memory_;
};

void replay_layer(benchmark::State& state) {
    const auto format = static_cast<stepgraph::CacheFormat>(state.range(0));
    const auto requests = static_cast<int>(state.range(1));
    const auto context = static_cast<int>(state.range(2));
    Model model(format, requests, context,
                {.programmatic_edges = state.range(3) != 0, .portable_scorer = state.range(4) != 0, .tile_rows = 0});
    cudaStream_t stream = cudaStreamPerThread;
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
    check_cuda(cudaEventCreate(&end), "cudaEventCreate");
    model.pipeline().replay(requests, stream);
    double host_us = 1e9;
    for (auto _ : state) {
        check_cuda(cudaEventRecord(begin, stream), "cudaEventRecord");
        const auto called = std::chrono::steady_clock::now();
        for (int i = 0; i < replays; ++i) {
            model.pipeline().replay(requests, stream);
        }
        const std::chrono::duration<double, std::micro> calls = std::chrono::steady_clock::now() - called;
        check_cuda(cudaEventRecord(end, stream), "cudaEventRecord");
        check_cuda(cudaEventSynchronize(end), "cudaEventSynchronize");
        float milliseconds = 0;
        check_cuda(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
        state.SetIterationTime(double{milliseconds} * 1e-3 / (replays * layers));
        host_us = std::min(host_us, calls.count() / replays);
    }
    state.counters["host_us_a_replay"] = host_us;
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
}

// format (0 fp8, 2 mxfp4), requests, context in tokens, programmatic edges, portable scorer (no difference to mxfp4)
BENCHMARK(replay_layer)
    ->ArgNames({"format", "requests", "context", "programmatic", "portable"})
    ->ArgsProduct({{0, 2}, {1, 32}, {4096, 32768}, {0, 1}, {0, 1}})
    ->UseManualTime()
    ->Iterations(11)
    ->Unit(benchmark::kMicrosecond);

}  // namespace

BENCHMARK_MAIN();
