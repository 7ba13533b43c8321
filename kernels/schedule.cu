#include "schedule.h"

#include <cub/block/block_scan.cuh>

#include <stepgraph/layouts/cache_page.h>
#include <stepgraph/layouts/tiles.h>

namespace stepgraph {
namespace {

constexpr int threads = 256;

__device__ int pages_counted_at(const ScheduleArgs& args, int row, int tile_begin, int tile_end) {
    const int request = args.row_request[row];
    const bool last_of_request = row + 1 == tile_end || args.row_request[row + 1] != request;
    if (request < 0 || !last_of_request || args.ends[row] <= args.unscored_bound) {
        return 0;
    }
    const int rows = row + 1 - max(tile_begin, args.starts[request]);
    const int passes = (rows + args.rows_a_pass - 1) / args.rows_a_pass;
    return (args.ends[row] + page_tokens - 1) / page_tokens * passes;
}

__global__ void __launch_bounds__(threads) schedule_kernel(ScheduleArgs args) {
    using Scan = cub::BlockScan<int, threads>;
    __shared__ typename Scan::TempStorage storage;

    wait_for_producers();  // for row_request and ends, and for the last step's readers of page_prefix
    let_consumers_start();

    const int tile_begin = static_cast<int>(blockIdx.x) * args.tile_rows;
    const int tile_end = min(args.rows, tile_begin + args.tile_rows);
    int before = 0;
    for (int base = tile_begin; base < tile_end; base += threads) {
        const int row = base + static_cast<int>(threadIdx.x);
        const int pages = row < tile_end ? pages_counted_at(args, row, tile_begin, tile_end) : 0;
        int up_to_row;
        int total;
        Scan(storage).InclusiveSum(pages, up_to_row, total);
        if (row < tile_end) {
            args.page_prefix[row] = before + up_to_row;
        }
        before += total;
        __syncthreads();  // the storage is used again
    }
}

}  // namespace

void schedule(const ScheduleArgs& args, LaunchContext context) {
    launch(schedule_kernel, "schedule", context, static_cast<unsigned>(tile_count(args.rows, args.tile_rows)), threads, 0,
           args);
}

void prepare_schedule() {
    prepare_kernel(schedule_kernel, "schedule");
}

}  // namespace stepgraph
