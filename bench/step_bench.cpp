// What a step costs: whole layers of the K3 shape, projections to indices, by the public pipeline; each cell checked in the
// same run.
//
// us: one layer, layout apart. Lengths stand still between replays, so that one layout serves them all: the graph that is
// timed holds the layers and nothing else, and a time is a replay's divided by its layers. The gap between two replays is in
// it: of one layer the whole gap, of 24 a part that no longer counts.
// stage_us: that graph minus the same one without the kernels of a stage. What stages hide of each other is in none of them.
// step_us, host_us: the pipeline's own captured step as an engine replays it, layout beside the first projections, and the
// call of its replay. layout_us: layout and schedule as a graph of their own.
//
// Each layer has weights of its own, and a cache of its own where there is room for as many ("caches"). Cold: a replay reads
// more than 256 MB, so that no layer finds its data in the L2; one layer of few keys is hot. Activations are shared: in a
// model the kernels in front of a layer have just written them.
//
// floor_bytes: keys once a request, weights, logits written and read. Logits that stay in the L2 can beat that floor.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include <stepgraph/layouts/number_formats.h>
#include <stepgraph/pipeline/pipeline.h>
#include <stepgraph/tools/case_file.h>
#include <stepgraph/tools/cuda_device.h>
#include <stepgraph/tools/device_buffer.h>
#include <stepgraph/tools/step_checks.h>

#include "checks.h"
#include "program.h"
#include "random_pages.h"

namespace stepgraph::bench {
namespace {

using tools::DeviceBuffer;

constexpr int heads = 32;
constexpr int top_k = 2048;
constexpr int hidden_size = 7168;
constexpr int q_lora_rank = 1536;
constexpr size_t query_weights = size_t{heads} * head_dim * q_lora_rank;
constexpr size_t packed_weights = size_t{head_dim + heads} * hidden_size;
constexpr size_t weight_bytes = (query_weights + packed_weights) * sizeof(__nv_bfloat16);  // of a layer

constexpr int most_layers = 61;
constexpr int most_rows_per_request = 8;
constexpr int most_rows = 128 * most_rows_per_request;
constexpr size_t cold_bytes = size_t{256} << 20U;
constexpr size_t most_cache_bytes = size_t{56} << 30U;  // of all layers: 24 caches of the largest cell

constexpr const char* stages[] = {"project", "index_inputs", "score", "select"};

/// By the kernel's name. The others' kernels, cuBLASLt's, are the projections'.
std::string stage_of(const std::string& kernel) {
    const auto* found = std::find_if(std::begin(stages) + 1, std::end(stages),
                                     [&](const char* stage) { return kernel.find(stage) != std::string::npos; });
    return found != std::end(stages) ? *found : stages[0];
}

constexpr int usual_captured_context = 131072;  // what an engine is ready for, whatever its requests hold

struct Cell {
    CacheFormat format = CacheFormat::fp8;
    int requests = 1;
    int context = 4096;
    int rows_per_request = 1;  // 0: ragged, one to eight
    int layers = 24;
    bool programmatic = true;
    int captured_context = usual_captured_context;

    [[nodiscard]] int used_pages() const { return context / page_tokens; }
    [[nodiscard]] int columns() const { return captured_context / page_tokens; }
    [[nodiscard]] size_t cache_bytes() const {
        return static_cast<size_t>(requests) * static_cast<size_t>(used_pages()) * static_cast<size_t>(page_bytes(format));
    }
    [[nodiscard]] std::string rows_text() const {
        return rows_per_request == 0 ? "ragged" : std::to_string(rows_per_request);
    }
    [[nodiscard]] std::string name() const {
        // The format first: the keys of one at a time are held.
        return std::string("step/") + tools::format_name(format) + "/requests:" + std::to_string(requests) +
               "/context:" + std::to_string(context) + "/rows:" + rows_text() + "/layers:" + std::to_string(layers) +
               (programmatic ? "/programmatic" : "/full") +
               (captured_context != usual_captured_context ? "/captured:" + std::to_string(captured_context) : "");
    }
};

std::vector<__nv_bfloat16> random_bf16(size_t n, float deviation) {
    std::normal_distribution<float> normal(0.0F, deviation);
    std::vector<__nv_bfloat16> values(n);
    std::generate(values.begin(), values.end(), [&] { return bf16_from_float(normal(random_bits())); });
    return values;
}

/// Weights of `n` elements for every layer, each set at other values.
DeviceBuffer<__nv_bfloat16> weights_of_layers(size_t n) {
    const size_t shift = 64;  // elements: 16-byte aligned, and no row of one layer is a row of another
    const std::vector<__nv_bfloat16> drawn = random_bf16(n + most_layers * shift, 0.02F);
    DeviceBuffer<__nv_bfloat16> weights(most_layers * n);
    for (size_t layer = 0; layer < most_layers; ++layer) {
        check_cuda(cudaMemcpy(weights.data() + layer * n, drawn.data() + layer * shift, n * sizeof(__nv_bfloat16),
                              cudaMemcpyHostToDevice),
                   "cudaMemcpy");
    }
    return weights;
}

size_t room_for_caches() {
    size_t free = 0;
    size_t total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return std::min(most_cache_bytes, free / 4 * 3);
}

/// What the cells of a format share.
class Memory {
public:
    explicit Memory(CacheFormat format) : caches_(random_cache(format, room_for_caches())) {}

