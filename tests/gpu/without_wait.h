// The library's kernels compiled without their wait: what the hostile producer must be able to break.
#pragma once

#include <cuda_runtime_api.h>

namespace stepgraph::test {

/// Each takes the Args struct of the stage of the same name, and enqueues it with a programmatic edge.
void schedule_without_wait(const void* args, cudaStream_t stream);
void index_inputs_without_wait(const void* args, cudaStream_t stream);
void project_sm90_without_wait(const void* args, cudaStream_t stream);
void score_without_wait(const void* args, int blocks, cudaStream_t stream);
void score_sm90_without_wait(const void* args, int blocks, cudaStream_t stream);
void select_without_wait(const void* args, cudaStream_t stream);
void select_sm90_without_wait(const void* args, cudaStream_t stream);

}  // namespace stepgraph::test
