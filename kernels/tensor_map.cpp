#include "tensor_map.h"

#include <string>

#include "driver_function.h"

namespace stepgraph {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encoder() {
    static const auto found = driver_function<Encode>("cuTensorMapEncodeTiled");
    return found;
}

}  // namespace

void find_tensor_map_encoder() {
    encoder();
}

CUtensorMap map_of_boxes(const __nv_bfloat16* matrix, int rows, int columns, int box_rows, int box_columns) {
    CUtensorMap map{};
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t row_bytes = sizes[0] * sizeof(__nv_bfloat16);
    const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
    const cuuint32_t steps[2] = {1, 1};
    // The engine takes the address of what it only reads as one that may be written.
    auto* address = const_cast<__nv_bfloat16*>(matrix);
    const CUresult result = encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, address, sizes, &row_bytes, box, steps,
                                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        throw Error(ErrorCode::cuda, "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(result) + " for " +
                                         std::to_string(rows) + " rows of " + std::to_string(columns) + " columns");
    }
    return map;
}

}  // namespace stepgraph
