// Project on Hopper: both products of a layer in one kernel whose weights are on their way before the step reaches it.
#pragma once

#include <cuda_bf16.h>

#include "launch.h"

namespace stepgraph {

/// out[rows, columns] = bf16(x[rows, depth] . w[columns, depth]^T), FP32 accumulation; all row-major and contiguous, x and w
/// at multiples of 16 bytes, out of 8.
struct ProjectProduct {
    const __nv_bfloat16* x;
    const __nv_bfloat16* w;
    __nv_bfloat16* out;
    int columns;
    int depth;
};

struct ProjectArgs {
    ProjectProduct products[2];
    int rows;
};

inline constexpr int most_project_sm90_depth = 24576;

/// Whether the kernel takes products of these depths on the current device: Hopper with code for it, depths that are
/// multiples of 32 and at most most_project_sm90_depth. Throws Error.
bool can_project_sm90(int depth, int other_depth);

/// Enqueues both products in one kernel. It is made for up to some 256 rows, where they are a reading of the weights, and
/// takes any number; a row's bits do not depend on how many others there are. Reads the weights before its predecessors have
/// ended: no kernel of the stream may write them. No synchronisation, no allocation, legal in capture. Throws Error.
void project_sm90(const ProjectArgs& args, LaunchContext context);
/// Loads the kernel in the forms that products of these shapes take. Throws Error.
void prepare_project_sm90(const ProjectArgs& args);

}  // namespace stepgraph
