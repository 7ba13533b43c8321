// What scoring costs: graphs of scorer launches, replayed; each cell checked against the portable scorer in the same run.
//
// Cold: launches rotate over slices of a cache that together are far larger than the L2. Hot: one slice again and again. A
// time is a replay's divided by its launches, so that it holds the gap between two launches.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <stepgraph/kernels/reference/widen.h>
#include <stepgraph/kernels/schedule.h>
#include <stepgraph/kernels/score.h>
#include <stepgraph/kernels/score_sm90.h>
#include <stepgraph/layouts/query_row.h>
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

constexpr size_t cache_pages = size_t{570} << 10U;  // 4.9 GB of FP8 keys, of which the largest cell reads half
constexpr size_t cold_bytes = size_t{1} << 30U;     // that launches rotate over at least, where the cache has them

struct Cell {
    CacheFormat format = CacheFormat::fp8;
    int requests = 1;
    int context = 4096;
    int rows_per_request = 1;  // 0: ragged, one to eight
    int heads = 32;
    bool cold = true;
    bool programmatic = true;
    int captured_context = 0;  // 0: context

    [[nodiscard]] int columns() const { return std::max(context, captured_context) / page_tokens; }
    [[nodiscard]] int64_t pages() const { return int64_t{requests} * context / page_tokens; }
    [[nodiscard]] std::string rows_text() const {
        return rows_per_request == 0 ? "ragged" : std::to_string(rows_per_request);
    }
    [[nodiscard]] std::string name() const {
        return std::string("score/") + tools::format_name(format) + "/requests:" + std::to_string(requests) +
               "/context:" + std::to_string(context) + "/rows:" + rows_text() + "/heads:" + std::to_string(heads) +
               (cold ? "/cold" : "/hot") + (programmatic ? "/programmatic" : "/full") +
               (captured_context != 0 ? "/captured:" + std::to_string(captured_context) : "");
    }
};

template <typename Make>
auto filled(size_t n, Make make) {
    std::vector<decltype(make())> values(n);
    std::generate(values.begin(), values.end(), make);
    return values;
}

/// A step's inputs to the scorer, its schedule, and the launches of a cell.
class Work {
public:
    Work(const Cell& cell, const DeviceBuffer<uint8_t>& cache) : cell_(cell), cache_(cache.data()) {
        std::vector<int32_t> starts{0};
        std::vector<int32_t> row_request;
        std::vector<int32_t> ends;
        for (int q = 0; q < cell.requests; ++q) {
            const int rows = cell.rows_per_request != 0 ? cell.rows_per_request : 1 + static_cast<int>(random_bits()() % 8);
            for (int i = 0; i < rows; ++i) {
                row_request.push_back(q);
                ends.push_back(cell.context - rows + 1 + i);
            }
            starts.push_back(static_cast<int32_t>(ends.size()));
        }
        rows_ = static_cast<int>(ends.size());
        starts_ = DeviceBuffer<int32_t>(starts);
        row_request_ = DeviceBuffer<int32_t>(row_request);
        ends_ = DeviceBuffer<int32_t>(ends);
        host_ends_ = ends;
        table_ = DeviceBuffer<int32_t>(random_block_table(cell.requests, cell.context / page_tokens, cell.columns()));
        draw_query();
        logits_ = DeviceBuffer<float>(static_cast<size_t>(rows_) * static_cast<size_t>(width()));
        prefix_ = DeviceBuffer<int32_t>(ends.size());
        status_ = DeviceBuffer<StepStatus>(std::vector<StepStatus>(1));
        blocks_ = score_sm90_blocks();
        pieces_ = DeviceBuffer<ScorePiece>(static_cast<size_t>(most_score_pieces(rows_, rows_, cell.columns())));
        drawn_ = DeviceBuffer<int32_t>(std::vector<int32_t>(1));
        prepare_schedule();
        prepare_score();
        prepare_score_sm90(cell.format, cell.heads);
        make_schedule();
        check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "the schedule");
        const auto slice = static_cast<size_t>(key_bytes());
        slices_ = cell.cold ? static_cast<int>(std::min((cold_bytes + slice - 1) / slice + 1, cache.size() / slice)) : 1;
    }

    [[nodiscard]] int launches() const { return std::max(slices_, 20); }
    void enqueue(int i, cudaStream_t stream) const {
        score_sm90(arguments(i % slices_), blocks_, {stream, cell_.programmatic});
    }
    [[nodiscard]] int64_t key_bytes() const { return cell_.pages() * page_bytes(cell_.format); }

    /// Scores once with each scorer, into poisoned logits, and compares them in full; nothing may be written behind a bound.
    Difference compare() {
        const std::vector<float> actual = scored([&] { enqueue(0, cudaStreamPerThread); });
        const std::vector<float> expected = scored([&] {
            score(arguments(0), score_blocks(cell_.heads), {cudaStreamPerThread, true});
        });
        Difference difference;
        for (size_t row = 0; row < host_ends_.size(); ++row) {
            const float* a = actual.data() + row * static_cast<size_t>(width());
            const float* b = expected.data() + row * static_cast<size_t>(width());
            const int end = host_ends_[row];
            compare_logits(difference, a, b, end, tools::logit_tolerance(cell_.format));
            for (int64_t j = end; j < width(); ++j) {
                difference.mismatches += std::isnan(a[j]) ? 0 : 1;
            }
        }
        return difference;
    }

