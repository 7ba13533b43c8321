#include "trace_command.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "case_file.h"
#include "progress_bar.h"
#include "read_ceiling.h"
#include "safetensors.h"
#include "serving_batch.h"
#include "serving_engine.h"

namespace stepgraph::tools {
namespace {

void set_default(int& number, int value, int unset = 0) {
    number = number == unset ? value : number;
}

/// Kimi K3.1's indexer and lengths as they come on a GPU; on the host what a minute's patience is enough for.
TraceOptions with_defaults(TraceOptions options, bool on_device) {
    set_default(options.steps, on_device ? 2000 : 400);
    set_default(options.layers, on_device ? 4 : 2);
    set_default(options.rows, on_device ? 64 : 16);
    set_default(options.top_k, on_device ? 2048 : 512);
    set_default(options.max_model_len, on_device ? 131072 : 4096);
    set_default(options.pages, on_device ? 16384 : 512);
    set_default(options.shrink, on_device ? 1 : 16);
    set_default(options.check, std::min(3, options.steps), -1);
    return options;
}

void check_options(const TraceOptions& options) {
    if (options.pages < pages_for(options.max_model_len)) {
        throw CaseError("--pages is " + std::to_string(options.pages) + ", must be at least " +
                        std::to_string(pages_for(options.max_model_len)) + ", which a request of --max-model-len " +
                        std::to_string(options.max_model_len) + " takes");
    }
    if (options.check > options.steps) {
        throw CaseError("--check is " + std::to_string(options.check) + ", must be at most --steps, " +
                        std::to_string(options.steps));
    }
}

Geometry geometry_of(const TraceOptions& options, bool on_device) {
    return validate({.heads = 32,
                     .top_k = options.top_k,
                     .max_rows = options.rows,
                     .max_requests = options.rows,
                     .max_model_len = options.max_model_len,
                     .block_table_columns = pages_for(options.max_model_len),
                     .cache_format = options.format,
                     .pages = options.pages,
                     .q_lora_rank = on_device ? 1536 : 128,
                     .hidden_size = on_device ? 7168 : 256});
}

/// Steps to check: the first, for a trace may end early, and others drawn of all.
std::set<int> sample(int count, int steps, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::set<int> chosen;
    if (count > 0) {
        chosen.insert(0);
    }
    while (static_cast<int>(chosen.size()) < count) {
        chosen.insert(static_cast<int>(random() % static_cast<uint64_t>(steps)));
    }
    return chosen;
}

/// What a run adds up to.
struct Totals {
    std::vector<double> times_us;
    int64_t tokens = 0;
    int64_t keys = 0;    // that a layer scored for a request
    double bytes = 0;    // of keys and weights, over all layers
    int64_t rows = 0;    // of requests
    int64_t padded = 0;  // rows of the buckets
    int requests = 0;    // that were admitted
    int checked = 0;
    std::vector<std::string> wrong;

    /// The time that a share of the steps takes at most.
    [[nodiscard]] double percentile(double share) const {
        std::vector<double> sorted = times_us;
        std::sort(sorted.begin(), sorted.end());
        const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(sorted.size())));
        return sorted[std::max<size_t>(rank, 1) - 1];
    }
    [[nodiscard]] double tb_s() const {
        double us = 0;
        std::for_each(times_us.begin(), times_us.end(), [&us](double time) { us += time; });
        return bytes / us * 1e-6;
    }
    [[nodiscard]] double padding_share() const { return 1 - static_cast<double>(rows) / static_cast<double>(padded); }
};

class TraceRun {
public:
    TraceRun(const TraceOptions& options, const std::vector<TraceRequest>& trace, bool on_device)
        : options_(options),
          geometry_(geometry_of(options, on_device)),
          ceiling_tb_s_(on_device ? read_ceiling_tb_s() : 0),
          batch_(geometry_, trace,
                 {.shrink = options.shrink,
                  .step_ms = options.step_ms,
                  .drafts = options.drafts,
                  .acceptance = options.acceptance},
                 options.seed + 1),
          engine_(geometry_, {.portable_scorer = options.portable_scorer}, options.layers, on_device, false, options.seed),
          to_check_(sample(options.check, options.steps, options.seed + 2)) {}

