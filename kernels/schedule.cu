#include "schedule.h"

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include <stepgraph/layouts/cache_page.h>

namespace stepgraph {
namespace {

constexpr int threads = 256;
constexpr int most_pages_undrawn = 96;  // a block, on average: up to here nothing is drawn

// Where pieces are drawn every block has a share of its own: the count of those drawn relies on it.
static_assert(most_pages_undrawn >= 2);

using Scan = cub::BlockScan<int, threads>;
using Reduce = cub::BlockReduce<int, threads>;

/// What is read for a row: nothing, or, for the last row of a request in its tile, the request's pages.
struct RowWork {
    int pages;
    int passes;     // over the pages
    int first_row;  // of the request in this tile

    [[nodiscard]] __device__ int units() const { return pages * passes; }
};

/// How a tile's units, pages of passes one behind the other, are shared out: [0, fixed) evenly among the blocks, the others
/// by drawing.
struct Shares {
    int blocks;
    int fixed;
    int most_drawn;  // pages of a drawn piece
    int each;        // fixed / blocks
    int left;        // fixed % blocks

    /// floor(fixed * block / blocks), without 64-bit arithmetic.
    [[nodiscard]] __device__ int begin(int block) const { return each * block + left * block / blocks; }
    /// The block whose share holds `unit`: at most one beside what a rounded quotient says.
    [[nodiscard]] __device__ int block_of(int unit) const {
        const float quotient = static_cast<float>(unit) * static_cast<float>(blocks) / static_cast<float>(fixed);
        int block = min(static_cast<int>(quotient), blocks - 1);
        while (begin(block) > unit) {
            --block;
        }
        while (begin(block + 1) <= unit) {
            ++block;
        }
        return block;
    }
    /// Drawn pieces of units [begin, end), which lie in one pass over one request.
    [[nodiscard]] __device__ int drawn(int begin, int end) const {
        return (max(0, end - max(begin, fixed)) + most_drawn - 1) / most_drawn;
    }
};

struct Shared {
    union {
        typename Scan::TempStorage scan;
        typename Reduce::TempStorage reduce;
    };
    int value;              // handed to every thread
    RowWork work[threads];  // of the rows of a batch
    // What stands before them in the tile.
    int units_before[threads];
    int last_pass_before[threads];  // first unit of the last pass before these rows
    int passes_before[threads];
    int drawn_before[threads];
};

/// The largest of the step's bounds, in every thread.
__device__ int32_t longest(const ScheduleArgs& args, Shared& shared) {
    int32_t mine = 0;
    for (int row = static_cast<int>(threadIdx.x); row < args.rows; row += threads) {
        mine = max(mine, args.ends[row]);
    }
    const int32_t largest = Reduce(shared.reduce).Reduce(mine, [](int a, int b) { return max(a, b); });
    if (threadIdx.x == 0) {
        shared.value = largest;
    }
    __syncthreads();  // it is there
    const int32_t result = shared.value;
    __syncthreads();  // storage and value are used again
    return result;
}

__device__ TileShape shape_of_step(const ScheduleArgs& args, Shared& shared) {
    return args.shape == nullptr ? args.least : tile_shape(args.rows, longest(args, shared), args.least);
}

/// The rows of one tile, looked at by one block.
class TileSchedule {
public:
    __device__ TileSchedule(const ScheduleArgs& args, int tile, TileRows rows, Shared& shared)
        : args_(args),
          shared_(shared),
          begin_(rows.begin),
          end_(rows.end),
          pieces_(args.pieces == nullptr ? nullptr : args.pieces + tile * args.pieces_a_tile),
          first_work_(read_work(begin_ + static_cast<int>(threadIdx.x))) {}

    __device__ void write_page_prefix() {
        int before = 0;
        for (int base = begin_; base < end_; base += threads) {
            const int row = base + static_cast<int>(threadIdx.x);
            int up_to_row;
            int total;
            Scan(shared_.scan).InclusiveSum(work_at(row).pages, up_to_row, total);
            if (row < end_) {
                args_.page_prefix[row] = before + up_to_row;
            }
            before += total;
            __syncthreads();  // the storage is used again
        }
    }