private:
    [[nodiscard]] int64_t width() const { return int64_t{cell_.columns()} * page_tokens; }

    void draw_query() {
        std::normal_distribution<float> normal;
        const std::vector<uint8_t> query = random_query(cell_.format, cell_.heads, rows_);
        const std::vector<float> weights =
            filled(static_cast<size_t>(rows_ * cell_.heads), [&] { return normal(random_bits()) * 1e-3F; });
        query_ = DeviceBuffer<uint8_t>(query);
        weights_ = DeviceBuffer<float>(weights);
        if (is_mxfp4(cell_.format)) {
            std::vector<uint8_t> widened_query(weights.size() * head_dim);
            std::vector<float> widened_weights(weights.size());
            reference::widen_query(cell_.format, cell_.heads, rows_, rows_, query.data(), weights.data(),
                                   widened_query.data(), widened_weights.data());
            widened_query_ = DeviceBuffer<uint8_t>(widened_query);
            widened_weights_ = DeviceBuffer<float>(widened_weights);
        }
    }

    void make_schedule() {
        schedule({.starts = starts_.data(),
                  .row_request = row_request_.data(),
                  .ends = ends_.data(),
                  .rows = rows_,
                  .least = tile(),
                  .unscored_bound = 0,
                  .shape = nullptr,
                  .page_prefix = prefix_.data(),
                  .pieces = pieces_.data(),
                  .pieces_a_tile = static_cast<int64_t>(pieces_.size()),
                  .drawn = drawn_.data(),
                  .block_table = table_.data(),
                  .block_table_stride = cell_.columns(),
                  .rows_a_pass = score_sm90_rows_a_pass(cell_.heads),
                  .blocks = blocks_},
                 {cudaStreamPerThread, true});
    }

    [[nodiscard]] TileShape tile() const { return {rows_, static_cast<int32_t>(width())}; }

    [[nodiscard]] ScoreArgs arguments(int slice) const {
        return {.format = cell_.format,
                .heads = cell_.heads,
                .tile = {.number = 0, .rows = rows_, .least = tile(), .shape = nullptr},
                .max_rows = rows_,
                .query = query_.data(),
                .head_weights = weights_.data(),
                .widened_query = widened_query_.data(),
                .widened_weights = widened_weights_.data(),
                .cache = cache_ + slice * key_bytes(),
                .pages = cell_.pages(),
                .page_stride_bytes = page_bytes(cell_.format),
                .block_table = table_.data(),
                .block_table_stride = cell_.columns(),
                .starts = starts_.data(),
                .row_request = row_request_.data(),
                .ends = ends_.data(),
                .page_prefix = prefix_.data(),
                .pieces = pieces_.data(),
                .drawn = drawn_.data(),
                .unscored_bound = 0,
                .logits = logits_.data(),
                .status = status_.data()};
    }

    template <typename Enqueue>
    std::vector<float> scored(Enqueue enqueue_scorer) {
        logits_.poison(0xFF);  // NaN
        enqueue_scorer();
        check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "the scorer");
        return logits_.download();
    }

    Cell cell_;
    const uint8_t* cache_;
    int rows_ = 0;
    int blocks_ = 0;
    int slices_ = 1;
    std::vector<int32_t> host_ends_;
    DeviceBuffer<int32_t> starts_, row_request_, ends_, table_, prefix_, drawn_;
    DeviceBuffer<uint8_t> query_, widened_query_;
    DeviceBuffer<float> weights_, widened_weights_, logits_;
    DeviceBuffer<ScorePiece> pieces_;
    DeviceBuffer<StepStatus> status_;
};