    int run() {
        const ProgressBar bar(options_.steps, !options_.json);
        for (int step = 0; step < options_.steps && !batch_.done(); ++step) {
            run_step(step);
            if (step % std::max(1, options_.steps / 100) == 0) {
                bar.show(step);
            }
        }
        bar.clear();
        if (options_.json) {
            std::cout << json().dump(1) << '\n';
        } else {
            print_table();
        }
        return totals_.wrong.empty() ? 0 : 1;
    }

private:
    void run_step(int step) {
        for (const auto& arrival : batch_.begin_step(step)) {
            engine_.admit(batch_, arrival);
            ++totals_.requests;
        }
        const bool check = to_check_.contains(step);
        const ServingStep done = engine_.step(batch_, check);
        totals_.times_us.push_back(done.microseconds);
        totals_.keys += batch_.keys();
        totals_.bytes += options_.layers * (static_cast<double>(batch_.keys()) * key_bytes() + weight_bytes());
        totals_.rows += batch_.rows();
        totals_.padded += done.bucket;
        totals_.checked += check ? 1 : 0;
        if (!done.wrong.empty()) {
            totals_.wrong.push_back("step " + std::to_string(step) + ", " + done.wrong);
        }
        totals_.tokens += batch_.end_step();
    }

    [[nodiscard]] double key_bytes() const { return static_cast<double>(page_bytes(options_.format)) / page_tokens; }
    [[nodiscard]] double weight_bytes() const {
        const int64_t weights = int64_t{geometry_.heads} * head_dim * geometry_.q_lora_rank +
                                int64_t{geometry_.projected_columns} * geometry_.hidden_size;
        return static_cast<double>(weights) * sizeof(__nv_bfloat16);
    }
    [[nodiscard]] bool on_device() const { return engine_.device() != nullptr; }

    [[nodiscard]] nlohmann::ordered_json json() const {
        return {{"trace", options_.trace.string()},
                {"device", on_device() ? "cuda" : "cpu"},
                {"format", format_name(options_.format)},
                {"seed", options_.seed},
                {"layers", options_.layers},
                {"row_limit", options_.rows},
                {"max_model_len", options_.max_model_len},
                {"steps", totals_.times_us.size()},
                {"requests", totals_.requests},
                {"cut_requests", batch_.cut()},
                {"tokens", totals_.tokens},
                {"keys", totals_.keys},
                {"us_p50", totals_.percentile(0.5)},
                {"us_p90", totals_.percentile(0.9)},
                {"us_p99", totals_.percentile(0.99)},
                {"tb_s", totals_.tb_s()},
                {"ceiling_tb_s", on_device() ? nlohmann::ordered_json(ceiling_tb_s_) : nlohmann::ordered_json()},
                {"padding_share", totals_.padding_share()},
                {"checked_steps", totals_.checked},
                {"wrong", totals_.wrong}};
    }

    void print_table() const {
        const auto count = [](int64_t n) { return static_cast<long long>(n); };
        std::printf("device         %s\n", on_device() ? "GPU: each step replays the smallest captured graph that holds it"
                                                       : "host: the reference, without a GPU");
        std::printf("seed           %llu\n", static_cast<unsigned long long>(options_.seed));
        std::printf("requests       %d, of which %lld were cut to %d tokens\n", totals_.requests, count(batch_.cut()),
                    options_.max_model_len);
        std::printf("steps          %lld of %d layers\n", count(static_cast<int64_t>(totals_.times_us.size())),
                    options_.layers);
        std::printf("tokens         %lld\n", count(totals_.tokens));
        std::printf("keys scored    %lld in each layer\n", count(totals_.keys));
        std::printf("time per step  %.1f us median, %.1f us p90, %.1f us p99\n", totals_.percentile(0.5),
                    totals_.percentile(0.9), totals_.percentile(0.99));
        std::printf("read           %.3g TB/s of keys and weights", totals_.tb_s());
        if (on_device()) {
            std::printf(", %.0f %% of the read ceiling of %.2f TB/s", 100 * totals_.tb_s() / ceiling_tb_s_, ceiling_tb_s_);
        }
        std::printf("\npadding        %.1f %% of the buckets' rows\n", 100 * totals_.padding_share());
        std::printf("checks         %d steps in every row, %d wrong: %s\n", totals_.checked,
                    static_cast<int>(totals_.wrong.size()), engine_.how_checked());
        for (const std::string& wrong : totals_.wrong) {
            std::printf("WRONG: %s\n", wrong.c_str());
        }
    }

    TraceOptions options_;
    Geometry geometry_;
    double ceiling_tb_s_;  // measured before the caches take the memory
    ServingBatch batch_;
    ServingEngine engine_;
    std::set<int> to_check_;
    Totals totals_;
};

}  // namespace

int trace(const TraceOptions& given) {
    const std::vector<TraceRequest> requests = read_trace(given.trace);
    const bool on_device = serves_on_gpu(given.device, "trace");
    TraceOptions options = with_defaults(given, on_device);
    check_options(options);
    options.seed = options.seed != 0 ? options.seed : std::random_device{}();
    return TraceRun(options, requests, on_device).run();
}

}  // namespace stepgraph::tools
