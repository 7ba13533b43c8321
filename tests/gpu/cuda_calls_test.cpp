// What a loop of replays calls: one graph launch a step and nothing else, seen by CUPTI.
#include <chrono>
#include <iostream>
#include <map>
#include <string>

#include "call_counter.h"
#include "device_step.h"

namespace stepgraph::test {
namespace {

class CudaCalls : public GpuTest {};

TEST_F(CudaCalls, OfAThousandReplaysOfTenLayersAreAThousandGraphLaunches) {
    Random random = fresh_random();
    const StepCase step = make_case(
        {.heads = 32, .top_k = 512, .max_rows = 32, .max_requests = 32, .columns = 32, .layers = 10, .project = true},
        random);
    DeviceStep device(step, {}, {.logits = false, .winner_logits = false});
    device.pipeline().capture({32});
    device.replay(32);

    std::map<std::string, int> calls;
    {
        const CallCounter counter;
        for (int i = 0; i < 1000; ++i) {
            device.pipeline().replay(32, device.stream());
        }
        calls = counter.calls();
    }
    check_cuda(cudaStreamSynchronize(device.stream()), "the replays");
    for (const auto& [name, count] : calls) {
        EXPECT_TRUE(name.find("GraphLaunch") != std::string::npos) << name << " was called " << count << " times";
        EXPECT_EQ(count, 1000) << name;
    }
    EXPECT_FALSE(calls.empty());

    // The watch does see what it is meant to find.
    {
        const CallCounter counter;
        DeviceMemory memory(256, 256, false);
        check_cuda(cudaStreamSynchronize(device.stream()), "cudaStreamSynchronize");
        EXPECT_GE(counter.calls().size(), 2U);
    }
}

TEST_F(CudaCalls, TakeLittleTimeOfTheHost) {
    Random random = fresh_random();
    for (const int layers : {1, 10}) {
        const StepCase step = make_case(
            {.heads = 32, .max_rows = 32, .max_requests = 32, .columns = 2, .layers = layers, .project = true}, random);
        DeviceStep device(step, {}, {.logits = false, .winner_logits = false});
        device.pipeline().capture({32});
        device.replay(32);
        // Short bursts, so that the launch queue never fills and the host never waits for the device.
        double best = 1e9;
        for (int burst = 0; burst < 40; ++burst) {
            const auto begin = std::chrono::steady_clock::now();
            for (int i = 0; i < 25; ++i) {
                device.pipeline().replay(32, device.stream());
            }
            const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - begin;
            best = std::min(best, elapsed.count() / 25);
            check_cuda(cudaStreamSynchronize(device.stream()), "the burst");
        }
        std::cout << "host time of one replay, " << layers << " layers, 32 rows: " << best << " us\n";
        RecordProperty("host_us_" + std::to_string(layers) + "_layers", std::to_string(best));
        EXPECT_LT(best, 50.0);  // a replay that synchronised would take the whole step, 100 us and more
    }
}

}  // namespace
}  // namespace stepgraph::test