    /// Caches that follow each other in the layers of a cell, which share some where there are fewer than layers.
    [[nodiscard]] int caches(const Cell& cell) const {
        const size_t fit = caches_.size() / cell.cache_bytes();
        if (fit == 0) {
            throw std::runtime_error("a cache of " + cell.name() + " takes " + std::to_string(cell.cache_bytes()) +
                                     " bytes, must be at most " + std::to_string(caches_.size()) +
                                     ", which is what this GPU has room for");
        }
        return static_cast<int>(std::min<size_t>(fit, static_cast<size_t>(cell.layers)));
    }

    [[nodiscard]] LayerBuffers layer(const Cell& cell, int index) const {
        const auto i = static_cast<size_t>(index);
        return {.q_c = q_c_.data(),
                .hidden = hidden_.data(),
                .wq_b = wq_b_.data() + i * query_weights,
                .w_kv = w_kv_.data() + i * packed_weights,
                .k_norm_weight = norm_weight_.data(),
                .k_norm_bias = norm_bias_.data(),
                .cache = caches_.data() + static_cast<size_t>(index % caches(cell)) * cell.cache_bytes()};
    }

private:
    DeviceBuffer<__nv_bfloat16> q_c_{random_bf16(size_t{most_rows} * q_lora_rank, 1.0F)};
    DeviceBuffer<__nv_bfloat16> hidden_{random_bf16(size_t{most_rows} * hidden_size, 1.0F)};
    DeviceBuffer<__nv_bfloat16> wq_b_{weights_of_layers(query_weights)};
    DeviceBuffer<__nv_bfloat16> w_kv_{weights_of_layers(packed_weights)};
    DeviceBuffer<float> norm_weight_{std::vector<float>(head_dim, 1.0F)};
    DeviceBuffer<float> norm_bias_{std::vector<float>(head_dim, 0.0F)};
    DeviceBuffer<uint8_t> caches_;
};

/// The inputs of a cell's step.
class Inputs {
public:
    explicit Inputs(const Cell& cell) {
        std::vector<int32_t> query_lens;
        for (int q = 0; q < cell.requests; ++q) {
            const int rows = cell.rows_per_request != 0 ? cell.rows_per_request
                                                        : 1 + static_cast<int>(random_bits()() % most_rows_per_request);
            for (int i = 0; i < rows; ++i) {
                ends_.push_back(cell.context - rows + 1 + i);
            }
            query_lens.push_back(rows);
        }
        seq_lens_ = DeviceBuffer<int32_t>(std::vector<int32_t>(query_lens.size(), cell.context));
        query_lens_ = DeviceBuffer<int32_t>(query_lens);
        block_table_ = DeviceBuffer<int32_t>(random_block_table(cell.requests, cell.used_pages(), cell.columns()));
    }

