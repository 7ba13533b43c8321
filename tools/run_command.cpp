#include "run_command.h"

#include <algorithm>
#include <iostream>
#include <string>
#include <system_error>

#include <cuda_runtime_api.h>

#include <stepgraph/kernels/reference/step.h>
#include <stepgraph/pipeline/own_stream.h>
#include <stepgraph/pipeline/pipeline.h>

#include "cuda_device.h"
#include "device_buffer.h"
#include "reference_shape.h"

namespace stepgraph::tools {
namespace {

template <typename Element>
const Element* data_or_null(const std::vector<Element>& elements) {
    return elements.empty() ? nullptr : elements.data();
}

size_t count_of(int64_t a, int64_t b) {
    return static_cast<size_t>(a) * static_cast<size_t>(b);
}

/// Where the engine hands its slots over, what stands behind the live rows is stale.
void clear_padding_slots(StepResults& results) {
    const auto live = std::min(static_cast<size_t>(results.starts.back()), results.slots.size());
    std::fill(results.slots.begin() + static_cast<std::ptrdiff_t>(live), results.slots.end(), -1);
}

/// The case's tensors and the step's outputs in device memory.
struct DeviceStep {
    DeviceStep(const Case& step, size_t workspace_bytes, bool with_logits);
    [[nodiscard]] StepBuffers step_buffers() const;
    [[nodiscard]] LayerBuffers layer_buffers() const;

    DeviceBuffer<int32_t> seq_lens, query_lens, block_table;
    DeviceBuffer<int64_t> slots;
    DeviceBuffer<__nv_bfloat16> iq, projected, q_c, wq_b, hidden, w_kv;
    DeviceBuffer<float> k_norm_weight, k_norm_bias;
    DeviceBuffer<uint8_t> cache;

