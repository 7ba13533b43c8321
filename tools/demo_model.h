// A small model to demonstrate the indexer on: random weights, activations and prompts, and host caches that say what each
// key should be.
#pragma once

#include <random>
#include <vector>

#include <cuda_bf16.h>

#include <stepgraph/kernels/reference/step.h>
#include <stepgraph/pipeline/geometry.h>

#include "serving_batch.h"

namespace stepgraph::tools {

struct DemoLayer {
    std::vector<__nv_bfloat16> wq_b, w_kv;
    std::vector<float> k_norm_weight, k_norm_bias;
    std::vector<__nv_bfloat16> q_c, hidden;  // of the present step, [max_rows, ...]
    std::vector<uint8_t> cache;              // as the reference keeps it
    std::vector<float> exact_keys;           // [pages * 64, 128] what was quantised into each slot, by arithmetic of its own
};

class DemoModel {
public:
    DemoModel(const Geometry& geometry, int layers, uint64_t seed);

    /// Writes the keys of a prompt to its pages in every layer.
    void prefill(const ServingBatch& batch, const ServingBatch::Arrival& arrival);
    void draw_activations();
    /// Notes what the key of each row of the step should be, from the packed rows [rows, projected_columns] of a layer.
    void note_keys(DemoLayer& layer, const std::vector<__nv_bfloat16>& projected, const std::vector<int64_t>& slots) const;
    /// Decodes the keys of all live requests of the batch. Returns an empty string or a sentence.
    [[nodiscard]] std::string check_cache(const DemoLayer& layer, const ServingBatch& batch) const;

    std::vector<DemoLayer> layers;

private:
    void note_key(DemoLayer& layer, const __nv_bfloat16* key, int64_t slot) const;

    Geometry geometry_;
    std::mt19937_64 random_;
};

}  // namespace stepgraph::tools
