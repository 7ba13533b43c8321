#include <cuda_runtime_api.h>

#include <stepgraph/kernels/error.h>

#include "device_step.h"

namespace stepgraph::test {
namespace {

__global__ void probe_kernel() {}  // compiled for what the library's kernels are compiled for

}  // namespace

bool compiled_with_programmatic_launch() {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, probe_kernel), "cudaFuncGetAttributes");
    return attributes.ptxVersion >= 90;
}

}  // namespace stepgraph::test
