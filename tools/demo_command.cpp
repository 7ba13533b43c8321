#include "demo_command.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <string>

#include "progress_bar.h"
#include "serving_batch.h"
#include "serving_engine.h"
#include "trace_slice.h"

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

// Now and then some guess ahead, now and then only half of them are live.
constexpr int draft_every = 4;
constexpr int pause_every = 7;

class Demo {
public:
    Demo(const DemoOptions& options, uint64_t seed, bool on_device)
        : options_(options),
          geometry_(demo_geometry(options)),
          batch_(geometry_, conversation_trace(),
                 {.shrink = options.shrink, .draft_every = draft_every, .pause_every = pause_every}, seed + 1),
          engine_(geometry_, {.portable_scorer = options.portable_scorer}, options.layers, on_device, true, seed) {}

    int run() {
        print_head();
        const ProgressBar bar(options_.steps);
        for (int step = 0; step < options_.steps; ++step) {
            for (const auto& arrival : batch_.begin_step(step)) {
                engine_.admit(batch_, arrival);
            }
            const ServingStep done = engine_.step(batch_, true);
            bar.clear();
            print_step(step, done);
            bar.show(step + 1);
            wrong_steps_ += done.wrong.empty() ? 0 : 1;
            batch_.end_step();
        }
        bar.clear();
        print_tail();
        return wrong_steps_ == 0 ? 0 : 1;
    }

private:
    void print_head() const {
        std::printf("%d requests of the trace at a time, lengths / %d, over %d layers; top_k %d, %d heads\n",
                    options_.requests, options_.shrink, options_.layers, geometry_.top_k, geometry_.heads);
        if (engine_.device() != nullptr) {
            std::printf(
                "on the GPU: each step replays one captured graph (the largest has %d programmatic and %d full edges)\n",
                engine_.device()->programmatic_edges(), engine_.device()->full_edges());
        } else {
            std::printf("no GPU is used: the reference runs on the host\n");
        }
    }

    void print_step(int step, const ServingStep& done) const {
        const auto above = std::count_if(batch_.seq_lens.begin(), batch_.seq_lens.begin() + batch_.live(),
                                         [this](int32_t length) { return length > geometry_.top_k; });
        std::printf("step %3d  rows %2d  requests %2d (%d above top_k)  keys %6lld  %9.1f us  ", step, batch_.rows(),
                    batch_.live(), static_cast<int>(above), static_cast<long long>(batch_.keys()), done.microseconds);
        if (engine_.device() != nullptr) {
            std::printf("edges %d+%d  ", engine_.device()->programmatic_edges(), engine_.device()->full_edges());
        }
        std::printf("%s\n", done.wrong.empty() ? "checks ok" : ("WRONG: " + done.wrong).c_str());
    }

    void print_tail() const {
        if (wrong_steps_ == 0) {
            std::printf("all %d steps were right: %s\n", options_.steps, engine_.how_checked());
        } else {
            std::printf("%d of %d steps were WRONG\n", wrong_steps_, options_.steps);
        }
    }

    DemoOptions options_;
    Geometry geometry_;
    ServingBatch batch_;
    ServingEngine engine_;
    int wrong_steps_ = 0;
};

}  // namespace

int demo(const DemoOptions& options) {
    const bool on_device = serves_on_gpu(options.device, "demo");
    const uint64_t seed = options.seed != 0 ? options.seed : std::random_device{}();
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    return Demo(options, seed, on_device).run();
}

}  // namespace stepgraph::tools
