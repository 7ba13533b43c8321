// The one exception type of the library.
#pragma once

#include <stdexcept>
#include <string>

#include <cuda_runtime_api.h>

#include "export.h"

namespace stepgraph {

enum class ErrorCode {
    invalid_geometry,     ///< a number of the geometry or of the options
    invalid_buffer,       ///< a null, misaligned, host or contradictory pointer
    workspace_too_small,  ///< fewer bytes than workspace_bytes()
    wrong_order,          ///< a call before the one it builds on
    invalid_rows,         ///< a row count or bucket outside what was made ready
    invalid_layer,        ///< a layer that was not bound
    invalid_capture,      ///< what was captured is not what a replay could run
    cuda,                 ///< a CUDA call failed; the sentence carries call and code
    cublas,               ///< a cuBLASLt call failed
};

/// Thrown by construction, bind, capture, enqueue and replay. what() is one sentence that names the operand, what it was and
/// what it must be.
class STEPGRAPH_API Error : public std::runtime_error {
public:
    Error(ErrorCode code, const std::string& sentence) : std::runtime_error(sentence), code_(code) {}

    [[nodiscard]] ErrorCode code() const noexcept { return code_; }

private:
    ErrorCode code_;
};

/// Throws Error(ErrorCode::cuda) that names `call`, unless `result` is success.
STEPGRAPH_API void check_cuda(cudaError_t result, const char* call);

/// Leaves the thread's last CUDA error as it found it, as far as success goes: calls of other libraries inside the scope may
/// probe for what is not there, and an engine that checks its own launches would take what they leave for its own failure.
class KeepLastError {
public:
    KeepLastError() : clean_(cudaPeekAtLastError() == cudaSuccess) {}
    ~KeepLastError() {
        if (clean_) {
            cudaGetLastError();
        }
    }
    KeepLastError(const KeepLastError&) = delete;
    KeepLastError& operator=(const KeepLastError&) = delete;

private:
    bool clean_;
};

}  // namespace stepgraph
