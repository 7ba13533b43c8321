#include "select_sm90.h"

#include "select_row.h"

namespace stepgraph {
namespace {

using namespace selecting;

__global__ void __launch_bounds__(threads, 1) select_sm90_kernel(const __grid_constant__ SelectArgs args) {
    select_rows(args);
}

/// As many as let all rows' blocks be resident at once on a GPU of 132 multiprocessors.
int blocks_a_row_for(int rows) {
    return rows <= 8 ? 8 : rows <= 16 ? 4 : rows <= 64 ? 2 : 1;
}

}  // namespace

bool can_select_sm90() {
    return attribute_of_device(cudaDevAttrComputeCapabilityMajor) == 9 &&
           compiled_for_clusters(select_sm90_kernel, "select_sm90");
}

void select_sm90(const SelectArgs& args, LaunchContext context, int blocks_a_row) {
    const int blocks = blocks_a_row != 0 ? blocks_a_row : blocks_a_row_for(args.tile_rows);
    launch_clusters(select_sm90_kernel, "select_sm90", context, static_cast<unsigned>(args.tile_rows * blocks),
                    static_cast<unsigned>(blocks), threads, sizeof(Shared), args);
}

void prepare_select_sm90() {
    prepare_kernel(select_sm90_kernel, "select_sm90", sizeof(Shared));
    allow_large_clusters(select_sm90_kernel, "select_sm90");
}

}  // namespace stepgraph
