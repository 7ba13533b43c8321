#include "device_step.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <stepgraph/pipeline/pipeline.h>

#include "model.h"

namespace {

using stepgraph::check_cuda;

constexpr stepgraph::Geometry geometry{.heads = model::heads,
                                       .top_k = model::top_k,
                                       .max_rows = max_rows,
                                       .max_requests = max_requests,
                                       .max_model_len = 64 * max_blocks,
                                       .block_table_columns = max_blocks,
                                       .pages = cache_blocks};
constexpr int key_columns = stepgraph::head_dim;
constexpr int packed_columns = key_columns + model::heads;

/// What the indexer reads and what attention reads and writes. Rows behind those of the step hold what an earlier one left.
struct Activations {
    const int32_t* tokens;     // [max_rows]
    int32_t* values;           // [cache_blocks * 64] the engine's own cache, one value a slot
    __nv_bfloat16* iq;         // [max_rows, heads * 128]
    __nv_bfloat16* projected;  // [max_rows, 128 + heads]
    int32_t* predictions;      // [max_rows]
};

/// A row's query for `word` in every head, its own token's key, and head weights of 1. A block a row, a thread a column.
__device__ void project(const Activations& a, int row, int word) {
    const int column = static_cast<int>(threadIdx.x);
    for (int head = 0; head < model::heads; ++head) {
        a.iq[(row * model::heads + head) * key_columns + column] = __float2bfloat16(model::code(word, column));
    }
    a.projected[row * packed_columns + column] = __float2bfloat16(model::code(a.tokens[row], column));
    if (column < model::heads) {
        a.projected[row * packed_columns + key_columns + column] = __float2bfloat16(1.0F);
    }
}

/// Behind the layout, which says where a row's token goes: writes its value there, and makes the first layer's inputs.
__global__ void embed_kernel(Activations a, const int64_t* slots, const int32_t* ends) {
    const int row = static_cast<int>(blockIdx.x);
    if (threadIdx.x == 0 && ends[row] > 0) {  // not padding
        a.values[slots[row]] = model::value(a.tokens[row], ends[row] - 1);
    }
    project(a, row, a.tokens[row]);
}

/// Attends to the values in the slots that the indexer selected, and makes the next layer's inputs.
__global__ void attention_kernel(Activations a, int layer, const int64_t* physical_slots, const int32_t* counts) {
    const int row = static_cast<int>(blockIdx.x);
    int sum = 0;
    for (int i = 0; i < counts[row]; ++i) {
        sum += a.values[physical_slots[row * model::top_k + i]];
    }
    const int word = model::next_word(layer, sum);
    if (threadIdx.x == 0) {
        a.predictions[row] = word;
    }
    project(a, row, word);
}

/// Zeroed device memory, freed with the step.
class Memory {
public:
    Memory() = default;
    ~Memory() {
        for (void* block : blocks_) {
            cudaFree(block);
        }
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    template <typename Element>
    Element* make(size_t n) {
        void* block = nullptr;
        check_cuda(cudaMalloc(&block, n * sizeof(Element)), "cudaMalloc");
        blocks_.push_back(block);
        check_cuda(cudaMemset(block, 0, n * sizeof(Element)), "cudaMemset");
        return static_cast<Element*>(block);
    }
    template <typename Element>
    Element* make(const std::vector<Element>& host) {
        auto* const device = make<Element>(host.size());
        check_cuda(cudaMemcpy(device, host.data(), host.size() * sizeof(Element), cudaMemcpyHostToDevice), "cudaMemcpy");
        return device;
    }

private:
    std::vector<void*> blocks_;
};

}  // namespace

struct DeviceStep::Parts {
    Parts();
    ~Parts();
    void capture();
    template <typename Element>
    void upload(Element* to, const std::vector<Element>& from) const {
        check_cuda(cudaMemcpyAsync(to, from.data(), from.size() * sizeof(Element), cudaMemcpyHostToDevice, stream),
                   "cudaMemcpyAsync");
    }

    Memory memory;
    cudaStream_t stream = nullptr;
    cudaGraphExec_t graph = nullptr;
    stepgraph::Pipeline pipeline{geometry};

