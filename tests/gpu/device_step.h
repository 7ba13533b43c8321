// A random step on the device: its buffers, its pipeline, and the comparison of what it computes with the reference.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <stepgraph/pipeline/pipeline.h>

#include "device_memory.h"
#include "step_case.h"

namespace stepgraph::test {

/// Skips the tests of a machine without a GPU and says why.
class GpuTest : public ::testing::Test {
protected:
    void SetUp() override;
};

/// Whether the kernels were compiled for sm_90 or newer: those for older ones hold no wait and get no programmatic edges.
bool compiled_with_programmatic_launch();

/// The options with the kernels that this run of the tests is about: those that run everywhere where the environment
/// variable STEPGRAPH_TEST_KERNELS is "portable".
Options with_kernels_of_this_run(Options options);

/// Which outputs a test asks for; `logits` and `winner_logits` make every row scored.
struct Wanted {
    bool logits = true;
    bool winner_logits = true;
    bool physical_slots = true;
    bool counts = true;

    [[nodiscard]] bool all_logits() const { return logits || winner_logits; }
};

inline constexpr uint8_t poison_byte = 0xA5;

class DeviceStep {
public:
    /// Uploads `step`, poisons outputs and workspace, and binds.
    DeviceStep(const StepCase& step, const Options& options = {}, const Wanted& wanted = {}, bool guarded = false);

    Pipeline& pipeline() { return pipeline_; }
    [[nodiscard]] cudaStream_t stream() const { return cudaStreamPerThread; }

    /// Lengths, table, slots and activations; the caches and weights stay.
    void upload_inputs(const StepCase& step);
    void upload_caches(const StepCase& step);
    void poison_outputs();
    void bind_again();
    /// Binds again, with other buffers for the one layer there is.
    void rebind(const LayerBuffers& layer);

    void run_eager(int rows);
    void replay(int rows);  // of what pipeline().capture() made

    /// Expects every output of every layer, every cache byte, the layout and the status to be bit-equal to `expected`, and
    /// rows behind the bucket to be untouched. Where the scorer is not the portable one, logits may lie
    /// tools::logit_tolerance() of their row's largest apart, and the selection must be the exact one of the device's own
    /// logits.
    void expect_equal(const StepCase& after, const ExpectedStep& expected, int rows);

    struct Outputs {
        DeviceMemory indices, counts, physical_slots, winner_logits, logits;
    };
    struct LayerMemory {
        DeviceMemory q_c, hidden, wq_b, w_kv, iq, projected, k_norm_weight, k_norm_bias, cache;
        Outputs out;
    };
    /// Every output and cache of every layer as bytes: for comparing two runs with each other.
    [[nodiscard]] std::vector<std::vector<uint8_t>> snapshot() const;
    std::vector<LayerMemory>& layers() { return layers_; }

private:
    [[nodiscard]] StepBuffers step_buffers() const;
    void expect_layer_equal(const Outputs& out, const StepCase& after, const ExpectedStep& expected,
                            const reference::LayerOutputs& want) const;
    void expect_layer_close(const Outputs& out, const StepCase& after, const ExpectedStep& expected,
                            const reference::LayerOutputs& want) const;

    Geometry geometry_;
    bool portable_;
    DeviceMemory seq_lens_, query_lens_, num_requests_, block_table_, slots_, workspace_;
    std::vector<LayerMemory> layers_;
    std::vector<LayerBuffers> buffers_;
    Pipeline pipeline_;
};

/// Expects two arrays to hold the same bits; reports the first place and the number of those that differ.
template <typename Element>
void expect_same_bits(const Element* actual, const Element* expected, size_t n, const char* what) {
    size_t wrong = 0;
    size_t first = 0;
    for (size_t i = 0; i < n; ++i) {
        if (std::memcmp(actual + i, expected + i, sizeof(Element)) != 0) {
            first = wrong == 0 ? i : first;
            ++wrong;
        }
    }
    EXPECT_EQ(wrong, 0U) << what << ": " << wrong << " of " << n << " differ, the first at " << first;
}

}  // namespace stepgraph::test