    [[nodiscard]] StepBuffers buffers() const {
        return {.seq_lens = seq_lens_.data(), .query_lens = query_lens_.data(), .block_table = block_table_.data()};
    }
    [[nodiscard]] const std::vector<int32_t>& ends() const { return ends_; }  // [rows]
    [[nodiscard]] int rows() const { return static_cast<int>(ends_.size()); }

private:
    std::vector<int32_t> ends_;
    DeviceBuffer<int32_t> seq_lens_, query_lens_, block_table_;
};

/// A bound pipeline with workspace and outputs of its own.
class Model {
public:
    /// `logits`: of the last layer are kept.
    Model(const Cell& cell, const Memory& memory, const Inputs& inputs, const Options& options, bool logits)
        : pipeline_({.heads = heads,
                     .top_k = top_k,
                     .max_rows = inputs.rows(),
                     .max_requests = cell.requests,
                     .max_model_len = int64_t{cell.columns()} * page_tokens,
                     .block_table_columns = cell.columns(),
                     .cache_format = cell.format,
                     .pages = int64_t{cell.requests} * cell.used_pages(),
                     .q_lora_rank = q_lora_rank,
                     .hidden_size = hidden_size},
                    options),
          layers_(cell.layers),
          workspace_(pipeline_.workspace_bytes()),
          indices_(static_cast<size_t>(cell.layers) * indices_of_layer()),
          logits_(logits ? static_cast<size_t>(inputs.rows()) * static_cast<size_t>(pipeline_.geometry().width()) : 0) {
        std::vector<LayerBuffers> buffers;
        for (int i = 0; i < layers_; ++i) {
            buffers.push_back(memory.layer(cell, i));
            buffers.back().indices = indices_.data() + static_cast<size_t>(i) * indices_of_layer();
        }
        buffers.back().logits = logits_.data();
        pipeline_.bind(inputs.buffers(), buffers, {workspace_.data(), workspace_.size()});
        indices_.poison();
        logits_.poison(0xFF);  // NaN
    }

    [[nodiscard]] int rows() const { return pipeline_.geometry().max_rows; }
    [[nodiscard]] Pipeline& pipeline() { return pipeline_; }

    void enqueue_layout(cudaStream_t stream) const { pipeline_.enqueue_layout(rows(), stream); }
    void enqueue_layer(int layer, cudaStream_t stream) const { pipeline_.enqueue_layer(layer, rows(), stream); }

    /// Runs the layout and the layers from `first` on.
    void run(int first) const {
        enqueue_layout(cudaStreamPerThread);
        for (int layer = first; layer < layers_; ++layer) {
            enqueue_layer(layer, cudaStreamPerThread);
        }
        check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "the step");
    }
    void capture_and_replay() {
        pipeline_.capture({rows()});
        pipeline_.replay(rows(), cudaStreamPerThread);
        check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "the step");
    }

    [[nodiscard]] size_t indices_of_layer() const { return static_cast<size_t>(rows()) * top_k; }
    [[nodiscard]] std::vector<int32_t> indices() const { return indices_.download(); }  // [layers, rows, top_k]
    [[nodiscard]] std::vector<float> logits() const { return logits_.download(); }      // [rows, width], of the last layer
    [[nodiscard]] int64_t width() const { return pipeline_.geometry().width(); }
    [[nodiscard]] bool skipped_data() const { return pipeline_.read_status(cudaStreamPerThread) != StepStatus{}; }

private:
    Pipeline pipeline_;
    int layers_;
    DeviceBuffer<char> workspace_;
    DeviceBuffer<int32_t> indices_;
    DeviceBuffer<float> logits_;
};

/// Indices of all layers of one replay against those of the same kernels run one by one; those of the last layer against a
/// search of its logits on the host; these logits against the portable scorer's.
Difference compare(const Cell& cell, const Memory& memory, const Inputs& inputs, Model& measured) {
    measured.capture_and_replay();
    const std::vector<int32_t> indices = measured.indices();
    Model same(cell, memory, inputs, {.programmatic_edges = false}, true);
    same.run(0);
    const std::vector<int32_t> again = same.indices();
    Difference difference;
    for (size_t i = 0; i < indices.size(); ++i) {
        difference.mismatches += indices[i] == again[i] ? 0 : 1;
    }
    Model portable(cell, memory, inputs, {.programmatic_edges = false, .portable_scorer = true}, true);
    portable.run(cell.layers - 1);
    const std::vector<float> logits = same.logits();
    const std::vector<float> expected = portable.logits();
    const int32_t* last_layer = indices.data() + indices.size() - measured.indices_of_layer();
    for (int row = 0; row < inputs.rows(); ++row) {
        const int end = inputs.ends()[static_cast<size_t>(row)];
        const int64_t first = row * measured.width();
        compare_logits(difference, logits.data() + first, expected.data() + first, end, tools::logit_tolerance(cell.format));
        difference.mismatches +=
            wrong_winners(exact_winners(logits.data() + first, end, top_k), last_layer + int64_t{row} * top_k);
    }
    difference.mismatches += measured.skipped_data() ? 1 : 0;
    return difference;
}

