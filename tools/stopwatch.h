// Time that work takes on a stream, by the device's clock.
#pragma once

#include <cuda_runtime_api.h>

#include <stepgraph/kernels/error.h>

namespace stepgraph::tools {

/// Throws Error(cuda).
class Stopwatch {
public:
    Stopwatch() {
        check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
        check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
    }
    ~Stopwatch() {
        cudaEventDestroy(begin_);
        cudaEventDestroy(end_);
    }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

    void start(cudaStream_t stream) { check_cuda(cudaEventRecord(begin_, stream), "cudaEventRecord"); }
    /// Waits until all that was enqueued has ended; microseconds since start().
    double stop_us(cudaStream_t stream) {
        check_cuda(cudaEventRecord(end_, stream), "cudaEventRecord");
        check_cuda(cudaEventSynchronize(end_), "cudaEventSynchronize");
        float milliseconds = 0;
        check_cuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
        return double{milliseconds} * 1e3;
    }

private:
    cudaEvent_t begin_ = nullptr;
    cudaEvent_t end_ = nullptr;
};

}  // namespace stepgraph::tools
