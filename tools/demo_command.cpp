#include "demo_command.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include <unistd.h>

#include <stepgraph/kernels/reference/project.h>

#include "cuda_device.h"
#include "demo_device.h"
#include "demo_model.h"
#include "reference_shape.h"
#include "serving_batch.h"
#include "step_checks.h"

namespace stepgraph::tools {
namespace {

Geometry demo_geometry(const DemoOptions& options) {
    const int max_model_len = 4096;
    return validate({.heads = 32,
                     .top_k = options.top_k,
                     .max_rows = options.requests + 4,
                     .max_requests = options.requests,
                     .max_model_len = max_model_len,
                     .block_table_columns = max_model_len / page_tokens,
                     .cache_format = options.format,
                     .pages = std::max(64, options.requests * 24),
                     .q_lora_rank = 128,
                     .hidden_size = 256});
}

/// A bar at the bottom of a terminal; nothing where the output goes elsewhere.
class ProgressBar {
public:
    explicit ProgressBar(int steps) : steps_(steps), shown_(isatty(STDOUT_FILENO) != 0) {}
    ~ProgressBar() { clear(); }
    ProgressBar(const ProgressBar&) = delete;
    ProgressBar& operator=(const ProgressBar&) = delete;

    void clear() const {
        if (shown_) {
            std::printf("\r\033[K");
        }
    }
    void show(int done) const {
        if (shown_) {
            const int width = 40;
            const int filled = done * width / steps_;
            std::printf("[%s%s] %d/%d", std::string(static_cast<size_t>(filled), '#').c_str(),
                        std::string(static_cast<size_t>(width - filled), '.').c_str(), done, steps_);
            std::fflush(stdout);
        }
    }

private:
    int steps_;
    bool shown_;
};

class Demo {
public:
    Demo(const DemoOptions& options, uint64_t seed, bool on_device)
        : options_(options),
          geometry_(demo_geometry(options)),
          model_(geometry_, options.layers, seed),
          batch_(geometry_, conversation_trace(), options.shrink, seed + 1),
          device_(on_device
                      ? std::make_unique<DemoDevice>(geometry_, Options{.portable_scorer = options.portable_scorer}, model_)
                      : nullptr) {}

    int run() {
        print_head();
        const ProgressBar bar(options_.steps);
        for (int step = 0; step < options_.steps; ++step) {
            const std::string wrong = run_step(step);
            bar.clear();
            print_step(step, wrong);
            wrong_steps_ += wrong.empty() ? 0 : 1;
            bar.show(step + 1);
        }
        bar.clear();
        print_tail();
        return wrong_steps_ == 0 ? 0 : 1;
    }

private:
    /// Returns what was wrong with the step, or an empty string.
    std::string run_step(int step) {
        const auto arrivals = batch_.begin_step(step);
        for (const auto& arrival : arrivals) {
            model_.prefill(batch_, arrival);
        }
        if (device_ != nullptr && !arrivals.empty()) {
            device_->upload_caches(model_);
        }
        model_.draw_activations();
        rows_ = batch_.rows();
        keys_ = batch_.keys();
        std::string wrong = device_ != nullptr ? run_on_device() : run_on_host();
        batch_.end_step();
        return wrong;
    }

    [[nodiscard]] reference::StepInputs step_inputs() const {
        return {.seq_lens = batch_.seq_lens.data(),
                .query_lens = batch_.query_lens.data(),
                .num_requests = batch_.num_requests.data(),
                .block_table = batch_.block_table.data(),
                .slots = nullptr};
    }

    static reference::LayerInputs layer_inputs(DemoLayer& layer, const __nv_bfloat16* iq, const __nv_bfloat16* projected) {
        return {.q_c = layer.q_c.data(),
                .hidden = layer.hidden.data(),
                .wq_b = layer.wq_b.data(),
                .w_kv = layer.w_kv.data(),
                .iq = iq,
                .projected = projected,
                .k_norm_weight = layer.k_norm_weight.data(),
                .k_norm_bias = layer.k_norm_bias.data(),
                .cache = layer.cache.data()};
    }

    std::string run_on_host() {
        const reference::Shape shape = reference_shape(geometry_, rows_);
        const auto begin = std::chrono::steady_clock::now();
        StepStatus status;
        const reference::Layout layout = reference::decode_layout(shape, step_inputs(), &status);
        std::vector<reference::LayerOutputs> outputs;
        for (DemoLayer& layer : model_.layers) {
            outputs.push_back(
                reference::layer(shape, step_inputs(), layer_inputs(layer, nullptr, nullptr), layout, false, &status));
        }
        microseconds_ = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();

        for (size_t i = 0; i < outputs.size(); ++i) {
            model_.note_keys(model_.layers[i], outputs[i].projected, layout.slots);
            std::string wrong = check_selection(geometry_, layout.ends, outputs[i].logits, outputs[i].indices);
            wrong = wrong.empty() ? model_.check_cache(model_.layers[i], batch_) : wrong;
            if (!wrong.empty()) {
                return "layer " + std::to_string(i) + ": " + wrong;
            }
        }
        return status == StepStatus{} ? "" : "data was skipped that is right";
    }

