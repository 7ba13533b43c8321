// What the projections cost: graphs of launches, replayed; each cell checked against exact products in the same run.
//
// Cold: launches rotate over weights that together are far larger than the L2. Alone: launches back to back. Added: what a
// launch adds to a chain of kernels that fill their multiprocessors and read 20 MB, as select does behind the scorer, chain
// with it minus chain without it. Beside it cuBLASLt, both products one behind the other, by the algorithm that it proposes
// first for these rows.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <cublasLt.h>

#include <stepgraph/kernels/project_sm90.h>
#include <stepgraph/layouts/number_formats.h>
#include <stepgraph/tools/cuda_device.h>
#include <stepgraph/tools/device_buffer.h>

#include "predecessor.h"
#include "program.h"

namespace stepgraph::bench {
namespace {

using tools::DeviceBuffer;

constexpr size_t cold_bytes = size_t{300} << 20U;  // of weights that launches rotate over
constexpr int chain_launches = 40;
constexpr int most_rows = 256;

struct Shape {
    const char* name;
    int hidden_size;
    int q_lora_rank;
    int heads;

    [[nodiscard]] int query_columns() const { return heads * 128; }
    [[nodiscard]] int packed_columns() const { return 128 + heads; }
    [[nodiscard]] size_t weights() const {
        return size_t{1} * static_cast<size_t>(query_columns()) * static_cast<size_t>(q_lora_rank) +
               static_cast<size_t>(packed_columns()) * static_cast<size_t>(hidden_size);
    }
};

constexpr Shape shapes[] = {{"k3", 7168, 1536, 32}, {"v32", 7168, 1536, 64}, {"glm5", 6144, 2048, 32}};

enum class By { stepgraph, cublaslt };

struct Cell {
    Shape shape = shapes[0];
    int rows = 1;
    By by = By::stepgraph;
    bool added = false;  // to a chain; else alone
    bool programmatic = true;

