#include "demo_device.h"

#include <algorithm>

#include "device_buffer.h"

namespace stepgraph::tools {
namespace {

struct LayerMemory {
    DeviceBuffer<__nv_bfloat16> q_c, hidden, wq_b, w_kv;
    DeviceBuffer<__nv_bfloat16> iq, projected;  // copies, for the comparison: the pipeline's own are shared by all layers
    DeviceBuffer<float> k_norm_weight, k_norm_bias, logits;
    DeviceBuffer<uint8_t> cache;
    DeviceBuffer<int32_t> indices, counts;
};

template <typename Element>
std::vector<Element> first_rows(const DeviceBuffer<Element>& buffer, int rows, int max_rows) {
    std::vector<Element> all = buffer.download();
    all.resize(all.size() / static_cast<size_t>(max_rows) * static_cast<size_t>(rows));
    return all;
}

}  // namespace

struct DemoDevice::Memory {
    DeviceBuffer<int32_t> seq_lens, query_lens, num_requests, block_table;
    DeviceBuffer<char> workspace;
    std::vector<LayerMemory> layers;
    cudaStream_t stream = nullptr;
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;

    ~Memory() {
        cudaEventDestroy(begin);
        cudaEventDestroy(end);
        cudaStreamDestroy(stream);
    }
};

DemoDevice::DemoDevice(const Geometry& g, const Options& options, const DemoModel& model)
    : memory_(std::make_unique<Memory>()), pipeline_(g, options) {
    Memory& m = *memory_;
    check_cuda(cudaStreamCreateWithFlags(&m.stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check_cuda(cudaEventCreate(&m.begin), "cudaEventCreate");
    check_cuda(cudaEventCreate(&m.end), "cudaEventCreate");
    const auto rows = static_cast<size_t>(g.max_rows);
    const auto requests = static_cast<size_t>(g.max_requests);
    m.seq_lens = DeviceBuffer<int32_t>(requests);
    m.query_lens = DeviceBuffer<int32_t>(requests);
    m.num_requests = DeviceBuffer<int32_t>(1);
    m.block_table = DeviceBuffer<int32_t>(requests * static_cast<size_t>(g.block_table_stride));
    m.workspace = DeviceBuffer<char>(pipeline_.workspace_bytes());

    std::vector<LayerBuffers> buffers;
    for (const DemoLayer& layer : model.layers) {
        LayerMemory l{.q_c = DeviceBuffer<__nv_bfloat16>(rows * static_cast<size_t>(g.q_lora_rank)),
                      .hidden = DeviceBuffer<__nv_bfloat16>(rows * static_cast<size_t>(g.hidden_size)),
                      .wq_b = DeviceBuffer<__nv_bfloat16>(layer.wq_b),
                      .w_kv = DeviceBuffer<__nv_bfloat16>(layer.w_kv),
                      .iq = DeviceBuffer<__nv_bfloat16>(rows * static_cast<size_t>(g.heads * head_dim)),
                      .projected = DeviceBuffer<__nv_bfloat16>(rows * static_cast<size_t>(g.projected_columns)),
                      .k_norm_weight = DeviceBuffer<float>(layer.k_norm_weight),
                      .k_norm_bias = DeviceBuffer<float>(layer.k_norm_bias),
                      .logits = DeviceBuffer<float>(rows * static_cast<size_t>(g.width())),
                      .cache = DeviceBuffer<uint8_t>(layer.cache),
                      .indices = DeviceBuffer<int32_t>(rows * static_cast<size_t>(g.top_k)),
                      .counts = DeviceBuffer<int32_t>(rows)};
        buffers.push_back({.q_c = l.q_c.data(),
                           .hidden = l.hidden.data(),
                           .wq_b = l.wq_b.data(),
                           .w_kv = l.w_kv.data(),
                           .k_norm_weight = l.k_norm_weight.data(),
                           .k_norm_bias = l.k_norm_bias.data(),
                           .cache = l.cache.data(),
                           .indices = l.indices.data(),
                           .counts = l.counts.data(),
                           .logits = l.logits.data()});
        m.layers.push_back(std::move(l));
    }
    pipeline_.bind({.seq_lens = m.seq_lens.data(),
                    .query_lens = m.query_lens.data(),
                    .num_requests = m.num_requests.data(),
                    .block_table = m.block_table.data()},
                   buffers, {m.workspace.data(), m.workspace.size()});

    std::vector<int> buckets;
    for (int bucket = 1; bucket < g.max_rows; bucket *= 2) {
        buckets.push_back(bucket);
    }
    buckets.push_back(g.max_rows);
    // Where an engine enqueues its attention, this one keeps a layer's projections, which the next layer overwrites.
    pipeline_.capture(buckets, [this](int layer, int /*rows*/, cudaStream_t stream) {
        const StepState state = pipeline_.state();
        LayerMemory& l = memory_->layers[static_cast<size_t>(layer)];
        check_cuda(cudaMemcpyAsync(l.iq.data(), state.iq, l.iq.size() * 2, cudaMemcpyDeviceToDevice, stream),
                   "cudaMemcpyAsync");
        check_cuda(
            cudaMemcpyAsync(l.projected.data(), state.projected, l.projected.size() * 2, cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpyAsync");
    });
    for (const GraphEdge& edge : pipeline_.graph(g.max_rows).edges()) {
        ++(edge.programmatic ? programmatic_edges_ : full_edges_);
    }
}

DemoDevice::~DemoDevice() = default;

void DemoDevice::upload_caches(const DemoModel& model) {
    for (size_t i = 0; i < model.layers.size(); ++i) {
        memory_->layers[i].cache.upload(model.layers[i].cache);
    }
}

DeviceStepResult DemoDevice::step(const ServingBatch& batch, const DemoModel& model) {
    Memory& m = *memory_;
    m.seq_lens.upload(batch.seq_lens);
    m.query_lens.upload(batch.query_lens);
    m.num_requests.upload(batch.num_requests);
    m.block_table.upload(batch.block_table);
    for (size_t i = 0; i < m.layers.size(); ++i) {
        m.layers[i].q_c.upload(model.layers[i].q_c);
        m.layers[i].hidden.upload(model.layers[i].hidden);
        m.layers[i].indices.poison();
        m.layers[i].counts.poison();
        m.layers[i].logits.poison();
    }
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");

    check_cuda(cudaEventRecord(m.begin, m.stream), "cudaEventRecord");
    pipeline_.replay(batch.rows(), m.stream);
    check_cuda(cudaEventRecord(m.end, m.stream), "cudaEventRecord");
    check_cuda(cudaStreamSynchronize(m.stream), "cudaStreamSynchronize");

    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, m.begin, m.end), "cudaEventElapsedTime");
    const std::vector<int> buckets = pipeline_.buckets();
    DeviceStepResult result;
    result.bucket = *std::lower_bound(buckets.begin(), buckets.end(), batch.rows());
    result.microseconds = double{milliseconds} * 1e3;
    result.status = pipeline_.read_status(m.stream);
    const int max_rows = pipeline_.geometry().max_rows;
    for (const LayerMemory& l : m.layers) {
        result.layers.push_back({.iq = first_rows(l.iq, result.bucket, max_rows),
                                 .projected = first_rows(l.projected, result.bucket, max_rows),
                                 .logits = first_rows(l.logits, result.bucket, max_rows),
                                 .indices = first_rows(l.indices, result.bucket, max_rows),
                                 .counts = first_rows(l.counts, result.bucket, max_rows),
                                 .cache = l.cache.download()});
    }
    return result;
}

}  // namespace stepgraph::tools
