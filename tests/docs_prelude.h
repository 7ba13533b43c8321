// What the snippets of docs/ take for granted.
#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include <stepgraph/pipeline/pipeline.h>

struct Engine {
    void* allocate(size_t bytes);
    stepgraph::StepBuffers step_buffers();
    std::vector<stepgraph::LayerBuffers> layer_buffers();
    void attention(int layer, int rows, cudaStream_t stream);
    void write_lengths(void* pinned);
    void show(float value);
};

#define SNIPPET_FUNCTION                                                                                            \
    void snippet([[maybe_unused]] stepgraph::Pipeline& pipeline, [[maybe_unused]] Engine& engine,                   \
                 [[maybe_unused]] Engine& other, [[maybe_unused]] int rows, [[maybe_unused]] int layers,            \
                 [[maybe_unused]] cudaStream_t stream, [[maybe_unused]] cudaStream_t other_stream,                  \
                 [[maybe_unused]] cudaStream_t copy_stream, [[maybe_unused]] cudaEvent_t copied,                    \
                 [[maybe_unused]] cudaEvent_t taken, [[maybe_unused]] void* device, [[maybe_unused]] void* staging, \
                 [[maybe_unused]] void* pinned, [[maybe_unused]] size_t bytes, [[maybe_unused]] const uint8_t* cache)
SNIPPET_FUNCTION;
