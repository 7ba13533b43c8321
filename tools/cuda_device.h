// Whether there is a GPU to run on.
#pragma once

#include <string>

#include <cuda_runtime_api.h>

#include <stepgraph/kernels/error.h>
#include <stepgraph/kernels/schedule.h>

namespace stepgraph::tools {

/// Empty where there is a device that this build has code for, else CUDA's own words for why not.
inline std::string why_no_device() {
    int devices = 0;
    const cudaError_t result = cudaGetDeviceCount(&devices);
    cudaGetLastError();  // not the next call's error
    if (result != cudaSuccess || devices == 0) {
        return result != cudaSuccess ? cudaGetErrorString(result) : "there is none";
    }
    try {
        prepare_schedule();
    } catch (const Error& error) {
        return std::string("this build has no code for it: ") + error.what();
    }
    return {};
}

/// Throws Error(cuda) with one sentence where there is no device. `what` needs it, `instead` is what does not.
inline void require_device(const std::string& what, const std::string& instead) {
    const std::string reason = why_no_device();
    if (!reason.empty()) {
        throw Error(ErrorCode::cuda, what + " needs an NVIDIA GPU, and none can be used (" + reason + "); " + instead);
    }
}

}  // namespace stepgraph::tools