    DeviceBuffer<int32_t> indices;
    DeviceBuffer<int64_t> physical_slots;
    DeviceBuffer<float> logits;
    DeviceBuffer<uint8_t> workspace;
};

DeviceStep::DeviceStep(const Case& step, size_t workspace_bytes, bool with_logits)
    : seq_lens(step.seq_lens),
      query_lens(step.query_lens),
      block_table(step.block_table),
      slots(step.slots),
      iq(step.iq),
      projected(step.projected),
      q_c(step.q_c),
      wq_b(step.wq_b),
      hidden(step.hidden),
      w_kv(step.w_kv),
      k_norm_weight(step.k_norm_weight),
      k_norm_bias(step.k_norm_bias),
      cache(step.cache),
      indices(count_of(step.geometry.max_rows, step.geometry.top_k)),
      physical_slots(indices.size()),
      logits(with_logits ? count_of(step.geometry.max_rows, step.geometry.width()) : 0),
      workspace(workspace_bytes) {
    indices.poison();
    physical_slots.poison();
    logits.poison();
    workspace.poison(0);  // the head weights of padding rows are never written
}

StepBuffers DeviceStep::step_buffers() const {
    return {.seq_lens = seq_lens.data(),
            .query_lens = query_lens.data(),
            .num_requests = nullptr,
            .block_table = block_table.data(),
            .slots = slots.data()};
}

LayerBuffers DeviceStep::layer_buffers() const {
    return {.q_c = q_c.data(),
            .hidden = hidden.data(),
            .wq_b = wq_b.data(),
            .w_kv = w_kv.data(),
            .iq = iq.data(),
            .projected = projected.data(),
            .k_norm_weight = k_norm_weight.data(),
            .k_norm_bias = k_norm_bias.data(),
            .cache = cache.data(),
            .indices = indices.data(),
            .counts = nullptr,
            .physical_slots = physical_slots.data(),
            .winner_logits = nullptr,
            .logits = logits.data()};
}

template <typename Element>
std::vector<Element> download(const Element* device, size_t elements) {
    std::vector<Element> host(elements);
    check_cuda(cudaMemcpy(host.data(), device, elements * sizeof(Element), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
}

void report(const StepStatus& status) {
    if (status == StepStatus{}) {
        return;
    }
    std::cout << "wrong data was skipped: invalid_slots " << status.invalid_slots << ", invalid_blocks "
              << status.invalid_blocks << ", clamped_bounds " << status.clamped_bounds << ", dropped_rows "
              << status.dropped_rows << "\n";
}

/// The device that the option means here, and a line that says so.
Device chosen_device(const RunOptions& options) {
    if (options.device == Device::cpu) {
        std::cout << "device: cpu\n";
        return Device::cpu;
    }
    if (options.device == Device::automatic) {
        const std::string reason = why_no_device();
        if (!reason.empty()) {
            std::cout << "device: cpu, for no GPU can be used (" << reason << ")\n";
            return Device::cpu;
        }
    }
    require_device("run --device cuda", "--device cpu computes the same on the host");
    int device = 0;
    cudaDeviceProp properties{};
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    std::cout << "device: cuda " << device << ", " << properties.name << ", "
              << (options.launch == Launch::graph ? "captured and replayed" : "eager") << "\n";
    return Device::cuda;
}

}  // namespace

StepResults run_on_cpu(const Case& step, bool logits) {
    const reference::Shape shape = reference_shape(step.geometry, step.geometry.max_rows);
    const reference::StepInputs inputs{.seq_lens = step.seq_lens.data(),
                                       .query_lens = step.query_lens.data(),
                                       .num_requests = nullptr,
                                       .block_table = step.block_table.data(),
                                       .slots = data_or_null(step.slots)};
    StepResults results;
    results.cache = step.cache;
    const reference::Layout layout = reference::decode_layout(shape, inputs, &results.status);
    reference::LayerOutputs layer = reference::layer(shape, inputs,
                                                     {.q_c = data_or_null(step.q_c),
                                                      .hidden = data_or_null(step.hidden),
                                                      .wq_b = data_or_null(step.wq_b),
                                                      .w_kv = data_or_null(step.w_kv),
                                                      .iq = data_or_null(step.iq),
                                                      .projected = data_or_null(step.projected),
                                                      .k_norm_weight = step.k_norm_weight.data(),
                                                      .k_norm_bias = step.k_norm_bias.data(),
                                                      .cache = results.cache.data()},
                                                     layout, logits, &results.status);
    results.starts = layout.starts;
    results.ends = layout.ends;
    results.slots = layout.slots;
    results.head_weights = std::move(layer.head_weights);
    results.indices = std::move(layer.indices);
    results.physical_slots = std::move(layer.physical_slots);
    if (logits) {
        results.logits = std::move(layer.logits);
    }
    clear_padding_slots(results);
    return results;
}

StepResults run_on_cuda(const Case& step, Launch launch, bool logits, const Options& options) {
    const int rows = step.geometry.max_rows;
    Pipeline pipeline(step.geometry, options);
    const DeviceStep device(step, pipeline.workspace_bytes(), logits);
    const LayerBuffers layer = device.layer_buffers();
    const OwnStream stream;
    pipeline.bind(device.step_buffers(), {&layer, 1}, {device.workspace.data(), device.workspace.size()});
    // The stream does not wait for the copies and fills above, which went another way.
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    if (launch == Launch::graph) {
        pipeline.capture({rows});
        pipeline.replay(rows, stream);
    } else {
        pipeline.enqueue_layout(rows, stream);
        pipeline.enqueue_layer(0, rows, stream);
    }
    stream.synchronise();

    const StepState state = pipeline.state();
    StepResults results;
    results.starts = download(state.starts, static_cast<size_t>(step.geometry.max_requests) + 1);
    results.ends = download(state.ends, static_cast<size_t>(rows));
    results.slots = download(state.slots, static_cast<size_t>(rows));
    results.head_weights = download(state.head_weights, count_of(rows, step.geometry.heads));
    results.cache = device.cache.download();
    results.indices = device.indices.download();
    results.physical_slots = device.physical_slots.download();
    if (logits) {
        results.logits = device.logits.download();
    }
    results.status = pipeline.read_status(stream);
    clear_padding_slots(results);
    return results;
}

Safetensors outputs_of(const Case& step, const StepResults& results, bool logits, bool physical) {
    const Geometry& g = step.geometry;
    const int64_t rows = g.max_rows;
    Safetensors file;
    file.tensors["starts"] = tensor_of(results.starts, {int64_t{g.max_requests} + 1});
    file.tensors["ends"] = tensor_of(results.ends, {rows});
    file.tensors["head_weights"] = tensor_of(results.head_weights, {rows, g.heads});
    file.tensors["cache"] = tensor_of(results.cache, {g.pages, g.page_stride_bytes});
    file.tensors["indices"] = tensor_of(results.indices, {rows, g.top_k});
    file.tensors["slots"] = tensor_of(results.slots, {rows});
    if (logits) {
        file.tensors["logits"] = tensor_of(results.logits, {rows, g.width()});
    }
    if (physical) {
        file.tensors["physical_slots"] = tensor_of(results.physical_slots, {rows, g.top_k});
    }
    return file;
}

int run(const RunOptions& options) {
    std::error_code ignored;
    if (std::filesystem::equivalent(options.case_path, options.out, ignored)) {
        throw CaseError(options.out.string() + ": is the case itself, must be another file");
    }
    const Case step = load_case(options.case_path);
    const Geometry& g = step.geometry;
    std::cout << "case: requests " << g.max_requests << ", rows " << g.max_rows << ", heads " << g.heads << ", "
              << format_name(g.cache_format) << " pages " << g.pages << ", top " << g.top_k << " of at most " << g.width()
              << " positions\n";
    const Device device = chosen_device(options);
    const StepResults results =
        device == Device::cpu ? run_on_cpu(step, options.logits) : run_on_cuda(step, options.launch, options.logits);
    write_safetensors(options.out, outputs_of(step, results, options.logits, options.physical));
    report(results.status);
    std::cout << "wrote: " << options.out.string() << "\n";
    return 0;
}

}  // namespace stepgraph::tools
