#include "serving_device.h"

#include <algorithm>

#include <stepgraph/pipeline/own_stream.h>

#include "device_buffer.h"
#include "stopwatch.h"

namespace stepgraph::tools {
namespace {

/// An input that the host rewrites every step. Its copies are from pinned memory, which alone does not make the host wait.
class StepInput {
public:
    explicit StepInput(size_t size) : device_(size) {
        check_cuda(cudaMallocHost(reinterpret_cast<void**>(&pinned_), size * sizeof(int32_t)), "cudaMallocHost");
    }
    ~StepInput() { cudaFreeHost(pinned_); }
    StepInput(const StepInput&) = delete;
    StepInput& operator=(const StepInput&) = delete;

    [[nodiscard]] const int32_t* data() const { return device_.data(); }
    /// Enqueues the copy of the first `count` elements; the one before has ended.
    void update(const std::vector<int32_t>& host, size_t count, cudaStream_t stream) {
        std::copy_n(host.begin(), count, pinned_);
        check_cuda(cudaMemcpyAsync(device_.data(), pinned_, count * sizeof(int32_t), cudaMemcpyHostToDevice, stream),
                   "cudaMemcpyAsync");
    }

private:
    DeviceBuffer<int32_t> device_;
    int32_t* pinned_ = nullptr;
};

struct LayerMemory {
    DeviceBuffer<__nv_bfloat16> all_q_c, all_hidden;  // of which each step takes others
    DeviceBuffer<__nv_bfloat16> q_c, hidden, wq_b, w_kv;
    DeviceBuffer<float> k_norm_weight, k_norm_bias;
    DeviceBuffer<uint8_t> cache;
    DeviceBuffer<int32_t> indices, counts;
};

LayerBuffers buffers_of(const LayerMemory& layer) {
    return {.q_c = layer.q_c.data(),
            .hidden = layer.hidden.data(),
            .wq_b = layer.wq_b.data(),
            .w_kv = layer.w_kv.data(),
            .k_norm_weight = layer.k_norm_weight.data(),
            .k_norm_bias = layer.k_norm_bias.data(),
            .cache = layer.cache.data(),
            .indices = layer.indices.data(),
            .counts = layer.counts.data()};
}

template <typename Element>
void copy_on_device(Element* to, const Element* from, size_t count, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(to, from, count * sizeof(Element), cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
}

template <typename Element>
std::vector<Element> download(const Element* device, size_t count) {
    std::vector<Element> host(count);
    check_cuda(cudaMemcpy(host.data(), device, count * sizeof(Element), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
}

}  // namespace

struct ServingDevice::Memory {
    explicit Memory(const Geometry& g)
        : seq_lens(static_cast<size_t>(g.max_requests)),
          query_lens(static_cast<size_t>(g.max_requests)),
          num_requests(1),
          block_table(static_cast<size_t>(g.max_requests * g.block_table_stride)),
          logits(static_cast<size_t>(g.max_rows * g.width())),
          indices(static_cast<size_t>(g.max_rows) * static_cast<size_t>(g.top_k)) {}

    [[nodiscard]] StepBuffers step_buffers() const {
        return {.seq_lens = seq_lens.data(),
                .query_lens = query_lens.data(),
                .num_requests = num_requests.data(),
                .block_table = block_table.data()};
    }

    StepInput seq_lens, query_lens, num_requests, block_table;
    DeviceBuffer<uint8_t> prompt_pool;
    std::vector<LayerMemory> layers;
    DeviceBuffer<char> workspace, workspace_with_logits;
    DeviceBuffer<float> logits;     // of the layer that is looked at
    DeviceBuffer<int32_t> indices;  // likewise, not those of the replay
    OwnStream stream;
    Stopwatch stopwatch;
};

ServingDevice::ServingDevice(const Geometry& g, const Options& options, const ServingModel& model)
    : memory_(std::make_unique<Memory>(g)), pipeline_(g, options), with_logits_(g, options) {
    Memory& m = *memory_;
    const auto rows = static_cast<size_t>(g.max_rows);
    m.prompt_pool = DeviceBuffer<uint8_t>(model.prompt_pool());
    std::vector<LayerBuffers> buffers;
    std::vector<LayerBuffers> buffers_with_logits;
    for (const ServingLayer& layer : model.layers) {
        m.layers.push_back({.all_q_c = DeviceBuffer<__nv_bfloat16>(layer.q_c),
                            .all_hidden = DeviceBuffer<__nv_bfloat16>(layer.hidden),
                            .q_c = DeviceBuffer<__nv_bfloat16>(rows * static_cast<size_t>(g.q_lora_rank)),
                            .hidden = DeviceBuffer<__nv_bfloat16>(rows * static_cast<size_t>(g.hidden_size)),
                            .wq_b = DeviceBuffer<__nv_bfloat16>(layer.wq_b),
                            .w_kv = DeviceBuffer<__nv_bfloat16>(layer.w_kv),
                            .k_norm_weight = DeviceBuffer<float>(layer.k_norm_weight),
                            .k_norm_bias = DeviceBuffer<float>(layer.k_norm_bias),
                            .cache = DeviceBuffer<uint8_t>(static_cast<size_t>(g.pages * g.page_stride_bytes)),
                            .indices = DeviceBuffer<int32_t>(rows * static_cast<size_t>(g.top_k)),
                            .counts = DeviceBuffer<int32_t>(rows)});
        m.layers.back().cache.poison(0);
        buffers.push_back(buffers_of(m.layers.back()));
        buffers_with_logits.push_back(buffers.back());
        buffers_with_logits.back().indices = m.indices.data();
        buffers_with_logits.back().counts = nullptr;
        buffers_with_logits.back().logits = m.logits.data();
    }
    m.workspace = DeviceBuffer<char>(pipeline_.workspace_bytes());
    m.workspace_with_logits = DeviceBuffer<char>(with_logits_.workspace_bytes());
    pipeline_.bind(m.step_buffers(), buffers, {m.workspace.data(), m.workspace.size()});
    with_logits_.bind(m.step_buffers(), buffers_with_logits,
                      {m.workspace_with_logits.data(), m.workspace_with_logits.size()});
    pipeline_.capture(serving_buckets(g.max_rows));
    for (const GraphEdge& edge : pipeline_.graph(g.max_rows).edges()) {
        ++(edge.programmatic ? programmatic_edges_ : full_edges_);
    }
}

ServingDevice::~ServingDevice() = default;

void ServingDevice::write(const std::vector<PromptPage>& prompt) {
    const int64_t stride = pipeline_.geometry().page_stride_bytes;
    for (const PromptPage& page : prompt) {
        copy_on_device(page_address(memory_->layers[page.layer].cache.data(), page.page, stride),
                       page_address(memory_->prompt_pool.data(), static_cast<int64_t>(page.drawn), stride),
                       static_cast<size_t>(stride), memory_->stream);
    }
}

void ServingDevice::poison_outputs() {
    memory_->logits.poison();
    for (LayerMemory& layer : memory_->layers) {
        layer.indices.poison();
        layer.counts.poison();
    }
}

double ServingDevice::step(const ServingBatch& batch, const ServingModel& model) {
    Memory& m = *memory_;
    const Geometry& g = pipeline_.geometry();
    const auto live = static_cast<size_t>(batch.live());
    m.seq_lens.update(batch.seq_lens, live, m.stream);
    m.query_lens.update(batch.query_lens, live, m.stream);
    m.num_requests.update(batch.num_requests, 1, m.stream);
    m.block_table.update(batch.block_table, live * static_cast<size_t>(g.block_table_stride), m.stream);
    for (const LayerMemory& layer : m.layers) {
        copy_on_device(layer.q_c.data(), layer.all_q_c.data() + model.first_activation() * g.q_lora_rank, layer.q_c.size(),
                       m.stream);
        copy_on_device(layer.hidden.data(), layer.all_hidden.data() + model.first_activation() * g.hidden_size,
                       layer.hidden.size(), m.stream);
    }
    m.stopwatch.start(m.stream);
    pipeline_.replay(batch.rows(), m.stream);
    return m.stopwatch.stop_us(m.stream);
}

DeviceLayerResult ServingDevice::result(int layer, int bucket) {
    Memory& m = *memory_;
    const Geometry& g = pipeline_.geometry();
    if (layer == 0) {
        with_logits_.enqueue_layout(bucket, m.stream);
    }
    with_logits_.enqueue_layer(layer, bucket, m.stream);
    m.stream.synchronise();
    const LayerMemory& l = m.layers[static_cast<size_t>(layer)];
    const auto rows = static_cast<size_t>(bucket);
    return {.indices = download(l.indices.data(), rows * static_cast<size_t>(g.top_k)),
            .counts = download(l.counts.data(), rows),
            .cache = cache(layer),
            .iq = download(with_logits_.state().iq, rows * static_cast<size_t>(g.heads * head_dim)),
            .projected = download(with_logits_.state().projected, rows * static_cast<size_t>(g.projected_columns)),
            .logits = download(m.logits.data(), rows * static_cast<size_t>(g.width()))};
}

std::vector<uint8_t> ServingDevice::cache(int layer) const {
    memory_->stream.synchronise();
    return memory_->layers[static_cast<size_t>(layer)].cache.download();
}

StepStatus ServingDevice::status() const {
    return pipeline_.read_status(memory_->stream);
}

}  // namespace stepgraph::tools