size_t floor_bytes(const Cell& cell, const Inputs& inputs) {
    size_t logits = 0;
    for (const int32_t end : inputs.ends()) {
        logits += end > top_k ? static_cast<size_t>(end) : 0;
    }
    return cell.cache_bytes() + weight_bytes + 2 * logits * sizeof(float);
}

double median_us(Replays& replays) {
    std::vector<double> times(5);
    std::generate(times.begin(), times.end(), [&] { return replays.time_us(); });
    return median(times);
}

/// The median of the layer minus what it takes without each stage.
nlohmann::ordered_json stage_times(const Cell& cell, const std::function<void(int, cudaStream_t)>& enqueue_layer,
                                   double layer_us) {
    nlohmann::ordered_json times;
    for (const std::string stage : stages) {
        Replays without(cell.layers, enqueue_layer, [&](const std::string& kernel) { return stage_of(kernel) == stage; });
        times[stage] = layer_us - median_us(without);
    }
    return times;
}

void measure(benchmark::State& state, const Cell& cell, const Memory& memory, Report& report) {
    const Inputs inputs(cell);
    Model model(cell, memory, inputs, {.programmatic_edges = cell.programmatic}, false);
    const Difference difference = compare(cell, memory, inputs, model);

    Replays step(1, [&](cudaStream_t stream) { model.pipeline().replay(model.rows(), stream); });
    std::vector<double> step_us;
    std::vector<double> host_us;
    for (int i = 0; i < 11; ++i) {
        step_us.push_back(step.time_us());
        host_us.push_back(step.host_us());
    }
    Replays layout(1, [&](int, cudaStream_t stream) { model.enqueue_layout(stream); });
    const double layout_us = median_us(layout);
    // What follows builds on the layout of these replays.
    const auto enqueue_layer = [&](int layer, cudaStream_t stream) { model.enqueue_layer(layer, stream); };
    Replays layers(cell.layers, enqueue_layer);
    const std::vector<double> times = times_of(state, layers);

    const int caches = memory.caches(cell);
    const size_t read_bytes =
        static_cast<size_t>(cell.layers) * weight_bytes + static_cast<size_t>(caches) * cell.cache_bytes();
    report.add({{"format", tools::format_name(cell.format)},
                {"requests", cell.requests},
                {"context", cell.context},
                {"rows_per_request", cell.rows_per_request == 0 ? nlohmann::ordered_json("ragged")
                                                                : nlohmann::ordered_json(cell.rows_per_request)},
                {"layers", cell.layers},
                {"captured_context", cell.captured_context},
                {"caches", caches},
                {"floor_bytes", floor_bytes(cell, inputs)},
                {"cold", read_bytes > cold_bytes},
                {"edges", cell.programmatic ? "programmatic" : "full"},
                {"checked", true},
                {"max_error", difference.largest_error},
                {"mismatches", difference.mismatches},
                {"stage_us", stage_times(cell, enqueue_layer, median(times))},
                {"layout_us", layout_us},
                {"step_us", median(step_us)},
                {"host_us", median(host_us)}},
               times);
    if (difference.mismatches != 0) {
        state.SkipWithError((std::to_string(difference.mismatches) + " results are wrong").c_str());
    }
}

