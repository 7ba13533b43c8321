#include "serving_model.h"

#include <algorithm>
#include <cmath>
#include <string>

#include <stepgraph/kernels/reference/index_inputs.h>

#include "step_checks.h"

namespace stepgraph::tools {
namespace {

constexpr size_t pool_pages = 64;
constexpr int spare_activation_rows = 256;
constexpr size_t page_keys = size_t{page_tokens} * head_dim;  // numbers in a page

std::vector<__nv_bfloat16> normal_bf16(int64_t n, float deviation, std::mt19937_64& random) {
    std::normal_distribution<float> normal(0.0F, deviation);
    std::vector<__nv_bfloat16> values(static_cast<size_t>(n));
    for (auto& value : values) {
        value = bf16_from_float(normal(random));
    }
    return values;
}

}  // namespace

ServingModel::ServingModel(const Geometry& geometry, int layer_count, bool follow_keys, uint64_t seed)
    : layers(static_cast<size_t>(layer_count)), geometry_(geometry), follow_keys_(follow_keys), random_(seed) {
    draw_prompt_pool();
    std::for_each(layers.begin(), layers.end(), [this](ServingLayer& layer) { draw_layer(layer); });
}

void ServingModel::draw_layer(ServingLayer& layer) {
    const auto weights = [this](int64_t outputs, int depth) {  // of products around one
        return normal_bf16(outputs * depth, 1.0F / std::sqrt(static_cast<float>(depth)), random_);
    };
    layer.wq_b = weights(int64_t{geometry_.heads} * head_dim, geometry_.q_lora_rank);
    layer.w_kv = weights(geometry_.projected_columns, geometry_.hidden_size);
    std::normal_distribution<float> normal;
    for (int c = 0; c < head_dim; ++c) {
        layer.k_norm_weight.push_back(1.0F + 0.1F * normal(random_));
        layer.k_norm_bias.push_back(0.1F * normal(random_));
    }
    const int64_t rows = geometry_.max_rows + spare_activation_rows;
    layer.q_c = normal_bf16(rows * geometry_.q_lora_rank, 1.0F, random_);
    layer.hidden = normal_bf16(rows * geometry_.hidden_size, 1.0F, random_);
    if (follow_keys_) {
        layer.cache.assign(static_cast<size_t>(geometry_.pages * geometry_.page_stride_bytes), 0);
        layer.exact_keys.assign(static_cast<size_t>(geometry_.pages) * page_keys, 0.0F);
    }
}

void ServingModel::draw_prompt_pool() {
    const auto stride = static_cast<size_t>(geometry_.page_stride_bytes);
    prompt_pool_.assign(pool_pages * stride, 0);
    for (const __nv_bfloat16 number : normal_bf16(static_cast<int64_t>(pool_pages * page_keys), 1.0F, random_)) {
        prompt_keys_.push_back(float_from_bf16(number));
    }
    for (size_t page = 0; page < pool_pages; ++page) {
        for (int token = 0; token < page_tokens; ++token) {
            reference::store_key(geometry_.cache_format, prompt_keys_.data() + page * page_keys + token * head_dim,
                                 prompt_pool_.data() + page * stride, token);
        }
    }
}

std::vector<PromptPage> ServingModel::prefill(const ServingBatch& batch, const ServingBatch::Arrival& arrival) {
    std::vector<PromptPage> prompt;
    for (size_t layer = 0; layer < layers.size(); ++layer) {
        for (const int32_t page :
             batch.pages(arrival.request).first(static_cast<size_t>(pages_for(arrival.prompt_tokens)))) {
            prompt.push_back({layer, page, random_() % pool_pages});
        }
    }
    if (follow_keys_) {
        std::for_each(prompt.begin(), prompt.end(), [this](const PromptPage& page) { write(page); });
    }
    return prompt;
}

void ServingModel::write(const PromptPage& page) {
    ServingLayer& layer = layers[page.layer];
    const auto stride = static_cast<size_t>(geometry_.page_stride_bytes);
    std::copy_n(prompt_pool_.data() + page.drawn * stride, stride,
                page_address(layer.cache.data(), page.page, geometry_.page_stride_bytes));
    std::copy_n(prompt_keys_.data() + page.drawn * page_keys, page_keys,
                layer.exact_keys.data() + static_cast<size_t>(page.page) * page_keys);
}

void ServingModel::draw_activations() {
    first_activation_ = static_cast<int64_t>(random_() % (spare_activation_rows + 1));
}

void ServingModel::note_keys(ServingLayer& layer, const std::vector<__nv_bfloat16>& projected,
                             const std::vector<int64_t>& slots) const {
    for (size_t row = 0; row < slots.size(); ++row) {
        if (slots[row] < 0) {
            continue;
        }
        const __nv_bfloat16* key =
            projected.data() + row * static_cast<size_t>(geometry_.projected_columns) + geometry_.key_column;
        std::vector<double> x(head_dim);
        std::transform(key, key + head_dim, x.begin(), [](__nv_bfloat16 value) { return double{float_from_bf16(value)}; });
        const auto exact = exact_key(x, layer.k_norm_weight, layer.k_norm_bias, double{geometry_.k_norm_eps});
        std::transform(exact.begin(), exact.end(), layer.exact_keys.begin() + slots[row] * head_dim,
                       [](double value) { return static_cast<float>(value); });
    }
}

std::string ServingModel::check_cache(const ServingLayer& layer, const ServingBatch& batch) const {
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
