// What the README's snippets take for granted: an engine, a stream, and, behind the first one, a pipeline.
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include <stepgraph/pipeline/pipeline.h>

struct Engine {
    void* allocate(size_t bytes);
    stepgraph::StepBuffers step_buffers();
    std::vector<stepgraph::LayerBuffers> layer_buffers();
    void attention(int layer, int rows, cudaStream_t stream);
    int next_step(cudaStream_t stream);
    void report(uint32_t invalid_slots, uint32_t invalid_blocks, uint32_t clamped_bounds, uint32_t dropped_rows);
};

#if defined(SNIPPET_0)
#define SNIPPET_FUNCTION void snippet(Engine& engine, cudaStream_t stream)
#elif defined(SNIPPET_1)
#define SNIPPET_FUNCTION \
    void snippet(stepgraph::Pipeline& pipeline, Engine& engine, int rows, int layers, cudaStream_t stream)
#else
#define SNIPPET_FUNCTION void snippet(stepgraph::Pipeline& pipeline, Engine& engine, cudaStream_t stream)
#endif
SNIPPET_FUNCTION;