    __device__ void write_pieces() {
        if (threadIdx.x == 0) {
            args_.drawn[blockIdx.x] = 0;  // as the scorer leaves it, unless somebody else wrote to the workspace
        }
        const int units = sum([](const RowWork& work) { return work.units(); });
        const Shares shares = share_out(units);
        const int drawn = units == shares.fixed ? 0 : count_drawn(shares);
        for (int i = static_cast<int>(threadIdx.x); i < args_.blocks; i += threads) {
            if (shares.begin(i) == shares.begin(i + 1)) {
                pieces_[2 * i] = ScorePiece{.next = -1, .drawn = drawn};
                pieces_[2 * i + 1] = {};
            }
        }
        int units_before = 0;
        int last_pass_before = -1;
        int passes_before = 0;
        int drawn_before = 0;
        for (int base = begin_; base < end_; base += threads) {
            const RowWork work = work_at(base + static_cast<int>(threadIdx.x));
            const int own_units_before = scan(work.units(), units_before);
            shared_.work[threadIdx.x] = work;
            shared_.units_before[threadIdx.x] = own_units_before;
            // Passes stand in order: the last one that begins before is the one that begins furthest on.
            shared_.last_pass_before[threadIdx.x] =
                scan_largest(work.pages == 0 ? -1 : own_units_before + (work.passes - 1) * work.pages, last_pass_before);
            shared_.passes_before[threadIdx.x] = scan(work.pages == 0 ? 0 : work.passes, passes_before);
            shared_.drawn_before[threadIdx.x] = scan(drawn_of(work, own_units_before, shares), drawn_before);
            __syncthreads();  // the batch is there
            // Some lanes a row: of many rows none has many pieces, or few have.
            const int lanes = end_ - begin_ <= threads / 32 ? 32 : 8;
            for (int i = static_cast<int>(threadIdx.x) / lanes; i < min(threads, end_ - base); i += threads / lanes) {
                if (shared_.work[i].pages > 0) {
                    write_pieces_of_row(base + i, i, lanes, shares, drawn);
                }
            }
            __syncthreads();  // the batch is used again
        }
    }

private:
    /// Most tiles have no more rows than the block has threads: they are read once.
    [[nodiscard]] __device__ RowWork work_at(int row) const { return row < begin_ + threads ? first_work_ : read_work(row); }

    [[nodiscard]] __device__ RowWork read_work(int row) const {
        const int request = row < end_ ? args_.row_request[row] : -1;
        const bool last_of_request = row + 1 >= end_ || args_.row_request[row + 1] != request;
        if (request < 0 || !last_of_request || args_.ends[row] <= args_.unscored_bound) {
            return {};
        }
        const int first_row = max(begin_, args_.starts[request]);
        return {.pages = (args_.ends[row] + page_tokens - 1) / page_tokens,
                .passes = args_.pieces == nullptr ? 1 : (row - first_row + args_.rows_a_pass) / args_.rows_a_pass,
                .first_row = first_row};
    }

    /// The sum over the tile's rows, the same for every thread.
    template <typename Value>
    __device__ int sum(Value value) {
        int mine = 0;
        for (int row = begin_ + static_cast<int>(threadIdx.x); row < end_; row += threads) {
            mine += value(work_at(row));
        }
        const int total = Reduce(shared_.reduce).Sum(mine);
        if (threadIdx.x == 0) {
            shared_.value = total;
        }
        __syncthreads();  // the sum is there
        const int result = shared_.value;
        __syncthreads();  // storage and sum are used again
        return result;
    }

    /// `before` plus the values of the threads before this one; adds all of them to `before`.
    __device__ int scan(int value, int& before) {
        int sum_before;
        int total;
        Scan(shared_.scan).ExclusiveSum(value, sum_before, total);
        __syncthreads();  // the storage is used again
        const int result = before + sum_before;
        before += total;
        return result;
    }

    /// The largest of `before` and the values of the threads before this one; `before` becomes the largest of all.
    __device__ int scan_largest(int value, int& before) {
        const auto larger = [](int a, int b) { return max(a, b); };
        int largest_before;
        int largest;
        Scan(shared_.scan).ExclusiveScan(value, largest_before, -1, larger, largest);
        __syncthreads();  // the storage is used again
        const int result = max(before, largest_before);
        before = max(before, largest);
        return result;
    }

    [[nodiscard]] __device__ Shares shares(int fixed, int most_drawn) const {
        return {.blocks = args_.blocks,
                .fixed = fixed,
                .most_drawn = most_drawn,
                .each = fixed / args_.blocks,
                .left = fixed % args_.blocks};
    }

    [[nodiscard]] __device__ Shares share_out(int units) const {
        const int average = (units + args_.blocks - 1) / args_.blocks;
        if (average <= most_pages_undrawn) {
            return shares(units, 1);
        }
        return shares(units - units / 8,
                      max(min(max(average / 16, least_drawn_pages), 16), units / 8 / most_drawn_pieces + 1));
    }

    /// Drawn pieces of a row whose first unit is `unit`.
    __device__ static int drawn_of(const RowWork& work, int unit, const Shares& shares) {
        int drawn = 0;
        for (int pass = 0; pass < work.passes; ++pass, unit += work.pages) {
            drawn += shares.drawn(unit, unit + work.pages);
        }
        return drawn;
    }

