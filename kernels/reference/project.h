// The projections on the host.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

namespace stepgraph::reference {

/// out[row, n] = bf16(x[row] . w[n]); the sum runs in FP64 and is rounded through FP32, so that it stands for any order of
/// summation. x: BF16 [rows, depth], w: BF16 [columns, depth], out: BF16 [rows, columns].
void project(const __nv_bfloat16* x, const __nv_bfloat16* w, int rows, int columns, int depth, __nv_bfloat16* out);

}  // namespace stepgraph::reference
