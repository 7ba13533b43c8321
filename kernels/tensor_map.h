// Tensor maps: what the copy engine knows of a matrix whose boxes it brings.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

namespace stepgraph {

/// Finds the driver's function that makes them, so that map_of_boxes() needs not look. Throws Error.
void find_tensor_map_encoder();

/// Of a row-major matrix [rows, columns], aligned to 16 bytes, `columns` a multiple of 8: boxes of box_rows x box_columns,
/// whose rows of 128 bytes stand in shared memory in the 128-byte swizzle; what lies outside of the matrix is 0. No
/// synchronisation, legal in capture. Throws Error.
CUtensorMap map_of_boxes(const __nv_bfloat16* matrix, int rows, int columns, int box_rows, int box_columns);

}  // namespace stepgraph
