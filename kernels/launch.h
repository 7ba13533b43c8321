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

#if defined(__CUDACC__) || defined(STEPGRAPH_EMULATED)
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

/// An attribute of the current device. Throws Error.
inline int attribute_of_device(cudaDeviceAttr attribute) {
    int device = 0;
    int value = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
    return value;
}

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

/// Lets clusters have more than the eight blocks that every architecture with clusters grants. Throws Error.
template <typename... Parameters>
void allow_large_clusters(void (*kernel)(Parameters...), const char* name) {
    check_cuda(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
        name);
}

/// Whether the kernel was compiled for sm_90 or newer: code for older ones holds no wait for its producers, no trigger and
/// no cluster. Throws Error.
template <typename... Parameters>
bool compiled_for_clusters(void (*kernel)(Parameters...), const char* name) {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), name);
    return attributes.ptxVersion >= 90;
}

/// Enqueues `kernel` in clusters of `cluster_blocks` blocks. The programmatic attribute follows the architecture that the
/// kernel was compiled for and not the device: code compiled for older ones holds no wait, and with the attribute it would
/// race. Throws Error.
template <typename... Parameters>
void launch_clusters(void (*kernel)(Parameters...), const char* name, LaunchContext context, dim3 grid,
                     unsigned int cluster_blocks, unsigned int threads, size_t shared_bytes,
                     std::type_identity_t<Parameters>... parameters) {
    cudaLaunchAttribute attributes[2]{};
    unsigned int count = 0;
    if (context.programmatic && compiled_for_clusters(kernel, name)) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count].val.programmaticStreamSerializationAllowed = 1;
        ++count;
    }
    if (cluster_blocks > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim = {cluster_blocks, 1, 1};
        ++count;
    }

    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = context.stream;
    config.attrs = attributes;
    config.numAttrs = count;
    check_cuda(cudaLaunchKernelEx(&config, kernel, parameters...), name);
}

/// Enqueues `kernel`, its blocks each for itself. Throws Error.
template <typename... Parameters>
void launch(void (*kernel)(Parameters...), const char* name, LaunchContext context, dim3 grid, unsigned int threads,
            size_t shared_bytes, std::type_identity_t<Parameters>... parameters) {
    launch_clusters(kernel, name, context, grid, 1, threads, shared_bytes, parameters...);
}

}  // namespace stepgraph
