// A model to serve in the demonstration and from traces: random weights, activations and prompts, and on the host what each
// key should be.
#pragma once

#include <random>
#include <vector>

#include <cuda_bf16.h>

#include <stepgraph/kernels/reference/step.h>
#include <stepgraph/pipeline/geometry.h>

#include "serving_batch.h"

namespace stepgraph::tools {

struct ServingLayer {
    std::vector<__nv_bfloat16> wq_b, w_kv;
    std::vector<float> k_norm_weight, k_norm_bias;
    std::vector<__nv_bfloat16> q_c, hidden;  // [activation_rows, ...], of which a step takes max_rows
    std::vector<uint8_t> cache;              // as the reference keeps it
    std::vector<float> exact_keys;           // [pages * 64, 128] what was quantised into each slot, by arithmetic of its own
};

/// A page of the pool that stands for a page of a prompt.
struct PromptPage {
    size_t layer;
    int32_t page;  // of the cache
    size_t drawn;  // of the pool
};

class ServingModel {
public:
    /// `follow_keys`: caches and exact keys are kept on the host from the first prompt on.
    ServingModel(const Geometry& geometry, int layers, bool follow_keys, uint64_t seed);

    /// Draws the pages of a prompt in every layer, and writes them where keys are followed.
    std::vector<PromptPage> prefill(const ServingBatch& batch, const ServingBatch::Arrival& arrival);
    /// Draws the row that the next step's activations begin at.
    void draw_activations();
    /// Notes what the key of each row of the step should be, from the packed rows [rows, projected_columns] of a layer.
    void note_keys(ServingLayer& layer, const std::vector<__nv_bfloat16>& projected,
                   const std::vector<int64_t>& slots) const;
    /// Decodes the keys of all live requests of the batch. Returns an empty string or a sentence.
    [[nodiscard]] std::string check_cache(const ServingLayer& layer, const ServingBatch& batch) const;

    [[nodiscard]] bool follows_keys() const { return follow_keys_; }
    [[nodiscard]] int64_t first_activation() const { return first_activation_; }
    /// The step's activations of a layer: [max_rows, q_lora_rank], [max_rows, hidden_size].
    [[nodiscard]] const __nv_bfloat16* q_c(const ServingLayer& layer) const {
        return layer.q_c.data() + first_activation_ * geometry_.q_lora_rank;
    }
    [[nodiscard]] const __nv_bfloat16* hidden(const ServingLayer& layer) const {
        return layer.hidden.data() + first_activation_ * geometry_.hidden_size;
    }
    /// [pages of the pool, page_stride_bytes]
    [[nodiscard]] const std::vector<uint8_t>& prompt_pool() const { return prompt_pool_; }

    std::vector<ServingLayer> layers;

private:
    void draw_layer(ServingLayer& layer);
    void draw_prompt_pool();
    void write(const PromptPage& page);

    Geometry geometry_;
    bool follow_keys_;
    std::mt19937_64 random_;
    int64_t first_activation_ = 0;
    std::vector<uint8_t> prompt_pool_;
    std::vector<float> prompt_keys_;  // [pages of the pool, 64, 128] what was quantised into it
};

}  // namespace stepgraph::tools
