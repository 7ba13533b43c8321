// Functions of the driver. The library does not link it, so that it also loads where there is none.
#pragma once

#include <string>

#include <cuda_runtime_api.h>

#include "error.h"

namespace stepgraph {

/// The driver's function `name`. Throws Error where the driver is older than CUDA 12.3.
template <typename Function>
Function driver_function(const char* name) {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check_cuda(cudaGetDriverEntryPointByVersion(name, &address, 12030, cudaEnableDefault, &found), name);
    if (address == nullptr || found != cudaDriverEntryPointSuccess) {
        throw Error(ErrorCode::cuda, std::string(name) + " is not in the driver, which must be of CUDA 12.3 or later");
    }
    return reinterpret_cast<Function>(address);
}

}  // namespace stepgraph
