// The smallest program against the installed package: asks a pipeline what it needs, and runs one step where there is a GPU.
#include <cstdint>
#include <cstdio>
#include <vector>

#include <cuda_runtime_api.h>

#include <stepgraph/pipeline/pipeline.h>

namespace {

/// Device memory filled with zeros; this program ends before it would be freed.
template <typename Element>
Element* zeros(size_t n) {
    void* memory = nullptr;
    stepgraph::check_cuda(cudaMalloc(&memory, n * sizeof(Element)), "cudaMalloc");
    stepgraph::check_cuda(cudaMemset(memory, 0, n * sizeof(Element)), "cudaMemset");
    return static_cast<Element*>(memory);
}

}  // namespace

int main() try {
    const stepgraph::Geometry geometry{.heads = 32,
                                       .top_k = 8,
                                       .max_rows = 2,
                                       .max_requests = 2,
                                       .max_model_len = 256,
                                       .block_table_columns = 4,
                                       .pages = 8};
    stepgraph::Pipeline pipeline{geometry};
    std::printf("workspace: %zu bytes, tiles of %d rows\n", pipeline.workspace_bytes(), pipeline.tile_rows());

    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("there is no GPU: nothing is run\n");
        return 0;
    }
    const stepgraph::Geometry& g = pipeline.geometry();
    const stepgraph::StepBuffers step{
        .seq_lens = zeros<int32_t>(2), .query_lens = zeros<int32_t>(2), .block_table = zeros<int32_t>(8)};
    const stepgraph::LayerBuffers layer{.iq = zeros<__nv_bfloat16>(2 * 32 * 128),
                                        .projected = zeros<__nv_bfloat16>(static_cast<size_t>(2 * g.projected_columns)),
                                        .k_norm_weight = zeros<float>(128),
                                        .k_norm_bias = zeros<float>(128),
                                        .cache = zeros<uint8_t>(static_cast<size_t>(g.pages * g.page_stride_bytes)),
                                        .indices = zeros<int32_t>(2 * 8)};
    pipeline.bind(step, {&layer, 1}, {zeros<char>(pipeline.workspace_bytes()), pipeline.workspace_bytes()});
    pipeline.capture({2});
    pipeline.replay(2, cudaStreamPerThread);
    stepgraph::check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "the step");

    std::vector<int32_t> indices(16);
    stepgraph::check_cuda(cudaMemcpy(indices.data(), layer.indices, 64, cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (const int32_t index : indices) {
        if (index != -1) {  // both requests are empty: every row is padding
            std::printf("an index is %d, must be -1\n", index);
            return 1;
        }
    }
    std::printf("one step was replayed\n");
    return 0;
} catch (const stepgraph::Error& error) {
    std::printf("%s\n", error.what());
    return 1;
}
