// Calls that another thread's capture must not forbid.
#pragma once

#include <cuda_runtime_api.h>

namespace stepgraph {

/// While it lives, a capture that another thread has begun in mode Global neither forbids this thread's calls nor is broken
/// by them. For calls that touch no stream in capture: making streams, loading kernels, instantiating graphs.
class UnhinderedByOtherCaptures {
public:
    UnhinderedByOtherCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~UnhinderedByOtherCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    UnhinderedByOtherCaptures(const UnhinderedByOtherCaptures&) = delete;
    UnhinderedByOtherCaptures& operator=(const UnhinderedByOtherCaptures&) = delete;

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace stepgraph
