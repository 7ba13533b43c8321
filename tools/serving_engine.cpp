#include "serving_engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>
#include <vector>

#include <stepgraph/kernels/reference/project.h>

#include "cuda_device.h"
#include "reference_shape.h"
#include "step_checks.h"

namespace stepgraph::tools {
namespace {

constexpr const char* skipped = "data was skipped that is right";

reference::StepInputs step_inputs(const ServingBatch& batch) {
    return {.seq_lens = batch.seq_lens.data(),
            .query_lens = batch.query_lens.data(),
            .num_requests = batch.num_requests.data(),
            .block_table = batch.block_table.data(),
            .slots = nullptr};
}

/// `iq` and `projected` may be null: projected by the reference.
reference::LayerInputs layer_inputs(const ServingModel& model, ServingLayer& layer, const __nv_bfloat16* iq,
                                    const __nv_bfloat16* projected) {
    return {.q_c = model.q_c(layer),
            .hidden = model.hidden(layer),
            .wq_b = layer.wq_b.data(),
            .w_kv = layer.w_kv.data(),
            .iq = iq,
            .projected = projected,
            .k_norm_weight = layer.k_norm_weight.data(),
            .k_norm_bias = layer.k_norm_bias.data(),
            .cache = layer.cache.data()};
}

std::string in_layer(size_t layer, const std::string& wrong) {
    return "layer " + std::to_string(layer) + ": " + wrong;
}

int bucket_of(const ServingBatch& batch, int max_rows) {
    const std::vector<int> buckets = serving_buckets(max_rows);
    return *std::lower_bound(buckets.begin(), buckets.end(), batch.rows());
}

}  // namespace

ServingEngine::ServingEngine(const Geometry& geometry, const Options& options, int layers, bool on_device, bool every_step,
                             uint64_t seed)
    : geometry_(geometry),
      model_(geometry, layers, every_step || !on_device, seed),
      device_(on_device ? std::make_unique<ServingDevice>(geometry, options, model_) : nullptr) {}

void ServingEngine::admit(const ServingBatch& batch, const ServingBatch::Arrival& arrival) {
    const std::vector<PromptPage> prompt = model_.prefill(batch, arrival);
    if (device_ != nullptr) {
        device_->write(prompt);
    }
}

ServingStep ServingEngine::step(const ServingBatch& batch, bool check) {
    model_.draw_activations();
    return device_ != nullptr ? step_on_device(batch, check) : step_on_host(batch, check);
}

ServingStep ServingEngine::step_on_host(const ServingBatch& batch, bool check) {
    ServingStep step{.bucket = bucket_of(batch, geometry_.max_rows), .microseconds = 0, .wrong = {}};
    const reference::Shape shape = reference_shape(geometry_, step.bucket);
    const reference::StepInputs inputs = step_inputs(batch);
    auto begin = std::chrono::steady_clock::now();
    const auto add_time = [&] {
        step.microseconds += std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
    };
    StepStatus status;
    const reference::Layout layout = reference::decode_layout(shape, inputs, &status);
    add_time();
    for (size_t i = 0; i < model_.layers.size(); ++i) {
        ServingLayer& layer = model_.layers[i];
        begin = std::chrono::steady_clock::now();
        const reference::LayerOutputs outputs =
            reference::layer(shape, inputs, layer_inputs(model_, layer, nullptr, nullptr), layout, false, &status);
        add_time();
        model_.note_keys(layer, outputs.projected, layout.slots);
        const std::string wrong = check ? check_on_host(batch, layout, layer, outputs) : "";
        step.wrong = step.wrong.empty() && !wrong.empty() ? in_layer(i, wrong) : step.wrong;
    }
    step.wrong = step.wrong.empty() && status != StepStatus{} ? skipped : step.wrong;
    return step;
}

std::string ServingEngine::check_on_host(const ServingBatch& batch, const reference::Layout& layout, ServingLayer& layer,
                                         const reference::LayerOutputs& outputs) const {
    const std::string wrong = check_selection(geometry_, layout.ends, outputs.logits, outputs.indices);
    return wrong.empty() ? model_.check_cache(layer, batch) : wrong;
}

ServingStep ServingEngine::step_on_device(const ServingBatch& batch, bool check) {
    if (check) {
        device_->poison_outputs();
        for (size_t i = 0; i < model_.layers.size(); ++i) {
            model_.layers[i].cache = device_->cache(static_cast<int>(i));  // which the reference then updates
        }
    }
    const double microseconds = device_->step(batch, model_);
    const int bucket = bucket_of(batch, geometry_.max_rows);
    return {.bucket = bucket,
            .microseconds = microseconds,
            .wrong = check ? compare_with_reference(batch, bucket) : std::string()};
}

std::string ServingEngine::compare_with_reference(const ServingBatch& batch, int bucket) {
    StepStatus status;
    const reference::Layout layout =
        reference::decode_layout(reference_shape(geometry_, bucket), step_inputs(batch), &status);
    for (size_t i = 0; i < model_.layers.size(); ++i) {
        const std::string wrong =
            compare_layer(batch, layout, model_.layers[i], device_->result(static_cast<int>(i), bucket));
        if (!wrong.empty()) {
            return in_layer(i, wrong);
        }
    }
    return device_->status() == StepStatus{} ? "" : skipped;
}

/// The projections against the host's; all that follows against what the reference makes of the device's projections.
std::string ServingEngine::compare_layer(const ServingBatch& batch, const reference::Layout& layout, ServingLayer& layer,
                                         const DeviceLayerResult& device) {
    StepStatus status;
    const reference::LayerOutputs expected =
        reference::layer(reference_shape(geometry_, static_cast<int>(layout.ends.size())), step_inputs(batch),
                         layer_inputs(model_, layer, device.iq.data(), device.projected.data()), layout, true, &status);
    std::string wrong = check_products(batch, layer, device);
    if (wrong.empty() && model_.follows_keys()) {
        model_.note_keys(layer, device.projected, layout.slots);
        wrong = model_.check_cache(layer, batch);
    }
    if (wrong.empty() && device.cache != layer.cache) {
        wrong = "the cache differs from the reference's";
    }
    if (wrong.empty() && device.counts != expected.counts) {
        wrong = "the counts differ from the reference's";
    }
    wrong = wrong.empty() ? check_logits(geometry_, layout.ends, expected.logits, device.logits,
                                         logit_tolerance(geometry_.cache_format))
                          : wrong;
    return wrong.empty() ? check_selection(geometry_, layout.ends, device.logits, device.indices) : wrong;
}

std::string ServingEngine::check_products(const ServingBatch& batch, const ServingLayer& layer,
                                          const DeviceLayerResult& device) const {
    const auto check = [&batch](const __nv_bfloat16* x, const std::vector<__nv_bfloat16>& w, int columns, int depth,
                                const std::vector<__nv_bfloat16>& actual, const char* name) -> std::string {
        std::vector<__nv_bfloat16> expected(static_cast<size_t>(batch.rows() * columns));
        reference::project(x, w.data(), batch.rows(), columns, depth, expected.data());
        for (size_t i = 0; i < expected.size(); ++i) {
            const double want = float_from_bf16(expected[i]);
            // One BF16 step, and the rounding of sums in FP32 where terms cancel.
            if (!(std::abs(double{float_from_bf16(actual[i])} - want) <= std::abs(want) / 128 + 1e-2)) {
                return std::string(name) + " differs from the reference's at " + std::to_string(i);
            }
        }
        return {};
    };
    const std::string wrong =
        check(model_.q_c(layer), layer.wq_b, geometry_.heads * head_dim, geometry_.q_lora_rank, device.iq, "iq");
    return wrong.empty() ? check(model_.hidden(layer), layer.w_kv, geometry_.projected_columns, geometry_.hidden_size,
                                 device.projected, "projected")
                         : wrong;
}

const char* ServingEngine::how_checked() const {
    if (device_ == nullptr) {
        return "checked on the host alone, without a GPU: selections equal a second, full sort, and every key in the caches "
               "decodes to what was stored";
    }
    return model_.follows_keys() ? "caches and counts equal the reference's bytes, logits lie within its tolerance, "
                                   "selections equal a full sort of their logits, and every key decodes to what was stored"
                                 : "caches and counts equal the reference's bytes, logits lie within its tolerance, and "
                                   "selections equal a full sort of their logits";
}

bool serves_on_gpu(Device device, const std::string& command) {
    if (device == Device::cuda) {
        require_device(command + " --device cuda", "leave --device out to see the reference on the host");
    }
    return device != Device::cpu && why_no_device().empty();
}

}  // namespace stepgraph::tools