    __device__ int count_drawn(const Shares& shares) {
        int units_before = 0;
        int drawn_before = 0;
        for (int base = begin_; base < end_; base += threads) {
            const RowWork work = work_at(base + static_cast<int>(threadIdx.x));
            scan(drawn_of(work, scan(work.units(), units_before), shares), drawn_before);
        }
        return drawn_before;
    }

    /// By `lanes` lanes of a warp; `i`: the row's place in the batch.
    __device__ void write_pieces_of_row(int row, int i, int lanes, const Shares& shares, int drawn) {
        const RowWork& work = shared_.work[i];
        const int lane = static_cast<int>(threadIdx.x) % lanes;
        int drawn_index = drawn_pieces_begin(args_.blocks, args_.rows, args_.least.rows) + shared_.drawn_before[i];
        const int request = args_.row_request[row];
        const int32_t* const blocks = args_.block_table + request * args_.block_table_stride;
        for (int pass = 0; pass < work.passes; ++pass) {
            const int begin = shared_.units_before[i] + pass * work.pages;
            const int end = begin + work.pages;
            const int first_row = work.first_row + pass * args_.rows_a_pass;
            const auto write = [&](int index, int from, int to, int next) {
                pieces_[index] = {.request = request,
                                  .page_begin = from - begin,
                                  .page_end = to - begin,
                                  .first_row = first_row,
                                  .rows = min(args_.rows_a_pass, row + 1 - first_row),
                                  .block = blocks[from - begin],
                                  .next = next,
                                  .drawn = drawn};
            };
            // A piece for each share that the pass has units in. Where it is not the share's first or second, it stands at
            // the pass's own place: a pass begins in one share only. It is the second where the share begins in the pass
            // before.
            const int own_place = 2 * args_.blocks + shared_.passes_before[i] + pass;
            const int pass_before = pass > 0 ? begin - work.pages : shared_.last_pass_before[i];
            const int fixed_end = min(end, shares.fixed);
            const int last_block = begin < fixed_end ? shares.block_of(fixed_end - 1) : -1;
            for (int block = begin < fixed_end ? shares.block_of(begin) + lane : 0; block <= last_block; block += lanes) {
                const int from = max(begin, shares.begin(block));
                const int to = min(fixed_end, shares.begin(block + 1));
                if (from < to) {
                    const bool first = from == shares.begin(block);
                    const bool second = !first && pass_before <= shares.begin(block);
                    const bool goes_on = shares.begin(block + 1) > to;
                    const int next = first ? 2 * block + 1 : own_place + 1;
                    write(first ? 2 * block : second ? 2 * block + 1 : own_place, from, to, goes_on ? next : -1);
                    if (first && !goes_on) {
                        pieces_[2 * block + 1] = {};  // read, and not used
                    }
                }
            }
            const int drawn_begin = max(begin, shares.fixed);
            const int pieces = shares.drawn(begin, end);
            for (int64_t j = lane; j < pieces; j += lanes) {
                const int64_t units = end - drawn_begin;
                write(drawn_index + static_cast<int>(j), drawn_begin + static_cast<int>(units * j / pieces),
                      drawn_begin + static_cast<int>(units * (j + 1) / pieces), -1);
            }
            drawn_index += pieces;
        }
    }

    const ScheduleArgs& args_;
    Shared& shared_;
    int begin_;
    int end_;
    ScorePiece* pieces_;
    RowWork first_work_;  // of this thread's row of the first batch
};

__global__ void __launch_bounds__(threads) schedule_kernel(ScheduleArgs args) {
    __shared__ Shared shared;

    wait_for_producers();  // for row_request and ends, and for the last step's readers of what is written here
    let_consumers_start();

    const auto number = static_cast<int>(blockIdx.x);
    const TileShape shape = shape_of_step(args, shared);
    if (args.shape != nullptr && number == 0 && threadIdx.x == 0) {
        *args.shape = shape;
    }
    TileSchedule tile(args, number, TileRows({number, args.rows, args.least, nullptr}, shape), shared);
    if (args.page_prefix != nullptr) {
        tile.write_page_prefix();
    }
    if (args.pieces != nullptr) {
        tile.write_pieces();
    }
}

}  // namespace

void schedule(const ScheduleArgs& args, LaunchContext context) {
    launch(schedule_kernel, "schedule", context, static_cast<unsigned>(tile_count(args.rows, args.least.rows)), threads, 0,
           args);
}

void prepare_schedule() {
    prepare_kernel(schedule_kernel, "schedule");
}

}  // namespace stepgraph
