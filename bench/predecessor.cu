#include "predecessor.h"

namespace stepgraph::bench {
namespace {

constexpr size_t bytes = size_t{20} << 20U;
constexpr size_t shared_bytes = 97 * 1024;
constexpr unsigned threads = 512;

__global__ void __launch_bounds__(threads) predecessor_kernel(const uint4* from, size_t n, unsigned* sink) {
    wait_for_producers();
    let_consumers_start();
    unsigned sum = 0;
    for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += size_t{gridDim.x} * blockDim.x) {
        sum += from[i].x ^ from[i].y ^ from[i].z ^ from[i].w;
    }
    if (sum == 0x12345678U) {  // keeps the compiler from leaving the reading out
        *sink = sum;
    }
}

}  // namespace

Predecessor::Predecessor() : memory_(bytes), sink_(1) {
    int processors = 0;
    check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
    blocks_ = static_cast<unsigned>(processors);
    memory_.poison(0x3C);
    prepare_kernel(predecessor_kernel, "predecessor", shared_bytes);
}

void Predecessor::enqueue(LaunchContext context) const {
    launch(predecessor_kernel, "predecessor", context, blocks_, threads, shared_bytes,
           reinterpret_cast<const uint4*>(memory_.data()), bytes / sizeof(uint4), sink_.data());
}

}  // namespace stepgraph::bench