    [[nodiscard]] std::string name() const {
        return std::string("project/") + shape.name + "/rows:" + std::to_string(rows) +
               (by == By::stepgraph ? "/stepgraph" : "/cublaslt") + (added ? "/added" : "/alone") +
               (programmatic ? "/programmatic" : "/full");
    }
};

void check_cublas(cublasStatus_t status, const char* call) {
    if (status != CUBLAS_STATUS_SUCCESS) {
        throw Error(ErrorCode::cublas, std::string(call) + " failed: " + cublasLtGetStatusString(status));
    }
}

/// One product by cuBLASLt, free to split the depth.
class Competitor {
public:
    Competitor(int columns, int depth, int rows) {
        check_cublas(cublasLtCreate(&handle_), "cublasLtCreate");
        check_cublas(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
        const cublasOperation_t transposed = CUBLAS_OP_T;
        check_cublas(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
                     "cublasLtMatmulDescSetAttribute");
        const auto layout = [](cublasLtMatrixLayout_t& to, int inner, int outer) {
            check_cublas(cublasLtMatrixLayoutCreate(&to, CUDA_R_16BF, static_cast<uint64_t>(inner),
                                                    static_cast<uint64_t>(outer), inner),
                         "cublasLtMatrixLayoutCreate");
        };
        layout(w_, depth, columns);
        layout(x_, depth, rows);
        layout(out_, columns, rows);
        cublasLtMatmulPreference_t preference = nullptr;
        check_cublas(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
        const uint64_t bytes = workspace_.size();
        check_cublas(
            cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes),
            "cublasLtMatmulPreferenceSetAttribute");
        cublasLtMatmulHeuristicResult_t result{};
        int found = 0;
        check_cublas(cublasLtMatmulAlgoGetHeuristic(handle_, operation_, w_, x_, out_, out_, preference, 1, &result, &found),
                     "cublasLtMatmulAlgoGetHeuristic");
        cublasLtMatmulPreferenceDestroy(preference);
        algorithm_ = result.algo;
    }
    ~Competitor() {
        for (cublasLtMatrixLayout_t layout : {w_, x_, out_}) {
            cublasLtMatrixLayoutDestroy(layout);
        }
        cublasLtMatmulDescDestroy(operation_);
        cublasLtDestroy(handle_);
    }
    Competitor(const Competitor&) = delete;
    Competitor& operator=(const Competitor&) = delete;

    void enqueue(const ProjectProduct& product, cudaStream_t stream) const {
        const float one = 1.0F;
        const float zero = 0.0F;
        check_cublas(cublasLtMatmul(handle_, operation_, &one, product.w, w_, product.x, x_, &zero, product.out, out_,
                                    product.out, out_, &algorithm_, workspace_.data(), workspace_.size(), stream),
                     "cublasLtMatmul");
    }

private:
    cublasLtHandle_t handle_ = nullptr;
    cublasLtMatmulDesc_t operation_ = nullptr;
    cublasLtMatrixLayout_t w_ = nullptr, x_ = nullptr, out_ = nullptr;
    cublasLtMatmulAlgo_t algorithm_{};
    DeviceBuffer<uint8_t> workspace_{size_t{32} << 20U};
};

/// Operands of a shape: one set of activations, and as many of weights as make the launches cold.
class Operands {
public:
    explicit Operands(const Shape& shape)
        : shape_(shape),
          sets_(static_cast<int>(cold_bytes / (shape.weights() * 2) + 2)),
          hidden_(draw(static_cast<size_t>(most_rows) * static_cast<size_t>(shape.hidden_size))),
          q_c_(draw(static_cast<size_t>(most_rows) * static_cast<size_t>(shape.q_lora_rank))),
          w_kv_(draw(static_cast<size_t>(shape.packed_columns()) * static_cast<size_t>(shape.hidden_size))),
          wq_b_(draw(static_cast<size_t>(shape.query_columns()) * static_cast<size_t>(shape.q_lora_rank))),
          device_hidden_(hidden_),
          device_q_c_(q_c_),
          device_w_kv_(static_cast<size_t>(sets_) * w_kv_.size()),
          device_wq_b_(static_cast<size_t>(sets_) * wq_b_.size()),
          projected_(static_cast<size_t>(most_rows * shape.packed_columns())),
          iq_(static_cast<size_t>(most_rows) * static_cast<size_t>(shape.query_columns())) {
        for (int set = 0; set < sets_; ++set) {
            copy(device_w_kv_.data() + static_cast<size_t>(set) * w_kv_.size(), w_kv_);
            copy(device_wq_b_.data() + static_cast<size_t>(set) * wq_b_.size(), wq_b_);
        }
    }

    [[nodiscard]] int sets() const { return sets_; }

    [[nodiscard]] ProjectArgs args(int set, int rows) const {
        const auto at = static_cast<size_t>(set % sets_);
        return {{{device_hidden_.data(), device_w_kv_.data() + at * w_kv_.size(), projected_.data(), shape_.packed_columns(),
                  shape_.hidden_size},
                 {device_q_c_.data(), device_wq_b_.data() + at * wq_b_.size(), iq_.data(), shape_.query_columns(),
                  shape_.q_lora_rank}},
                rows};
    }

    void poison() {
        projected_.poison(0xFF);  // NaN
        iq_.poison(0xFF);
    }

    struct Difference {
        double largest_error = 0;  // of a row's largest
        int64_t mismatches = 0;    // beyond BF16 rounding plus 1e-3 of a row's largest
    };