    int32_t* seq_lens = memory.make<int32_t>(max_requests);
    int32_t* query_lens = memory.make<int32_t>(max_requests);
    int32_t* block_table = memory.make<int32_t>(max_requests * max_blocks);
    int32_t* tokens = memory.make<int32_t>(max_rows);
    Activations activations{tokens, memory.make<int32_t>(cache_blocks * 64),
                            memory.make<__nv_bfloat16>(max_rows* model::heads* key_columns),
                            memory.make<__nv_bfloat16>(max_rows* packed_columns), memory.make<int32_t>(max_rows)};
    std::vector<stepgraph::LayerBuffers> layers;
};

DeviceStep::Parts::Parts() {
    const float* const ones = memory.make(std::vector<float>(key_columns, 1.0F));
    const float* const zeros = memory.make<float>(key_columns);
    const size_t cache_bytes = cache_blocks * static_cast<size_t>(pipeline.geometry().page_stride_bytes);
    for (int layer = 0; layer < model::layers; ++layer) {
        // Every layer reads the same activations, for they have been used when attention writes the next layer's.
        layers.push_back({.iq = activations.iq,
                          .projected = activations.projected,
                          .k_norm_weight = ones,
                          .k_norm_bias = zeros,
                          .cache = memory.make<uint8_t>(cache_bytes),
                          .indices = memory.make<int32_t>(max_rows * model::top_k),
                          .counts = memory.make<int32_t>(max_rows),
                          .physical_slots = memory.make<int64_t>(max_rows * model::top_k)});
    }
    const size_t workspace_bytes = pipeline.workspace_bytes();
    pipeline.bind({.seq_lens = seq_lens, .query_lens = query_lens, .block_table = block_table}, layers,
                  {memory.make<char>(workspace_bytes), workspace_bytes});
    // The stream does not wait for the fills and copies above, which went another way.
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    capture();
}

DeviceStep::Parts::~Parts() {
    cudaStreamSynchronize(stream);
    cudaGraphExecDestroy(graph);
    cudaStreamDestroy(stream);
}

void DeviceStep::Parts::capture() {
    const stepgraph::StepState state = pipeline.state();
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    pipeline.enqueue_layout(max_rows, stream);
    embed_kernel<<<max_rows, key_columns, 0, stream>>>(activations, state.slots, state.ends);
    for (int layer = 0; layer < model::layers; ++layer) {
        pipeline.enqueue_layer(layer, max_rows, stream);
        const stepgraph::LayerBuffers& buffers = layers[static_cast<size_t>(layer)];
        attention_kernel<<<max_rows, key_columns, 0, stream>>>(activations, layer, buffers.physical_slots, buffers.counts);
    }
    check_cuda(cudaGetLastError(), "the engine's kernels");
    cudaGraph_t captured = nullptr;
    check_cuda(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture");
    const cudaError_t instantiated = cudaGraphInstantiate(&graph, captured, 0);
    cudaGraphDestroy(captured);
    check_cuda(instantiated, "cudaGraphInstantiate");
}

DeviceStep::DeviceStep() : parts_(std::make_unique<Parts>()) {}
DeviceStep::~DeviceStep() = default;

std::vector<int> DeviceStep::run(const std::vector<Scheduled>& step) {
    // Requests that are not there have no rows; what their blocks say is not read.
    std::vector<int32_t> seq_lens(max_requests, 0);
    std::vector<int32_t> query_lens(max_requests, 0);
    std::vector<int32_t> block_table(max_requests * max_blocks, -1);
    std::vector<int32_t> tokens;
    for (size_t q = 0; q < step.size(); ++q) {
        const Scheduled& request = step[q];
        seq_lens[q] = request.computed + request.rows;
        query_lens[q] = request.rows;
        std::copy(request.blocks.begin(), request.blocks.end(), block_table.begin() + static_cast<int64_t>(q) * max_blocks);
        const auto first = request.tokens.begin() + request.computed;
        tokens.insert(tokens.end(), first, first + request.rows);
    }
    parts_->upload(parts_->seq_lens, seq_lens);
    parts_->upload(parts_->query_lens, query_lens);
    parts_->upload(parts_->block_table, block_table);
    parts_->upload(parts_->tokens, tokens);
    check_cuda(cudaGraphLaunch(parts_->graph, parts_->stream), "cudaGraphLaunch");
    std::vector<int> predictions(tokens.size());
    check_cuda(cudaMemcpyAsync(predictions.data(), parts_->activations.predictions, predictions.size() * sizeof(int),
                               cudaMemcpyDeviceToHost, parts_->stream),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(parts_->stream), "the step");
    return predictions;
}

void DeviceStep::check_data() const {
    if (parts_->pipeline.read_status(parts_->stream) != stepgraph::StepStatus{}) {
        throw std::runtime_error("the pipeline met wrong data");
    }
}
