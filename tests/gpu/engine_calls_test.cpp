// What a thousand steps of the example engine call: copies, its graph and its own wait. Nothing of this library is called,
// so nothing of it allocates or waits.
#include <map>
#include <string>
#include <vector>

#include "../../examples/engine/device_step.h"
#include "../../examples/engine/model.h"
#include "call_counter.h"
#include "device_step.h"

namespace stepgraph::test {
namespace {

class EngineExample : public GpuTest {};

/// More than are served at a time, verify rows and all, until there have been a thousand steps.
std::vector<Request> many_requests() {
    std::vector<Request> all;
    for (int i = 0; i < 240; ++i) {
        Request request;
        for (int token = 0; token <= i % 70; ++token) {
            request.tokens.push_back((token * token + i) % model::words);
        }
        request.generate = 55;
        all.push_back(request);
    }
    return all;
}

TEST_F(EngineExample, CallsNothingOfThisLibraryInAThousandSteps) {
    ::DeviceStep device;
    std::map<std::string, int> calls;
    int steps = 0;
    const RunStep run_step = [&](const std::vector<Scheduled>& step) {
        std::vector<int> predictions;
        if (steps++ == 0) {
            predictions = device.run(step);  // the first one may load what the runtime has put off
        } else {
            const CallCounter counter;
            predictions = device.run(step);
            for (const auto& [name, count] : counter.calls()) {
                calls[name] += count;
            }
        }
        size_t row = 0;
        for (const Scheduled& request : step) {
            for (int i = 0; i < request.rows; ++i, ++row) {
                EXPECT_EQ(predictions.at(row), model::predict(request.tokens, request.computed + i + 1)) << "step " << steps;
            }
        }
        return predictions;
    };
    serve(many_requests(), 4, run_step);
    device.check_data();

    ASSERT_GT(steps, 1000);
    ASSERT_FALSE(calls.empty());
    const std::map<std::string, int> expected = {{"GraphLaunch", 1}, {"Memcpy", 5}, {"StreamSynchronize", 1}};
    for (const auto& [name, count] : calls) {
        bool known = false;
        for (const auto& [part, times] : expected) {
            // Those to the device and those from it have names of their own in the driver.
            if (name.find(part) != std::string::npos) {
                EXPECT_LE(count, times * (steps - 1)) << name;
                known = true;
            }
        }
        EXPECT_TRUE(known) << name << " was called " << count << " times";
    }
}

}  // namespace
}  // namespace stepgraph::test