    /// Of the first and the last of `rows` rows.
    [[nodiscard]] Difference compare(int rows) const {
        Difference difference;
        for (const int row : {0, rows - 1}) {
            compare_row(difference, row, projected_.download(), hidden_, w_kv_, shape_.packed_columns(), shape_.hidden_size);
            compare_row(difference, row, iq_.download(), q_c_, wq_b_, shape_.query_columns(), shape_.q_lora_rank);
        }
        return difference;
    }

private:
    static std::vector<__nv_bfloat16> draw(size_t count) {
        std::mt19937_64 random{std::random_device{}()};
        std::normal_distribution<float> normal;
        std::vector<__nv_bfloat16> values(count);
        std::generate(values.begin(), values.end(), [&] { return bf16_from_float(normal(random)); });
        return values;
    }
    static void copy(__nv_bfloat16* to, const std::vector<__nv_bfloat16>& from) {
        check_cuda(cudaMemcpy(to, from.data(), from.size() * sizeof(__nv_bfloat16), cudaMemcpyHostToDevice), "cudaMemcpy");
    }
    static void compare_row(Difference& difference, int row, const std::vector<__nv_bfloat16>& actual,
                            const std::vector<__nv_bfloat16>& x, const std::vector<__nv_bfloat16>& w, int columns,
                            int depth) {
        std::vector<double> exact(static_cast<size_t>(columns));
        double largest = 0;
        for (int n = 0; n < columns; ++n) {
            double sum = 0;
            for (int k = 0; k < depth; ++k) {
                sum +=
                    double{
                        float_from_bf16(x[static_cast<size_t>(row) * static_cast<size_t>(depth) + static_cast<size_t>(k)])} *
                    double{float_from_bf16(w[static_cast<size_t>(n) * static_cast<size_t>(depth) + static_cast<size_t>(k)])};
            }
            exact[static_cast<size_t>(n)] = sum;
            largest = std::max(largest, std::abs(sum));
        }
        for (int n = 0; n < columns; ++n) {
            const double want = exact[static_cast<size_t>(n)];
            const double error = std::abs(
                float_from_bf16(actual[static_cast<size_t>(row) * static_cast<size_t>(columns) + static_cast<size_t>(n)]) -
                want);
            difference.largest_error = std::max(difference.largest_error, error / largest);
            difference.mismatches += error <= std::abs(want) / 256 + 1e-3 * largest ? 0 : 1;  // NaN is wrong
        }
    }

    Shape shape_;
    int sets_;
    std::vector<__nv_bfloat16> hidden_, q_c_, w_kv_, wq_b_;
    DeviceBuffer<__nv_bfloat16> device_hidden_, device_q_c_, device_w_kv_, device_wq_b_, projected_, iq_;
};

/// Both products of a cell.
class Pair {
public:
    Pair(const Cell& cell, const Operands& operands) : cell_(cell), operands_(operands) {
        if (cell.by == By::cublaslt) {
            packed_ = std::make_unique<Competitor>(cell.shape.packed_columns(), cell.shape.hidden_size, cell.rows);
            query_ = std::make_unique<Competitor>(cell.shape.query_columns(), cell.shape.q_lora_rank, cell.rows);
        } else {
            prepare_project_sm90(operands.args(0, cell.rows));
        }
    }

    void enqueue(int i, cudaStream_t stream) const {
        const ProjectArgs args = operands_.args(i, cell_.rows);
        if (cell_.by == By::cublaslt) {
            packed_->enqueue(args.products[0], stream);
            query_->enqueue(args.products[1], stream);
        } else {
            project_sm90(args, {stream, cell_.programmatic});
        }
    }

private:
    Cell cell_;
    const Operands& operands_;
    std::unique_ptr<Competitor> packed_, query_;
};

void measure(benchmark::State& state, const Cell& cell, Operands& operands, Report& report) {
    const Pair pair(cell, operands);
    operands.poison();
    pair.enqueue(0, cudaStreamPerThread);
    check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "the projections");
    const Operands::Difference difference = operands.compare(cell.rows);

