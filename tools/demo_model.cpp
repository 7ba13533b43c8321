#include "demo_model.h"

#include <string>

#include <stepgraph/kernels/reference/index_inputs.h>

#include "step_checks.h"

namespace stepgraph::tools {
namespace {

std::vector<__nv_bfloat16> normal_bf16(int64_t n, float deviation, std::mt19937_64& random) {
    std::normal_distribution<float> normal(0.0F, deviation);
    std::vector<__nv_bfloat16> values(static_cast<size_t>(n));
    for (auto& value : values) {
        value = bf16_from_float(normal(random));
    }
    return values;
}

}  // namespace

DemoModel::DemoModel(const Geometry& geometry, int layer_count, uint64_t seed)
    : layers(static_cast<size_t>(layer_count)), geometry_(geometry), random_(seed) {
    std::normal_distribution<float> normal;
    for (DemoLayer& layer : layers) {
        layer.wq_b = normal_bf16(int64_t{geometry.heads} * head_dim * geometry.q_lora_rank, 0.1F, random_);
        layer.w_kv = normal_bf16(int64_t{geometry.projected_columns} * geometry.hidden_size, 0.1F, random_);
        for (int c = 0; c < head_dim; ++c) {
            layer.k_norm_weight.push_back(1.0F + 0.1F * normal(random_));
            layer.k_norm_bias.push_back(0.1F * normal(random_));
        }
        layer.cache.assign(static_cast<size_t>(geometry.pages * geometry.page_stride_bytes), 0);
        layer.exact_keys.assign(static_cast<size_t>(geometry.pages * page_tokens * head_dim), 0.0F);
    }
}

void DemoModel::prefill(const ServingBatch& batch, const ServingBatch::Arrival& arrival) {
    for (DemoLayer& layer : layers) {
        const auto keys = normal_bf16(int64_t{arrival.prompt_tokens} * head_dim, 1.0F, random_);
        for (int position = 0; position < arrival.prompt_tokens; ++position) {
            const __nv_bfloat16* key = keys.data() + int64_t{position} * head_dim;
            const int64_t slot = batch.slot(arrival.request, position);
            float normed[head_dim];
            reference::normalised_key(key, layer.k_norm_weight.data(), layer.k_norm_bias.data(), geometry_.k_norm_eps,
                                      normed);
            reference::store_key(geometry_.cache_format, normed,
                                 page_address(layer.cache.data(), slot / page_tokens, geometry_.page_stride_bytes),
                                 static_cast<int>(slot % page_tokens));
            note_key(layer, key, slot);
        }
    }
}

void DemoModel::draw_activations() {
    for (DemoLayer& layer : layers) {
        layer.q_c = normal_bf16(int64_t{geometry_.max_rows} * geometry_.q_lora_rank, 1.0F, random_);
        layer.hidden = normal_bf16(int64_t{geometry_.max_rows} * geometry_.hidden_size, 1.0F, random_);
    }
}

void DemoModel::note_key(DemoLayer& layer, const __nv_bfloat16* key, int64_t slot) const {
    std::vector<double> x(head_dim);
    for (size_t c = 0; c < head_dim; ++c) {
        x[c] = float_from_bf16(key[c]);
    }
    const auto exact = exact_key(x, layer.k_norm_weight, layer.k_norm_bias, double{geometry_.k_norm_eps});
    for (size_t c = 0; c < head_dim; ++c) {
        layer.exact_keys[static_cast<size_t>(slot) * head_dim + c] = static_cast<float>(exact[c]);
    }
}

void DemoModel::note_keys(DemoLayer& layer, const std::vector<__nv_bfloat16>& projected,
                          const std::vector<int64_t>& slots) const {
    for (size_t row = 0; row < slots.size(); ++row) {
        if (slots[row] >= 0) {
            const auto columns = static_cast<size_t>(geometry_.projected_columns);
            note_key(layer, projected.data() + row * columns + static_cast<size_t>(geometry_.key_column), slots[row]);
        }
    }
}

std::string DemoModel::check_cache(const DemoLayer& layer, const ServingBatch& batch) const {
    for (int request = 0; request < batch.live(); ++request) {
        for (int position = 0; position < batch.seq_lens[static_cast<size_t>(request)]; ++position) {
            const int64_t slot = batch.slot(request, position);
            const auto first = layer.exact_keys.begin() + slot * head_dim;
            const std::string wrong = check_key(geometry_, layer.cache, slot, {first, first + head_dim});
            if (!wrong.empty()) {
                return "request " + std::to_string(request) + ", position " + std::to_string(position) + ": " + wrong;
            }
        }
    }
    return {};
}

}  // namespace stepgraph::tools
