#include "select_sm90.h"

#include <algorithm>

#include "select_row.h"

namespace stepgraph {
namespace {

using namespace selecting;

__global__ void __launch_bounds__(threads, 1) select_sm90_kernel(const __grid_constant__ SelectArgs args) {
    select_rows(args);
}

constexpr int resident_blocks = 128;  // on a GPU of 132 multiprocessors, one each

/// As many for a row as let those of all rows be resident at once.
int blocks_a_row_for(int rows) {
    return rows <= 8 ? 8 : rows <= 16 ? 4 : rows <= 64 ? 2 : 1;
}

/// Enough for each row to have a cluster, or, where a tile may have more rows than the least, a block.
int blocks_for(const Tile& tile, int cluster) {
    const int most = tile.most_rows();
    const int rows_with_cluster = std::min(most, std::max(tile.least.rows, resident_blocks / cluster));
    return std::max((most + cluster - 1) / cluster, rows_with_cluster) * cluster;
}

}  // namespace

bool can_select_sm90() {
    return attribute_of_device(cudaDevAttrComputeCapabilityMajor) == 9 &&
           compiled_for_clusters(select_sm90_kernel, "select_sm90");
}

void select_sm90(const SelectArgs& args, LaunchContext context, int blocks_a_row) {
    const int cluster =
        blocks_a_row != 0 ? blocks_a_row : blocks_a_row_for(std::min(args.tile.least.rows, args.tile.most_rows()));
    launch_clusters(select_sm90_kernel, "select_sm90", context, static_cast<unsigned>(blocks_for(args.tile, cluster)),
                    static_cast<unsigned>(cluster), threads, sizeof(Shared), args);
}

void prepare_select_sm90() {
    prepare_kernel(select_sm90_kernel, "select_sm90", sizeof(Shared));
    allow_large_clusters(select_sm90_kernel, "select_sm90");
}

}  // namespace stepgraph
