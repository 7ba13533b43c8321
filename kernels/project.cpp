#include "project.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include <cublasLt.h>

namespace stepgraph {
namespace {

void check_cublas(cublasStatus_t result, const char* call) {
    if (result != CUBLAS_STATUS_SUCCESS) {
        throw Error(ErrorCode::cublas, std::string(call) + " failed: " + cublasLtGetStatusString(result));
    }
}

/// Owns a cuBLASLt object of handle type T.
template <typename T, cublasStatus_t (*destroy)(T)>
struct Destroy {
    using pointer = T;
    void operator()(T object) const { destroy(object); }
};
using Handle = std::unique_ptr<cublasLtContext, Destroy<cublasLtHandle_t, cublasLtDestroy>>;
using Operation = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>>;
using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>>;
using Preference =
    std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>>;

Layout make_layout(int64_t rows, int64_t columns) {
    cublasLtMatrixLayout_t layout = nullptr;
    check_cublas(
        cublasLtMatrixLayoutCreate(&layout, CUDA_R_16BF, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), rows),
        "cublasLtMatrixLayoutCreate");
    return Layout(layout);
}

/// A stream of this process alone, in capture until it is asked what it captured.
class TrialCapture {
public:
    TrialCapture() {
        check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        const cudaError_t begun = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed);
        if (begun != cudaSuccess) {
            cudaStreamDestroy(stream_);
            check_cuda(begun, "cudaStreamBeginCapture");
        }
    }
    ~TrialCapture() {
        end();
        if (graph_ != nullptr) {
            cudaGraphDestroy(graph_);
        }
        cudaStreamDestroy(stream_);
    }
    TrialCapture(const TrialCapture&) = delete;
    TrialCapture& operator=(const TrialCapture&) = delete;

    [[nodiscard]] cudaStream_t stream() const { return stream_; }

    /// Whether what was captured is one kernel.
    bool ends_as_one_kernel() {
        end();
        size_t nodes = 0;
        cudaGraphNodeType type{};
        cudaGraphNode_t node{};
        if (graph_ == nullptr || cudaGraphGetNodes(graph_, nullptr, &nodes) != cudaSuccess || nodes != 1) {
            return false;
        }
        return cudaGraphGetNodes(graph_, &node, &nodes) == cudaSuccess && cudaGraphNodeGetType(node, &type) == cudaSuccess &&
               type == cudaGraphNodeTypeKernel;
    }

private:
    void end() {
        if (capturing_) {
            capturing_ = false;
            cudaStreamEndCapture(stream_, &graph_);  // no graph where it failed
        }
    }

    cudaStream_t stream_ = nullptr;
    cudaGraph_t graph_ = nullptr;
    bool capturing_ = true;
};

struct Plan {
    int rows;
    Layout x;
    Layout out;
};

}  // namespace

struct Product::State {
    ProductShape shape;
    Handle handle;
    Operation operation;
    Layout w;
    std::vector<Plan> plans;  // by ascending rows
    cublasLtMatmulAlgo_t algorithm{};

    State(ProductShape s, int max_rows);
    void choose_algorithm();
    [[nodiscard]] bool is_one_kernel_everywhere() const;
    cublasStatus_t matmul(const Plan& plan, const void* x, const void* weights, void* out, void* workspace,
                          cudaStream_t stream) const;
};