    std::vector<double> times;
    if (cell.added) {
        const Predecessor predecessor;
        Replays without(chain_launches, [&](int, cudaStream_t stream) { predecessor.enqueue({stream, cell.programmatic}); });
        Replays with(chain_launches, [&](int i, cudaStream_t stream) {
            predecessor.enqueue({stream, cell.programmatic});
            pair.enqueue(i, stream);
        });
        times = times_of(state, with);
        const double before = without.time_us();
        std::for_each(times.begin(), times.end(), [before](double& time) { time -= before; });
    } else {
        Replays replays(operands.sets(), [&](int i, cudaStream_t stream) { pair.enqueue(i, stream); });
        times = times_of(state, replays);
    }
    report.add({{"shape", cell.shape.name},
                {"rows", cell.rows},
                {"against", cell.by == By::stepgraph ? "stepgraph" : "cublaslt"},
                {"added", cell.added},
                {"weight_bytes", cell.shape.weights() * 2},
                {"cold", true},
                {"edges", cell.programmatic ? "programmatic" : "full"},
                {"checked", true},
                {"max_error", difference.largest_error},
                {"mismatches", difference.mismatches}},
               times);
    if (difference.mismatches != 0) {
        state.SkipWithError((std::to_string(difference.mismatches) + " outputs are wrong").c_str());
    }
}

void print_table(const Report& report) {
    std::printf("\nread ceiling %.2f TB/s; floor: the weights' bytes at the ceiling\n", report.ceiling_tb_s());
    std::printf("%6s %5s %10s %6s %13s | %9s %9s %9s | %7s %9s %6s\n", "shape", "rows", "by", "", "edges", "us", "min",
                "max", "/floor", "max error", "wrong");
    for (const auto& row : report.json()["rows"]) {
        const double us = row["us"];
        std::printf("%6s %5d %10s %6s %13s | %9.2f %9.2f %9.2f | %7.2f %9.1e %6d\n", row["shape"].get<std::string>().c_str(),
                    row["rows"].get<int>(), row["against"].get<std::string>().c_str(),
                    row["added"].get<bool>() ? "added" : "alone", row["edges"].get<std::string>().c_str(), us,
                    row["us_min"].get<double>(), row["us_max"].get<double>(),
                    us / (row["weight_bytes"].get<double>() / report.ceiling_tb_s() * 1e-6), row["max_error"].get<double>(),
                    row["mismatches"].get<int>());
    }
}

/// Of one shape: one set of operands is held at a time.
std::vector<Cell> cells_of(const Shape& shape, bool core) {
    std::vector<Cell> cells;
    for (const int rows : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
        for (const bool added : {false, true}) {
            cells.push_back({.shape = shape, .rows = rows, .added = added});
            if (!core) {
                cells.push_back({.shape = shape, .rows = rows, .added = added, .programmatic = false});
            }
        }
        // Into cuBLASLt's kernels every edge is full.
        cells.push_back({.shape = shape, .rows = rows, .by = By::cublaslt, .programmatic = false});
        if (!core) {
            cells.push_back({.shape = shape, .rows = rows, .by = By::cublaslt, .added = true, .programmatic = false});
        }
    }
    return cells;
}

}  // namespace
}  // namespace stepgraph::bench

int main(int argc, char** argv) {
    using namespace stepgraph::bench;
    return run_program(argc, argv,
                       {.description = "Times both projections of a layer.",
                        .core = "The cells of bench/results: the shape of K3, alone and added to a chain, beside cuBLASLt "
                                "alone; without it also "
                                "those of DeepSeek V3.2 and GLM-5, full edges, and cuBLASLt in the chain",
                        .why_not =
                            [] {
                                const std::string reason = stepgraph::tools::why_no_device();
                                return !reason.empty() || stepgraph::can_project_sm90(7168, 1536)
                                           ? reason
                                           : "it needs a Hopper GPU and code for it";
                            },
                        .run =
                            [](Report& report, bool core) {
                                std::string held;
                                std::unique_ptr<Operands> operands;
                                for (const Shape& shape : shapes) {
                                    if (core && &shape != shapes) {
                                        break;
                                    }
                                    for (const Cell& cell : cells_of(shape, core)) {
                                        add_cell(cell.name(), [&, cell](benchmark::State& state) {
                                            if (held != cell.shape.name) {
                                                operands = nullptr;  // two shapes at once are not needed
                                                operands = std::make_unique<Operands>(cell.shape);
                                                held = cell.shape.name;
                                            }
                                            measure(state, cell, *operands, report);
                                        });
                                    }
                                }
                                benchmark::RunSpecifiedBenchmarks();
                                print_table(report);
                            }});
}