    std::string run_on_device() {
        const DeviceStepResult result = device_->step(batch_, model_);
        microseconds_ = result.microseconds;
        const reference::Shape shape = reference_shape(geometry_, result.bucket);
        StepStatus status;
        const reference::Layout layout = reference::decode_layout(shape, step_inputs(), &status);
        for (size_t i = 0; i < result.layers.size(); ++i) {
            const std::string wrong = compare_layer(shape, layout, model_.layers[i], result.layers[i]);
            if (!wrong.empty()) {
                return "layer " + std::to_string(i) + ": " + wrong;
            }
        }
        return result.status == StepStatus{} ? "" : "data was skipped that is right";
    }

    /// The projections against the host's; all that follows against what the reference makes of the device's projections.
    std::string compare_layer(const reference::Shape& shape, const reference::Layout& layout, DemoLayer& layer,
                              const DeviceLayerResult& device) {
        StepStatus status;
        const reference::LayerOutputs expected = reference::layer(
            shape, step_inputs(), layer_inputs(layer, device.iq.data(), device.projected.data()), layout, true, &status);
        model_.note_keys(layer, device.projected, layout.slots);
        std::string wrong = check_products(layer, device);
        wrong = wrong.empty() ? model_.check_cache(layer, batch_) : wrong;
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

    std::string check_products(const DemoLayer& layer, const DeviceLayerResult& device) const {
        const auto check = [this](const std::vector<__nv_bfloat16>& x, const std::vector<__nv_bfloat16>& w, int columns,
                                  int depth, const std::vector<__nv_bfloat16>& actual, const char* name) -> std::string {
            std::vector<__nv_bfloat16> expected(static_cast<size_t>(rows_ * columns));
            reference::project(x.data(), w.data(), rows_, columns, depth, expected.data());
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
            check(layer.q_c, layer.wq_b, geometry_.heads * head_dim, geometry_.q_lora_rank, device.iq, "iq");
        return wrong.empty() ? check(layer.hidden, layer.w_kv, geometry_.projected_columns, geometry_.hidden_size,
                                     device.projected, "projected")
                             : wrong;
    }

    void print_head() const {
        std::printf("%d requests of the trace at a time, lengths / %d, over %d layers; top_k %d, %d heads\n",
                    options_.requests, options_.shrink, options_.layers, geometry_.top_k, geometry_.heads);
        if (device_ != nullptr) {
            std::printf(
                "on the GPU: each step replays one captured graph (the largest has %d programmatic and %d full edges)\n",
                device_->programmatic_edges(), device_->full_edges());
        } else {
            std::printf("no GPU is used: the reference runs on the host\n");
        }
    }

    void print_step(int step, const std::string& wrong) const {
        const int above = static_cast<int>(std::count_if(batch_lengths_begin(), batch_lengths_end(),
                                                         [this](int32_t length) { return length > geometry_.top_k; }));
        std::printf("step %3d  rows %2d  requests %2d (%d above top_k)  keys %6lld  %9.1f us  ", step, rows_, batch_.live(),
                    above, static_cast<long long>(keys_), microseconds_);
        if (device_ != nullptr) {
            std::printf("edges %d+%d  ", device_->programmatic_edges(), device_->full_edges());
        }
        std::printf("%s\n", wrong.empty() ? "checks ok" : ("WRONG: " + wrong).c_str());
    }

    [[nodiscard]] std::vector<int32_t>::const_iterator batch_lengths_begin() const { return batch_.seq_lens.begin(); }
    [[nodiscard]] std::vector<int32_t>::const_iterator batch_lengths_end() const {
        return batch_.seq_lens.begin() + batch_.live();
    }

    void print_tail() const {
        const char* how =
            device_ != nullptr
                ? "caches and counts equal the reference's bytes, logits lie within its tolerance, selections equal a "
                  "full sort of their logits, and every key decodes to what was stored"
                : "checked on the host alone, for want of a GPU: selections equal a second, full sort, and every key "
                  "in the caches decodes to what was stored";
        if (wrong_steps_ == 0) {
            std::printf("all %d steps were right: %s\n", options_.steps, how);
        } else {
            std::printf("%d of %d steps were WRONG\n", wrong_steps_, options_.steps);
        }
    }

    DemoOptions options_;
    Geometry geometry_;
    DemoModel model_;
    ServingBatch batch_;
    std::unique_ptr<DemoDevice> device_;
    int rows_ = 0;
    int64_t keys_ = 0;
    double microseconds_ = 0;
    int wrong_steps_ = 0;
};

}  // namespace

int demo(const DemoOptions& options) {
    if (options.device == Device::cuda) {
        require_device("demo --device cuda", "leave --device out to see the reference on the host");
    }
    const bool on_device = options.device != Device::cpu && why_no_device().empty();
    const uint64_t seed = options.seed != 0 ? options.seed : std::random_device{}();
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    return Demo(options, seed, on_device).run();
}

}  // namespace stepgraph::tools
