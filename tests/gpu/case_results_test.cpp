// Every case file on the GPU, eager and captured: against what the files expect, and against the host's stages.
#include <gtest/gtest.h>

#include <tuple>

#include <cuda_runtime_api.h>

#include "../case_checks.h"

namespace stepgraph::test {
namespace {

using tools::Launch;
using tools::run_on_cpu;
using tools::run_on_cuda;
using tools::StepResults;

class CaseOnTheGpu : public testing::TestWithParam<std::tuple<std::string, Launch>> {
protected:
    void SetUp() override {
        int devices = 0;
        const cudaError_t result = cudaGetDeviceCount(&devices);
        if (result != cudaSuccess) {
            GTEST_SKIP() << "needs an NVIDIA GPU: " << cudaGetErrorString(result);
        }
    }

    const LoadedCase loaded = load(std::get<0>(GetParam()));
    const Launch launch = std::get<1>(GetParam());
};

TEST_P(CaseOnTheGpu, GivesWhatTheFileExpects) {
    for (const bool portable_scorer : {true, false}) {
        const StepResults results = run_on_cuda(loaded.step, launch, true, {.portable_scorer = portable_scorer});
        EXPECT_EQ(joined(differences_from_expected(loaded, results)), "");
        EXPECT_EQ(joined(differences_from_own_logits(loaded, results)), "");
        EXPECT_EQ(results.status, StepStatus{});
    }
}

TEST_P(CaseOnTheGpu, SelectsExactlyTheBestOfItsOwnLogits) {
    EXPECT_EQ(joined(differences_from_own_logits(loaded, run_on_cuda(loaded.step, launch, true))), "");
}

TEST_P(CaseOnTheGpu, AgreesWithTheHost) {
    const StepResults device = run_on_cuda(loaded.step, launch, true);
    const StepResults host = run_on_cpu(loaded.step, true);
    EXPECT_EQ(joined(differences_between(loaded, device, host)), "");
    const StepResults portable = run_on_cuda(loaded.step, launch, true, {.portable_scorer = true});
    EXPECT_EQ(joined(differences_between(loaded, portable, host)), "");
}

TEST_P(CaseOnTheGpu, GivesTheSameWithoutLogitsAskedFor) {
    const StepResults with = run_on_cuda(loaded.step, launch, true);
    const StepResults without = run_on_cuda(loaded.step, launch, false);
    EXPECT_EQ(without.indices, with.indices);
    EXPECT_EQ(without.physical_slots, with.physical_slots);
    EXPECT_EQ(without.cache, with.cache);
}

TEST_P(CaseOnTheGpu, GivesTheSameBitsAgain) {
    const StepResults once = run_on_cuda(loaded.step, launch, true);
    const StepResults again = run_on_cuda(loaded.step, launch, true);
    EXPECT_EQ(again.logits, once.logits);
    EXPECT_EQ(again.indices, once.indices);
    EXPECT_EQ(again.cache, once.cache);
}

INSTANTIATE_TEST_SUITE_P(CaseFiles, CaseOnTheGpu,
                         testing::Combine(testing::ValuesIn(case_names()), testing::Values(Launch::graph, Launch::eager)),
                         [](const auto& param_info) {
                             return std::get<0>(param_info.param) +
                                    (std::get<1>(param_info.param) == Launch::graph ? "_graph" : "_eager");
                         });

}  // namespace
}  // namespace stepgraph::test
