// A stream that nobody else uses.
#pragma once

#include <cuda_runtime_api.h>

#include <stepgraph/kernels/error.h>

#include "capture_mode.h"

namespace stepgraph {

/// Does not synchronise with the legacy default stream, so that an engine's work there is left alone. Throws Error(cuda).
class OwnStream {
public:
    OwnStream() {
        const UnhinderedByOtherCaptures unhindered;
        check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    }
    ~OwnStream() {
        const UnhinderedByOtherCaptures unhindered;
        cudaStreamDestroy(stream_);
    }
    OwnStream(const OwnStream&) = delete;
    OwnStream& operator=(const OwnStream&) = delete;

    operator cudaStream_t() const { return stream_; }
    void synchronise() const { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

private:
    cudaStream_t stream_ = nullptr;
};

}  // namespace stepgraph
