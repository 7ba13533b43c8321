#include "device_step.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include <cuda_runtime_api.h>

#include <stepgraph/kernels/reference/select.h>
#include <stepgraph/kernels/score_sm90.h>
#include <stepgraph/tools/step_checks.h>

namespace stepgraph::test {
namespace {

template <typename Element>
DeviceMemory copy_of(const std::vector<Element>& host, size_t alignment, bool guarded) {
    DeviceMemory memory(host.size() * sizeof(Element), alignment, guarded);
    memory.upload(host);
    return memory;
}

/// Expects the first `rows * row_elements` of an output to equal `expected`, and the rest to be poison.
template <typename Element>
void expect_output(const DeviceMemory& memory, const std::vector<Element>& expected, const char* what) {
    if (memory.bytes() == 0) {
        return;
    }
    const auto actual = memory.download<Element>();
    ASSERT_LE(expected.size(), actual.size()) << what;
    expect_same_bits(actual.data(), expected.data(), expected.size(), what);
    const auto* bytes = reinterpret_cast<const uint8_t*>(actual.data() + expected.size());
    const auto untouched = [](uint8_t byte) { return byte == poison_byte; };
    EXPECT_TRUE(std::all_of(bytes, reinterpret_cast<const uint8_t*>(actual.data() + actual.size()), untouched))
        << what << ": rows behind the bucket were written";
}

template <typename Element>
std::vector<Element> read(const Element* device, size_t n) {
    std::vector<Element> host(n);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    check_cuda(cudaMemcpy(host.data(), device, n * sizeof(Element), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
}

}  // namespace

Options with_kernels_of_this_run(Options options) {
    const char* kernels = std::getenv("STEPGRAPH_TEST_KERNELS");
    const bool portable = kernels != nullptr && std::string(kernels) == "portable";
    options.portable_scorer = options.portable_scorer || portable;
    options.portable_select = options.portable_select || portable;
    return options;
}

void GpuTest::SetUp() {
    int devices = 0;
    const cudaError_t result = cudaGetDeviceCount(&devices);
    if (result != cudaSuccess || devices == 0) {
        GTEST_SKIP() << "needs an NVIDIA GPU: " << (result != cudaSuccess ? cudaGetErrorString(result) : "there is none");
    }
}

DeviceStep::DeviceStep(const StepCase& step, const Options& options, const Wanted& wanted, bool guarded)
    : geometry_(step.geometry),
      portable_(with_kernels_of_this_run(options).portable_scorer ||
                !can_score_sm90(step.geometry.cache_format, nullptr, step.geometry.page_stride_bytes)),
      seq_lens_(copy_of(step.seq_lens, 4, guarded)),
      query_lens_(copy_of(step.query_lens, 4, guarded)),
      num_requests_(copy_of(step.num_requests, 4, guarded)),
      block_table_(copy_of(step.block_table, 4, guarded)),
      slots_(copy_of(step.slots, 8, guarded)),
      pipeline_(step.geometry, with_kernels_of_this_run(options)) {
    const auto rows = static_cast<size_t>(geometry_.max_rows);
    const size_t winners = rows * static_cast<size_t>(geometry_.top_k);
    for (const LayerCase& layer : step.layers) {
        LayerMemory m;
        m.q_c = copy_of(layer.q_c, 16, guarded);
        m.hidden = copy_of(layer.hidden, 16, guarded);
        m.wq_b = copy_of(layer.wq_b, 16, guarded);
        m.w_kv = copy_of(layer.w_kv, 16, guarded);
        m.iq = copy_of(layer.iq, 16, guarded);
        m.projected = copy_of(layer.projected, 16, guarded);
        m.k_norm_weight = copy_of(layer.k_norm_weight, 16, guarded);
        m.k_norm_bias = copy_of(layer.k_norm_bias, 16, guarded);
        m.cache = copy_of(layer.cache, 4, guarded);
        m.out.indices = DeviceMemory(winners * 4, 4, guarded);
        m.out.counts = DeviceMemory(wanted.counts ? rows * 4 : 0, 4, guarded);
        m.out.physical_slots = DeviceMemory(wanted.physical_slots ? winners * 8 : 0, 8, guarded);
        m.out.winner_logits = DeviceMemory(wanted.winner_logits ? winners * 4 : 0, 4, guarded);
        m.out.logits = DeviceMemory(wanted.logits ? rows * static_cast<size_t>(geometry_.width()) * 4 : 0, 4, guarded);
        buffers_.push_back({.q_c = m.q_c.as<__nv_bfloat16>(),
                            .hidden = m.hidden.as<__nv_bfloat16>(),
                            .wq_b = m.wq_b.as<__nv_bfloat16>(),
                            .w_kv = m.w_kv.as<__nv_bfloat16>(),
                            .iq = m.iq.as<__nv_bfloat16>(),
                            .projected = m.projected.as<__nv_bfloat16>(),
                            .k_norm_weight = m.k_norm_weight.as<float>(),
                            .k_norm_bias = m.k_norm_bias.as<float>(),
                            .cache = m.cache.as<uint8_t>(),
                            .indices = m.out.indices.as<int32_t>(),
                            .counts = m.out.counts.as<int32_t>(),
                            .physical_slots = m.out.physical_slots.as<int64_t>(),
                            .winner_logits = m.out.winner_logits.as<float>(),
                            .logits = m.out.logits.as<float>()});
        layers_.push_back(std::move(m));
    }
    workspace_ = DeviceMemory(pipeline_.workspace_bytes(), 256, guarded);
    workspace_.fill(poison_byte);
    poison_outputs();
    bind_again();
}

void DeviceStep::bind_again() {
    pipeline_.bind(step_buffers(), buffers_, {workspace_.as<void>(), workspace_.bytes()});
}

StepBuffers DeviceStep::step_buffers() const {
    return {.seq_lens = seq_lens_.as<int32_t>(),
            .query_lens = query_lens_.as<int32_t>(),
            .num_requests = num_requests_.as<int32_t>(),
            .block_table = block_table_.as<int32_t>(),
            .slots = slots_.as<int64_t>()};
}

void DeviceStep::rebind(const LayerBuffers& layer) {
    pipeline_.bind(step_buffers(), {&layer, 1}, {workspace_.as<void>(), workspace_.bytes()});
}

void DeviceStep::upload_inputs(const StepCase& step) {
    seq_lens_.upload(step.seq_lens);
    query_lens_.upload(step.query_lens);
    num_requests_.upload(step.num_requests);
    block_table_.upload(step.block_table);
    slots_.upload(step.slots);
    for (size_t i = 0; i < layers_.size(); ++i) {
        layers_[i].q_c.upload(step.layers[i].q_c);
        layers_[i].hidden.upload(step.layers[i].hidden);
        layers_[i].iq.upload(step.layers[i].iq);
        layers_[i].projected.upload(step.layers[i].projected);
    }
}

void DeviceStep::upload_caches(const StepCase& step) {
    for (size_t i = 0; i < layers_.size(); ++i) {
        layers_[i].cache.upload(step.layers[i].cache);
    }
}

void DeviceStep::poison_outputs() {
    for (LayerMemory& layer : layers_) {
        for (DeviceMemory* memory : {&layer.out.indices, &layer.out.counts, &layer.out.physical_slots,
                                     &layer.out.winner_logits, &layer.out.logits}) {
            memory->fill(poison_byte);
        }
    }
}

void DeviceStep::run_eager(int rows) {
    pipeline_.enqueue_layout(rows, stream());
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
        pipeline_.enqueue_layer(static_cast<int>(layer), rows, stream());
    }
    check_cuda(cudaStreamSynchronize(stream()), "the step");
}

void DeviceStep::replay(int rows) {
    pipeline_.replay(rows, stream());
    check_cuda(cudaStreamSynchronize(stream()), "the step");
}

void DeviceStep::expect_equal(const StepCase& after, const ExpectedStep& expected, int rows) {
    const StepState state = pipeline_.state();
    const auto n = static_cast<size_t>(rows);
    expect_same_bits(read(state.starts, expected.layout.starts.size()).data(), expected.layout.starts.data(),
                     expected.layout.starts.size(), "starts");
    expect_same_bits(read(state.ends, n).data(), expected.layout.ends.data(), n, "ends");
    expect_same_bits(read(state.row_request, n).data(), expected.layout.row_request.data(), n, "row_request");
    if (after.slots.empty()) {
        expect_same_bits(read(state.slots, n).data(), expected.layout.slots.data(), n, "slots");
    }
    EXPECT_EQ(pipeline_.read_status(stream()), expected.status);
    for (size_t i = 0; i < layers_.size(); ++i) {
        SCOPED_TRACE("layer " + std::to_string(i));
        const reference::LayerOutputs& want = expected.layers[i];
        const Outputs& out = layers_[i].out;
        const auto cache = layers_[i].cache.download<uint8_t>();
        expect_same_bits(cache.data(), after.layers[i].cache.data(), cache.size(), "cache");
        expect_output(out.counts, want.counts, "counts");
        if (portable_) {
            expect_layer_equal(out, after, expected, want);
        } else {
            expect_layer_close(out, after, expected, want);
        }
    }
}

void DeviceStep::expect_layer_equal(const Outputs& out, const StepCase& /*after*/, const ExpectedStep& /*expected*/,
                                    const reference::LayerOutputs& want) const {
    expect_output(out.logits, want.logits, "logits");
    expect_output(out.indices, want.indices, "indices");
    expect_output(out.physical_slots, want.physical_slots, "physical_slots");
    expect_output(out.winner_logits, want.winner_logits, "winner_logits");
}

void DeviceStep::expect_layer_close(const Outputs& out, const StepCase& after, const ExpectedStep& expected,
                                    const reference::LayerOutputs& want) const {
    const auto rows = static_cast<int64_t>(expected.layout.ends.size());
    const auto& ends = expected.layout.ends;
    // What the device selected from: its own logits where they were asked for, else those of the reference, which then must
    // only lie close to its choice.
    std::vector<float> own = want.logits;
    if (out.logits.bytes() != 0) {
        own = out.logits.download<float>();
        own.resize(want.logits.size());
        EXPECT_EQ(tools::check_logits(geometry_, ends, want.logits, own, tools::logit_tolerance(geometry_.cache_format)),
                  "");
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t j = ends[static_cast<size_t>(row)]; j < geometry_.width(); ++j) {
                ASSERT_EQ(own[static_cast<size_t>(row * geometry_.width() + j)], -std::numeric_limits<float>::infinity());
            }
        }
    }
    std::vector<int32_t> indices = out.indices.download<int32_t>();
    indices.resize(want.indices.size());
    std::vector<int64_t> slots(indices.size());
    std::vector<float> winners(indices.size());
    reference::SelectArgs select{.rows = static_cast<int>(rows),
                                 .top_k = geometry_.top_k,
                                 .ends = ends.data(),
                                 .logits = own.data(),
                                 .logits_stride = geometry_.width(),
                                 .row_request = expected.layout.row_request.data(),
                                 .block_table = after.block_table.data(),
                                 .block_table_stride = geometry_.block_table_stride,
                                 .pages = geometry_.pages,
                                 .indices = nullptr,
                                 .counts = nullptr,
                                 .physical_slots = slots.data(),
                                 .winner_logits = winners.data()};
    std::vector<int32_t> best(indices.size());
    select.indices = best.data();
    reference::select(select);
    if (out.logits.bytes() != 0) {
        expect_output(out.indices, best, "indices");
        expect_output(out.physical_slots, slots, "physical_slots");
        expect_output(out.winner_logits, winners, "winner_logits");
        return;
    }
    for (int64_t row = 0; row < rows; ++row) {
        const float* logits = own.data() + row * geometry_.width();
        const int32_t end = ends[static_cast<size_t>(row)];
        const int32_t* chosen = indices.data() + row * geometry_.top_k;
        const int32_t* exact = best.data() + row * geometry_.top_k;
        if (end <= geometry_.top_k) {
            EXPECT_TRUE(std::equal(chosen, chosen + geometry_.top_k, exact)) << "row " << row;
            continue;
        }
        float largest = 0;
        float threshold = std::numeric_limits<float>::infinity();
        for (int32_t j = 0; j < end; ++j) {
            largest = std::max(largest, std::abs(logits[j]));
        }
        for (int i = 0; i < geometry_.top_k; ++i) {
            threshold = std::min(threshold, logits[exact[i]]);
        }
        for (int i = 0; i < geometry_.top_k; ++i) {
            ASSERT_TRUE(chosen[i] >= 0 && chosen[i] < end && (i == 0 || chosen[i] > chosen[i - 1]))
                << "row " << row << ", " << i;
            ASSERT_GE(logits[chosen[i]], threshold - 2 * 2e-3F * largest) << "row " << row << ", index " << chosen[i];
        }
    }
}

std::vector<std::vector<uint8_t>> DeviceStep::snapshot() const {
    std::vector<std::vector<uint8_t>> bytes;
    for (const LayerMemory& layer : layers_) {
        for (const DeviceMemory* memory : {&layer.out.indices, &layer.out.counts, &layer.out.physical_slots,
                                           &layer.out.winner_logits, &layer.out.logits, &layer.cache}) {
            bytes.push_back(memory->download<uint8_t>());
        }
    }
    return bytes;
}

}  // namespace stepgraph::test