void measure(benchmark::State& state, const Cell& cell, const DeviceBuffer<uint8_t>& cache, Report& report) {
    Work work(cell, cache);
    const Difference difference = work.compare();
    Replays replays(work.launches(), [&](int i, cudaStream_t stream) { work.enqueue(i, stream); });
    const std::vector<double> times = times_of(state, replays);
    report.add({{"format", tools::format_name(cell.format)},
                {"requests", cell.requests},
                {"context", cell.context},
                {"rows_per_request", cell.rows_per_request == 0 ? nlohmann::ordered_json("ragged")
                                                                : nlohmann::ordered_json(cell.rows_per_request)},
                {"heads", cell.heads},
                {"key_bytes", work.key_bytes()},
                {"captured_context", cell.captured_context == 0 ? cell.context : cell.captured_context},
                {"cold", cell.cold},
                {"edges", cell.programmatic ? "programmatic" : "full"},
                {"checked", true},
                {"max_error", difference.largest_error},
                {"mismatches", difference.mismatches}},
               times);
    if (difference.mismatches != 0) {
        state.SkipWithError((std::to_string(difference.mismatches) + " logits are wrong").c_str());
    }
}

void print_table(const Report& report) {
    std::printf(
        "\nread ceiling %.2f TB/s; floor: key bytes at the ceiling; aim: 2.5 us + key bytes / 4.2 TB/s, of MXFP4 pages "
        "3.0 us + key bytes / 3.8 TB/s\n",
        report.ceiling_tb_s());
    std::printf("%14s %8s %8s %7s %6s %5s %13s %9s | %9s %9s %9s | %7s %7s %9s %6s\n", "format", "requests", "context",
                "rows", "heads", "", "edges", "captured", "us", "min", "max", "/floor", "/aim", "max error", "wrong");
    for (const auto& row : report.json()["rows"]) {
        const double us = row["us"];
        const double bytes = row["key_bytes"];
        const bool is_fp8 = row["format"] == "fp8" || row["format"] == "fp8_mx";
        const double aim = is_fp8 ? 2.5 + bytes / 4.2 * 1e-6 : 3.0 + bytes / 3.8 * 1e-6;
        std::printf("%14s %8d %8d %7s %6d %5s %13s %9d | %9.2f %9.2f %9.2f | %7.2f %7.3f %9.1e %6d\n",
                    row["format"].get<std::string>().c_str(), row["requests"].get<int>(), row["context"].get<int>(),
                    row["rows_per_request"].dump().c_str(), row["heads"].get<int>(),
                    row["cold"].get<bool>() ? "cold" : "hot", row["edges"].get<std::string>().c_str(),
                    row["captured_context"].get<int>(), us, row["us_min"].get<double>(), row["us_max"].get<double>(),
                    us / (bytes / report.ceiling_tb_s() * 1e-6), us / aim, row["max_error"].get<double>(),
                    row["mismatches"].get<int>());
    }
}