void print_table(const Report& report) {
    std::printf(
        "\nread ceiling %.2f TB/s; us: a layer; floor: its keys, weights and logits at the ceiling; aim: 1.12 floors "
        "+ 10 us; the rest: a stage of a layer, a step\n",
        report.ceiling_tb_s());
    std::printf("%6s %8s %8s %7s %6s %5s %13s %9s | %9s %9s %9s | %7s %7s |", "format", "requests", "context", "rows",
                "layers", "", "edges", "captured", "us", "min", "max", "/floor", "/aim");
    for (const char* stage : stages) {
        std::printf(" %12s", stage);
    }
    std::printf(" | %9s %9s %7s | %9s %6s\n", "layout", "step", "host", "max error", "wrong");
    for (const auto& row : report.json()["rows"]) {
        const double us = row["us"];
        const double floor_us = row["floor_bytes"].get<double>() / report.ceiling_tb_s() * 1e-6;
        std::printf("%6s %8d %8d %7s %6d %5s %13s %9d | %9.2f %9.2f %9.2f | %7.2f %7.3f |",
                    row["format"].get<std::string>().c_str(), row["requests"].get<int>(), row["context"].get<int>(),
                    row["rows_per_request"].dump().c_str(), row["layers"].get<int>(),
                    row["cold"].get<bool>() ? "cold" : "hot", row["edges"].get<std::string>().c_str(),
                    row["captured_context"].get<int>(), us, row["us_min"].get<double>(), row["us_max"].get<double>(),
                    us / floor_us, us / (1.12 * floor_us + 10));
        for (const char* stage : stages) {
            std::printf(" %12.2f", row["stage_us"][stage].get<double>());
        }
        std::printf(" | %9.2f %9.2f %7.2f | %9.1e %6lld\n", row["layout_us"].get<double>(), row["step_us"].get<double>(),
                    row["host_us"].get<double>(), row["max_error"].get<double>(),
                    static_cast<long long>(row["mismatches"].get<int64_t>()));
    }
}

constexpr int every_requests[] = {1, 8, 32, 64, 128};
constexpr int every_context[] = {4096, 16384, 32768, 65536, 131072};

std::vector<Cell> core_cells() {
    std::vector<Cell> cells;
    for (const int requests : every_requests) {
        for (const int context : every_context) {
            cells.push_back({.requests = requests, .context = context});
        }
    }
    for (const auto& [requests, context] : {std::pair{1, 4096}, {32, 4096}, {32, 32768}}) {
        for (const int rows : {2, 8, 0}) {
            cells.push_back({.requests = requests, .context = context, .rows_per_request = rows});
        }
        cells.push_back({.requests = requests, .context = context, .programmatic = false});
        for (const int layers : {1, most_layers}) {
            cells.push_back({.requests = requests, .context = context, .layers = layers});
        }
    }
    for (const int requests : {1, 32}) {
        for (const int captured : {8192, 1 << 20}) {
            cells.push_back({.requests = requests, .captured_context = captured});
        }
    }
    for (const int requests : {1, 8, 32}) {
        for (const int context : {4096, 32768}) {
            cells.push_back({.format = CacheFormat::mxfp4, .requests = requests, .context = context});
        }
    }
    return cells;
}

std::vector<Cell> all_cells() {
    std::vector<Cell> cells = core_cells();
    for (const CacheFormat format : {CacheFormat::fp8, CacheFormat::mxfp4}) {
        for (const int requests : every_requests) {
            for (const int context : every_context) {
                const Cell cell{.format = format, .requests = requests, .context = context};
                for (const int rows : {1, 2, 4, most_rows_per_request, 0}) {
                    cells.push_back(cell);
                    cells.back().rows_per_request = rows;
                }
                for (const int layers : {1, most_layers}) {
                    cells.push_back(cell);
                    cells.back().layers = layers;
                }
                cells.push_back(cell);
                cells.back().programmatic = false;
            }
        }
    }
    return each_once(cells);
}

}  // namespace
}  // namespace stepgraph::bench

int main(int argc, char** argv) {
    using namespace stepgraph::bench;
    return run_program(argc, argv,
                       {.description = "Times whole layers, projections to indices.",
                        .core = "The cells of bench/results: FP8 pages, one row a request, 24 layers, and some of MXFP4 "
                                "pages, of 2, 8 and ragged "
                                "rows, of 1 and 61 layers, with full edges, and captured for more; without it all of them",
                        .why_not = stepgraph::tools::why_no_device,
                        .run = [](Report& report, bool core) {
                            std::string held;
                            std::unique_ptr<Memory> memory;
                            for (const Cell& cell : core ? core_cells() : all_cells()) {
                                add_cell(cell.name(), [&, cell](benchmark::State& state) {
                                    const std::string format = stepgraph::tools::format_name(cell.format);
                                    if (held != format) {
                                        memory = nullptr;  // there is no room for both
                                        memory = std::make_unique<Memory>(cell.format);
                                        held = format;
                                    }
                                    measure(state, cell, *memory, report);
                                });
                            }
                            benchmark::RunSpecifiedBenchmarks();
                            print_table(report);
                        }});
}
