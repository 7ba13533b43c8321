// Random steps for the GPU tests: inputs on the host, and what the reference makes of them.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include <cuda_bf16.h>

#include <stepgraph/kernels/reference/step.h>
#include <stepgraph/pipeline/geometry.h>

namespace stepgraph::test {

using Random = std::mt19937_64;

/// A generator with a fresh seed, which it prints.
Random fresh_random();

struct LayerCase {
    std::vector<__nv_bfloat16> q_c, hidden, wq_b, w_kv;  // empty where the engine projects
    std::vector<__nv_bfloat16> iq, projected;            // empty where the geometry does
    std::vector<float> k_norm_weight, k_norm_bias;
    std::vector<uint8_t> cache;
};

/// One step of a pipeline: as many rows as the geometry's max_rows, some of them padding.
struct StepCase {
    Geometry geometry;  // validated
    std::vector<int32_t> seq_lens, query_lens, block_table;
    std::vector<int32_t> num_requests;  // empty: all are live
    std::vector<int64_t> slots;         // empty: derived
    std::vector<LayerCase> layers;

    /// Draws lengths with their ragged rows, at most `rows` of them, and a table whose unused entries are garbage. Requests
    /// keep their pages, so that caches carry over from step to step.
    void draw_lengths(Random& random, int rows);
    /// Draws the activations of every layer.
    void draw_activations(Random& random);
    /// Sets every request to `seq_len` tokens and `query_len` rows.
    void set_lengths(int32_t seq_len, int32_t query_len);
    void set_table();  ///< writes the pages that the lengths need, and garbage behind them

    std::vector<int32_t> pages_of_request;  // [max_requests, columns] fixed distinct pages
};

struct CaseOptions {
    CacheFormat format = CacheFormat::fp8;
    int heads = 16;
    int top_k = 64;
    int max_rows = 8;
    int max_requests = 5;
    int columns = 8;
    int layers = 1;
    bool project = false;
    int hidden_size = 192;           // where projected here
    int64_t extra_stride_bytes = 0;  // beyond the page's own bytes
    int projected_columns = 0;       // 0: key and weights alone
    int key_column = 0;
    int weight_column = head_dim;
    ContextParallel dcp{};
};

StepCase make_case(const CaseOptions& options, Random& random);

/// The whole step of `rows` rows on the host; the caches of `step` are updated as the device updates its own.
struct ExpectedStep {
    reference::Layout layout;
    std::vector<reference::LayerOutputs> layers;
    StepStatus status;
};
ExpectedStep expected_step(StepCase& step, int rows, bool all_logits);

reference::StepInputs inputs_of(const StepCase& step);
reference::LayerInputs inputs_of(LayerCase& layer);

}  // namespace stepgraph::test
