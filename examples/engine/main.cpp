// A small serving engine: requests come, are computed in batches of decode, verify and prompt rows, and leave.
//
//   model.h        a model whose every choice is known
//   engine         requests, block manager, the loop
//   device_step    the step on the GPU: the engine's own capture with stepgraph's layout and layers inside
//
// The program checks itself: every prediction of the GPU against the model's plain loops, and that speculation changes
// nothing but the number of steps.
#include <cstdio>
#include <exception>
#include <optional>
#include <stdexcept>

#include <cuda_runtime_api.h>

#include "device_step.h"
#include "model.h"

namespace {

std::vector<int> run_on_host(const std::vector<Scheduled>& step) {
    std::vector<int> predictions;
    for (const Scheduled& request : step) {
        for (int row = 0; row < request.rows; ++row) {
            predictions.push_back(model::predict(request.tokens, request.computed + row + 1));
        }
    }
    return predictions;
}

/// Seven requests, short and long: more than are served at a time, and than the cache holds at once.
std::vector<Request> requests() {
    std::vector<Request> all;
    for (const int prompt : {1, 5, 63, 64, 65, 130, 250}) {
        Request request;
        for (int i = 0; i < prompt; ++i) {
            request.tokens.push_back((i * i + prompt) % model::words);
        }
        request.generate = 30;
        all.push_back(request);
    }
    return all;
}

}  // namespace

int main() try {
    int devices = 0;
    const bool has_gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
    std::optional<DeviceStep> device;
    if (has_gpu) {
        device.emplace();
    } else {
        std::printf(
            "there is no GPU: where there is one, each step would be one graph of %d rows and %d layers, captured by\n"
            "this engine and compared with the model's plain loops, which run alone now\n",
            max_rows, model::layers);
    }
    int rows = 0;
    const RunStep run_step = [&](const std::vector<Scheduled>& step) {
        const std::vector<int> expected = run_on_host(step);
        if (device.has_value() && device->run(step) != expected) {
            throw std::runtime_error("the GPU predicts something else than the model's plain loops");
        }
        rows += static_cast<int>(expected.size());
        return expected;
    };
    const Served plain = serve(requests(), 0, run_step);
    const Served speculative = serve(requests(), 4, run_step);
    if (device.has_value()) {
        device->check_data();
    }
    if (speculative.tokens != plain.tokens) {
        throw std::runtime_error("speculation changed what was generated");
    }
    if (speculative.drafts_accepted == 0 || speculative.steps >= plain.steps) {
        throw std::runtime_error("speculation saved no step");
    }
    std::printf("%zu requests, %d rows: %d steps without drafts, %d with them, of which %d were accepted\n",
                plain.tokens.size(), rows, plain.steps, speculative.steps, speculative.drafts_accepted);
    return 0;
} catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
}
