// How every kernel of this library is launched, and the two halves of programmatic dependent launch inside it.
#pragma once

#include <type_traits>

#include <cuda_runtime.h>

#include "error.h"

namespace stepgraph {

/// Where and how a stage is enqueued.
struct LaunchContext {
    cudaStream_t stream = nullptr;
    /// Whether the kernel may start before its predecessors in the stream have ended. It then waits for them itself.
    bool programmatic = true;
};

#if defined(__CUDACC__)
/// Waits until every kernel this one depends on has ended and its writes are visible. Each thread calls it before its first
/// load or store of memory that a kernel writes, and none returns before it: a grid that could end without waiting would
/// let the kernel after it run ahead of the kernels before it.
__device__ __forceinline__ void wait_for_producers() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(STEPGRAPH_WITHOUT_WAIT)
    cudaGridDependencySynchronize();
#endif
}

/// Lets the next kernel of the stream start its prologue. It orders nothing: the next kernel waits for this one's end.
__device__ __forceinline__ void let_consumers_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}
#endif

/// Loads `kernel` and raises its limit of dynamic shared memory, so that a launch in capture finds nothing left to do.
/// Throws Error where the kernel has no code for the current device.
template <typename... Parameters>
void prepare_kernel(void (*kernel)(Parameters...), const char* name, size_t shared_bytes = 0) {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), name);
    // Raised and never lowered: another pipeline may already count on more.
    if (shared_bytes > static_cast<size_t>(attributes.maxDynamicSharedSizeBytes)) {
        check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared_bytes)),
                   name);
    }
}

/// Enqueues `kernel`. The programmatic attribute follows the architecture that the kernel was compiled for and not the
/// device: code compiled for older ones holds no wait, and with the attribute it would race. Throws Error.
template <typename... Parameters>
void launch(void (*kernel)(Parameters...), const char* name, LaunchContext context, dim3 grid, unsigned int threads,
            size_t shared_bytes, std::type_identity_t<Parameters>... parameters) {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), name);

    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;

    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = context.stream;
    config.attrs = &attribute;
    config.numAttrs = context.programmatic && attributes.ptxVersion >= 90 ? 1 : 0;
    check_cuda(cudaLaunchKernelEx(&config, kernel, parameters...), name);
}

}  // namespace stepgraph
