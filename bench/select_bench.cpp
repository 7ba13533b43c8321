// What selection costs: graphs of select launches, replayed; each cell checked against a full search on the host in the same
// run.
//
// Hot: one set of logits again and again, as the scorer has just left it in the L2. Cold: launches rotate over sets that
// together are larger than the L2. A time is a replay's divided by its launches, so that it holds the gap between two
// launches.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include <stepgraph/kernels/select_sm90.h>
#include <stepgraph/layouts/number_formats.h>
#include <stepgraph/tools/cuda_device.h>
#include <stepgraph/tools/device_buffer.h>

#include "checks.h"
#include "program.h"

namespace stepgraph::bench {
namespace {

using tools::DeviceBuffer;

constexpr size_t cold_bytes = size_t{192} << 20U;  // that cold launches rotate over
constexpr int most_sets = 4096;
constexpr size_t pool_logits = size_t{1} << 22U;  // drawn once for each distribution; rows begin anywhere in them
constexpr size_t pool_slack = size_t{1} << 19U;   // the longest row

struct Cell {
    int rows = 1;
    int length = 4096;
    int top_k = 2048;
    std::string distribution = "normal";
    bool cold = false;
    bool programmatic = true;
    bool portable = false;    // by the kernel that runs everywhere
    int captured_length = 0;  // 0: length

    [[nodiscard]] int64_t width() const { return std::max(length, captured_length); }
    [[nodiscard]] std::string name() const {
        // The distribution first: one pool at a time is held.
        return "select/" + distribution + "/rows:" + std::to_string(rows) + "/length:" + std::to_string(length) +
               "/k:" + std::to_string(top_k) + (cold ? "/cold" : "/hot") + (programmatic ? "/programmatic" : "/full") +
               (portable ? "/portable" : "") + (captured_length != 0 ? "/captured:" + std::to_string(captured_length) : "");
    }
};

const std::vector<std::string> distributions = {"normal", "relu", "packed", "heavy", "equal", "bf16"};

std::vector<float> draw_pool(const std::string& distribution) {
    std::mt19937_64 random{std::random_device{}()};
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    const std::function<float()> draw = [&]() -> float {
        if (distribution == "relu") {  // an eighth above a plateau of zeros
            return std::max(0.0F, normal(random) - 1.15F);
        }
        if (distribution == "packed") {
            return 100.0F + uniform(random);
        }
        if (distribution == "heavy") {
            return std::copysign(std::pow(uniform(random) + 1e-7F, -3.0F), normal(random));
        }
        if (distribution == "equal") {
            return 3.25F;
        }
        return distribution == "bf16" ? round_to_bf16(normal(random)) : normal(random);
    };
    std::vector<float> pool(pool_logits + pool_slack);
    std::generate(pool.begin(), pool.end(), draw);
    return pool;
}

/// The logits of a distribution, on the host and on the device.
struct Pool {
    explicit Pool(const std::string& distribution) : host(draw_pool(distribution)), device(host) {}

    std::vector<float> host;
    DeviceBuffer<float> device;
};

class Work {
public:
    Work(const Cell& cell, const Pool& pool) : cell_(cell), pool_(pool) {
        const auto rows = static_cast<size_t>(cell.rows);
        const size_t set_logits = rows * static_cast<size_t>(cell.width());
        const size_t read_bytes = rows * static_cast<size_t>(cell.length) * sizeof(float);
        sets_ = cell.cold ? static_cast<int>(std::min<size_t>(cold_bytes / read_bytes + 2, most_sets)) : 1;
        logits_ = DeviceBuffer<float>(static_cast<size_t>(sets_) * set_logits);
        for (size_t row = 0; row < static_cast<size_t>(sets_) * rows; ++row) {
            check_cuda(cudaMemcpyAsync(logits_.data() + row * static_cast<size_t>(cell.width()),
                                       pool.device.data() + begin(row), static_cast<size_t>(cell.length) * sizeof(float),
                                       cudaMemcpyDeviceToDevice, cudaStreamPerThread),
                       "cudaMemcpyAsync");
        }
        check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "the logits");
        ends_ = DeviceBuffer<int32_t>(std::vector<int32_t>(rows, cell.length));
        indices_ = DeviceBuffer<int32_t>(rows * static_cast<size_t>(cell.top_k));
        prepare_select();
        if (!cell.portable) {
            prepare_select_sm90();
        }
    }

    [[nodiscard]] int launches() const { return std::max(sets_, 20); }

    void enqueue(int i, cudaStream_t stream) const {
        const LaunchContext context{stream, cell_.programmatic};
        const SelectArgs args{.tile = {.number = 0,
                                       .rows = cell_.rows,
                                       .least = {cell_.rows, static_cast<int32_t>(cell_.width())},
                                       .shape = nullptr},
                              .top_k = cell_.top_k,
                              .ends = ends_.data(),
                              .logits = logits_.data() + int64_t{i % sets_} * cell_.rows * cell_.width(),
                              .row_request = nullptr,
                              .block_table = nullptr,
                              .block_table_stride = 0,
                              .pages = 1,
                              .indices = indices_.data(),
                              .counts = nullptr,
                              .physical_slots = nullptr,
                              .winner_logits = nullptr,
                              .padded_logits = nullptr,
                              .width = cell_.width(),
                              .last_of_layer = false};
        if (cell_.portable) {
            select(args, context);
        } else {
            select_sm90(args, context);
        }
    }