std::vector<Cell> core_cells() {
    std::vector<Cell> cells;
    for (const CacheFormat format : {CacheFormat::fp8, CacheFormat::mxfp4}) {
        for (const int requests : {1, 8, 32, 64, 128}) {
            for (const int context : {4096, 16384, 32768, 65536, 131072}) {
                cells.push_back({.format = format, .requests = requests, .context = context});
            }
        }
        for (const int rows : {2, 8}) {
            for (const auto& [requests, context] : {std::pair{1, 4096}, {8, 32768}, {32, 4096}, {32, 32768}, {64, 65536}}) {
                cells.push_back({.format = format, .requests = requests, .context = context, .rows_per_request = rows});
            }
        }
    }
    for (const auto& [requests, context] : {std::pair{1, 4096}, {8, 32768}, {32, 32768}, {64, 65536}}) {
        cells.push_back({.format = CacheFormat::mxfp4_rowgroup, .requests = requests, .context = context});
        cells.push_back({.format = CacheFormat::mxfp4, .requests = requests, .context = context, .heads = 64});
    }
    for (const int requests : {1, 32}) {
        for (const int captured : {8192, 1 << 20}) {
            cells.push_back({.requests = requests, .context = 4096, .captured_context = captured});
        }
    }
    return cells;
}

std::vector<Cell> all_cells() {
    std::vector<Cell> cells = core_cells();
    const auto add_grid = [&](CacheFormat format, int heads, bool cold, int rows) {
        for (const int requests : {1, 8, 32, 64, 128}) {
            for (const int context : {4096, 16384, 32768, 65536, 131072}) {
                cells.push_back({.format = format,
                                 .requests = requests,
                                 .context = context,
                                 .rows_per_request = rows,
                                 .heads = heads,
                                 .cold = cold});
            }
        }
    };
    for (const CacheFormat format : {CacheFormat::fp8, CacheFormat::mxfp4, CacheFormat::mxfp4_rowgroup}) {
        for (const int heads : {32, 64}) {
            for (const bool cold : {true, false}) {
                for (const int rows : {1, 2, 4, 7, 0}) {
                    add_grid(format, heads, cold, rows);
                }
            }
        }
    }
    for (const Cell& cell : std::vector<Cell>(cells.begin(), cells.begin() + 25)) {
        cells.push_back(cell);
        cells.back().programmatic = false;
    }
    return each_once(cells);
}

}  // namespace
}  // namespace stepgraph::bench

int main(int argc, char** argv) {
    using namespace stepgraph::bench;
    return run_program(
        argc, argv,
        {.description = "Times the scorer of Hopper.",
         .core =
             "The cells of bench/results: FP8 and MXFP4 pages, one row, some of two and eight rows, some of 64 heads, some "
             "captured for more; without it also 2, 4, 7 and ragged rows, hot, and full edges",
         .why_not =
             [] {
                 const std::string reason = stepgraph::tools::why_no_device();
                 return !reason.empty() || stepgraph::can_score_sm90(stepgraph::CacheFormat::fp8, nullptr, 16)
                            ? reason
                            : "it needs a Hopper GPU and code for sm_90a";
             },
         .run =
             [](Report& report, bool core) {
                 std::map<stepgraph::CacheFormat, DeviceBuffer<uint8_t>> caches;
                 for (const Cell& cell : core ? core_cells() : all_cells()) {
                     add_cell(cell.name(), [&, cell](benchmark::State& state) {
                         auto& cache = caches[cell.format];
                         if (cache.size() == 0) {
                             cache = random_cache(cell.format, cache_pages * page_bytes(cell.format));
                         }
                         measure(state, cell, cache, report);
                     });
                 }
                 benchmark::RunSpecifiedBenchmarks();
                 print_table(report);
             }});
}
