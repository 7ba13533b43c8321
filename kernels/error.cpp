#include "error.h"

namespace stepgraph {

void check_cuda(cudaError_t result, const char* call) {
    if (result != cudaSuccess) {
        cudaGetLastError();  // it is reported here: the next call is not to blame
        throw Error(ErrorCode::cuda,
                    std::string(call) + " failed: " + cudaGetErrorString(result) + " (" + cudaGetErrorName(result) + ")");
    }
}

}  // namespace stepgraph