    /// Selects once into poisoned outputs; how many are wrong.
    int64_t mismatches() {
        indices_.poison();
        enqueue(0, cudaStreamPerThread);
        check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "select");
        const std::vector<int32_t> actual = indices_.download();
        int64_t wrong = 0;
        for (int row = 0; row < cell_.rows; ++row) {
            const float* logits = pool_.host.data() + begin(static_cast<size_t>(row));
            wrong +=
                wrong_winners(exact_winners(logits, cell_.length, cell_.top_k), actual.data() + int64_t{row} * cell_.top_k);
        }
        return wrong;
    }

private:
    static size_t begin(size_t row) { return row * 1234577 % pool_logits; }

    Cell cell_;
    const Pool& pool_;
    int sets_ = 1;
    DeviceBuffer<float> logits_;
    DeviceBuffer<int32_t> ends_, indices_;
};

void measure(benchmark::State& state, const Cell& cell, const Pool& pool, Report& report) {
    Work work(cell, pool);
    const int64_t mismatches = work.mismatches();
    Replays replays(work.launches(), [&](int i, cudaStream_t stream) { work.enqueue(i, stream); });
    const std::vector<double> times = times_of(state, replays);
    report.add({{"rows", cell.rows},
                {"length", cell.length},
                {"k", cell.top_k},
                {"distribution", cell.distribution},
                {"captured_length", cell.width()},
                {"kernel", cell.portable ? "select" : "select_sm90"},
                {"cold", cell.cold},
                {"edges", cell.programmatic ? "programmatic" : "full"},
                {"checked", true},
                {"max_error", 0},
                {"mismatches", mismatches}},
               times);
    if (mismatches != 0) {
        state.SkipWithError((std::to_string(mismatches) + " positions are wrong").c_str());
    }
}

void print_table(const Report& report) {
    std::printf("\nread ceiling %.2f TB/s; floor: the logits' bytes at the ceiling, which hot ones in the L2 can beat\n",
                report.ceiling_tb_s());
    std::printf("%6s %8s %6s %12s %5s %13s %9s | %9s %9s %9s | %7s %6s\n", "rows", "length", "K", "distribution", "",
                "edges", "captured", "us", "min", "max", "/floor", "wrong");
    for (const auto& row : report.json()["rows"]) {
        const double us = row["us"];
        const double bytes = row["rows"].get<double>() * row["length"].get<double>() * sizeof(float);
        std::printf("%6d %8d %6d %12s %5s %13s %9d | %9.2f %9.2f %9.2f | %7.2f %6d\n", row["rows"].get<int>(),
                    row["length"].get<int>(), row["k"].get<int>(), row["distribution"].get<std::string>().c_str(),
                    row["cold"].get<bool>() ? "cold" : "hot", row["edges"].get<std::string>().c_str(),
                    row["captured_length"].get<int>(), us, row["us_min"].get<double>(), row["us_max"].get<double>(),
                    us / (bytes / report.ceiling_tb_s() * 1e-6), row["mismatches"].get<int>());
    }
}

constexpr int every_rows[] = {1, 8, 32, 64, 128};

std::vector<Cell> core_cells() {
    std::vector<Cell> cells;
    for (const int rows : every_rows) {
        for (const int length : {4096, 16384, 32768, 65536, 131072}) {
            cells.push_back({.rows = rows, .length = length});
        }
    }
    for (const std::string& distribution : distributions) {
        for (const int rows : {1, 32, 128}) {
            for (const int length : {4096, 32768, 131072}) {
                if (distribution != "normal") {
                    cells.push_back({.rows = rows, .length = length, .distribution = distribution});
                }
            }
        }
    }
    for (const int rows : {1, 32}) {
        for (const int captured : {8192, 1 << 20}) {
            cells.push_back({.rows = rows, .captured_length = captured});
        }
    }
    return cells;
}

std::vector<Cell> all_cells() {
    std::vector<Cell> cells = core_cells();
    for (const std::string& distribution : distributions) {
        for (const int top_k : {512, 1024, 2048}) {
            for (const bool cold : {false, true}) {
                for (const int rows : every_rows) {
                    for (const int length : {4096, 16384, 32768, 65536, 131072, 524288}) {
                        cells.push_back(
                            {.rows = rows, .length = length, .top_k = top_k, .distribution = distribution, .cold = cold});
                    }
                }
            }
        }
    }
    for (const Cell& cell : std::vector<Cell>(cells.begin(), cells.begin() + 25)) {
        cells.push_back(cell);
        cells.back().programmatic = false;
        cells.push_back(cell);
        cells.back().portable = true;
    }
    return each_once(cells);
}

}  // namespace
}  // namespace stepgraph::bench

int main(int argc, char** argv) {
    using namespace stepgraph::bench;
    return run_program(
        argc, argv,
        {.description = "Times selection.",
         .core =
             "The cells of bench/results: K 2048, hot, normal logits, some of other distributions, some captured for longer "
             "rows; without it also K 512 and 1024, every distribution, cold, rows of 512 K, full edges, and the portable "
             "kernel",
         .why_not = stepgraph::tools::why_no_device,
         .run = [](Report& report, bool core) {
             const bool clusters = stepgraph::can_select_sm90();
             std::string held;
             std::unique_ptr<Pool> pool;
             for (Cell cell : core ? core_cells() : all_cells()) {
                 cell.portable = cell.portable || !clusters;
                 add_cell(cell.name(), [&, cell](benchmark::State& state) {
                     if (held != cell.distribution) {
                         pool = std::make_unique<Pool>(cell.distribution);
                         held = cell.distribution;
                     }
                     measure(state, cell, *pool, report);
                 });
             }
             benchmark::RunSpecifiedBenchmarks();
             print_table(report);
         }});
}