Product::State::State(ProductShape s, int max_rows) : shape(s) {
    cublasLtHandle_t raw_handle = nullptr;
    check_cublas(cublasLtCreate(&raw_handle), "cublasLtCreate");
    handle.reset(raw_handle);

    cublasLtMatmulDesc_t raw_operation = nullptr;
    check_cublas(cublasLtMatmulDescCreate(&raw_operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    operation.reset(raw_operation);
    // cuBLASLt is column-major: row-major out[rows, columns] is its [columns, rows] = w^T x, w stored as [depth, columns].
    const cublasOperation_t transposed = CUBLAS_OP_T;
    check_cublas(cublasLtMatmulDescSetAttribute(raw_operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
                 "cublasLtMatmulDescSetAttribute");
    w = make_layout(shape.depth, shape.columns);

    for (int rows = 1; rows < max_rows; rows *= 2) {
        plans.push_back({rows, make_layout(shape.depth, rows), make_layout(shape.columns, rows)});
    }
    plans.push_back({max_rows, make_layout(shape.depth, max_rows), make_layout(shape.columns, max_rows)});
    choose_algorithm();
}

void Product::State::choose_algorithm() {
    cublasLtMatmulPreference_t raw = nullptr;
    check_cublas(cublasLtMatmulPreferenceCreate(&raw), "cublasLtMatmulPreferenceCreate");
    const Preference preference(raw);
    const auto set = [raw](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
        check_cublas(cublasLtMatmulPreferenceSetAttribute(raw, attribute, &value, sizeof value),
                     "cublasLtMatmulPreferenceSetAttribute");
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{product_workspace_bytes});
    // No split of the depth that a second kernel adds up: a product is one node of the graph.
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE});
    for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                 CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
        set(attribute, uint32_t{16});
    }

    const Plan& largest = plans.back();
    std::array<cublasLtMatmulHeuristicResult_t, 16> candidates{};
    int found = 0;
    check_cublas(cublasLtMatmulAlgoGetHeuristic(handle.get(), operation.get(), w.get(), largest.x.get(), largest.out.get(),
                                                largest.out.get(), preference.get(), static_cast<int>(candidates.size()),
                                                candidates.data(), &found),
                 "cublasLtMatmulAlgoGetHeuristic");
    for (int i = 0; i < found; ++i) {
        algorithm = candidates[static_cast<size_t>(i)].algo;
        if (is_one_kernel_everywhere()) {
            return;
        }
    }
    throw Error(ErrorCode::cublas, "cuBLASLt has no single-kernel algorithm for 1 to " + std::to_string(largest.rows) +
                                       " rows of " + std::to_string(shape.columns) + " columns and depth " +
                                       std::to_string(shape.depth));
}

bool Product::State::is_one_kernel_everywhere() const {
    // A trial launches nothing: the addresses only have to look like aligned ones.
    void* const aligned = reinterpret_cast<void*>(uintptr_t{1} << 20U);
    return std::all_of(plans.begin(), plans.end(), [this, aligned](const Plan& plan) {
        TrialCapture trial;
        const cublasStatus_t status = matmul(plan, aligned, aligned, aligned, aligned, trial.stream());
        return trial.ends_as_one_kernel() && status == CUBLAS_STATUS_SUCCESS;
    });
}

cublasStatus_t Product::State::matmul(const Plan& plan, const void* x, const void* weights, void* out, void* workspace,
                                      cudaStream_t stream) const {
    const float one = 1.0F;
    const float zero = 0.0F;
    return cublasLtMatmul(handle.get(), operation.get(), &one, weights, w.get(), x, plan.x.get(), &zero, out, plan.out.get(),
                          out, plan.out.get(), &algorithm, workspace, product_workspace_bytes, stream);
}

Product::Product(ProductShape shape, int max_rows) {
    const KeepLastError kept;  // cuBLASLt leaves errors of its own probing behind
    state_ = std::make_unique<State>(shape, max_rows);
}
Product::~Product() = default;
Product::Product(Product&&) noexcept = default;
Product& Product::operator=(Product&&) noexcept = default;

void Product::enqueue(const __nv_bfloat16* x, const __nv_bfloat16* w, __nv_bfloat16* out, int rows, void* workspace,
                      cudaStream_t stream) const {
    const KeepLastError kept;
    const auto plan =
        std::find_if(state_->plans.begin(), state_->plans.end(), [rows](const Plan& p) { return p.rows >= rows; });
    check_cublas(state_->matmul(*plan, x, w, out, workspace, stream), "cublasLtMatmul");
}

}  // namespace stepgraph
