#include "check_buffers.h"

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

namespace stepgraph {
namespace {

struct Operand {
    std::string name;
    const void* pointer;
    size_t alignment;
    bool required;
};

std::vector<Operand> operands(const StepBuffers& step, const Workspace& workspace) {
    return {{"step buffers: seq_lens", step.seq_lens, 4, true},
            {"step buffers: query_lens", step.query_lens, 4, true},
            {"step buffers: num_requests", step.num_requests, 4, false},
            {"step buffers: block_table", step.block_table, 4, true},
            {"step buffers: slots", step.slots, 8, false},
            {"workspace", workspace.data, 256, true}};
}

std::vector<Operand> operands(const LayerBuffers& layer, size_t index) {
    const std::string prefix = "layer " + std::to_string(index) + ": ";
    const bool projected_here = layer.iq == nullptr && layer.projected == nullptr;
    return {{prefix + "q_c", layer.q_c, 16, projected_here},
            {prefix + "hidden", layer.hidden, 16, projected_here},
            {prefix + "wq_b", layer.wq_b, 16, projected_here},
            {prefix + "w_kv", layer.w_kv, 16, projected_here},
            {prefix + "iq", layer.iq, 16, !projected_here},
            {prefix + "projected", layer.projected, 16, !projected_here},
            {prefix + "k_norm_weight", layer.k_norm_weight, 16, true},
            {prefix + "k_norm_bias", layer.k_norm_bias, 16, true},
            {prefix + "cache", layer.cache, 4, true},
            {prefix + "indices", layer.indices, 4, true},
            {prefix + "counts", layer.counts, 4, false},
            {prefix + "physical_slots", layer.physical_slots, 8, false},
            {prefix + "winner_logits", layer.winner_logits, 4, false},
            {prefix + "logits", layer.logits, 4, false}};
}

[[noreturn]] void refuse(const Operand& operand, const std::string& must) {
    std::ostringstream sentence;
    sentence << operand.name << " is ";
    if (operand.pointer == nullptr) {
        sentence << "null";
    } else {
        sentence << operand.pointer;
    }
    sentence << ", must be " << must;
    throw Error(ErrorCode::invalid_buffer, sentence.str());
}

void check_address(const Operand& operand) {
    if (operand.pointer == nullptr && operand.required) {
        refuse(operand, "a device pointer aligned to " + std::to_string(operand.alignment) + " bytes");
    }
    if (reinterpret_cast<uintptr_t>(operand.pointer) % operand.alignment != 0) {
        refuse(operand, "aligned to " + std::to_string(operand.alignment) + " bytes");
    }
}

/// Whose projections: the four inputs of the products, or their two results, and nothing of the other kind.
void check_whose_projections(const Geometry& geometry, const LayerBuffers& layer, size_t index) {
    const bool any_result = layer.iq != nullptr || layer.projected != nullptr;
    for (const Operand& operand : operands(layer, index)) {
        const bool is_input = operand.pointer == layer.q_c || operand.pointer == layer.hidden ||
                              operand.pointer == layer.wq_b || operand.pointer == layer.w_kv;
        if (operand.pointer != nullptr && is_input && any_result) {
            refuse(operand, "null where iq and projected are handed over");
        }
    }
    if (!any_result && !geometry.projects()) {
        refuse({"layer " + std::to_string(index) + ": iq", layer.iq, 16, true},
               "handed over, for the geometry's q_lora_rank and hidden_size are 0");
    }
}

void check_reachable(const Operand& operand, int device) {
    if (operand.pointer == nullptr) {
        return;
    }
    cudaPointerAttributes attributes{};
    check_cuda(cudaPointerGetAttributes(&attributes, operand.pointer), "cudaPointerGetAttributes");
    if (attributes.type == cudaMemoryTypeUnregistered) {
        refuse(operand, "device memory, and is ordinary host memory");
    }
    if (attributes.type == cudaMemoryTypeHost && attributes.devicePointer != operand.pointer) {
        refuse(operand, "memory that the device reaches under the same address");
    }
    if (attributes.type == cudaMemoryTypeDevice && attributes.device != device) {
        refuse(operand, "on device " + std::to_string(device) + ", the current one, and is on device " +
                            std::to_string(attributes.device));
    }
}

}  // namespace

void check_addresses(const Geometry& geometry, const StepBuffers& step, std::span<const LayerBuffers> layers,
                     const Workspace& workspace, size_t workspace_bytes) {
    if (layers.empty()) {
        throw Error(ErrorCode::invalid_buffer, "layers is empty, must hold the buffers of at least one layer");
    }
    for (const Operand& operand : operands(step, workspace)) {
        check_address(operand);
    }
    if (workspace.bytes < workspace_bytes) {
        throw Error(ErrorCode::workspace_too_small, "workspace is " + std::to_string(workspace.bytes) +
                                                        " bytes, must be at least " + std::to_string(workspace_bytes) +
                                                        " (workspace_bytes())");
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        check_whose_projections(geometry, layers[i], i);
        for (const Operand& operand : operands(layers[i], i)) {
            check_address(operand);
        }
    }
}

void check_device_memory(const StepBuffers& step, std::span<const LayerBuffers> layers, const Workspace& workspace) {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    for (const Operand& operand : operands(step, workspace)) {
        check_reachable(operand, device);
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        for (const Operand& operand : operands(layers[i], i)) {
            check_reachable(operand, device);
        }
    }
}

}  // namespace stepgraph
