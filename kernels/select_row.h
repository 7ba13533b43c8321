// A row, or a slice of it, by one block: by which of the ways its keys are searched.
#pragma once

#include "select_list.h"
#include "select_search.h"
#include "select_write.h"

namespace stepgraph::selecting {

inline constexpr int least_slice_bits = 12;  // a block works on a row where there are 2^12 keys for it

/// A row that has more than top_k keys, as one of its blocks sees it.
struct Row {
    int64_t number;
    const float* logits;
    int end;
    RowBlocks blocks;
    Slice slice;
};

/// How many of a row's `blocks` blocks have a slice of its `end` keys: a power of two, so that nothing is divided.
__device__ __forceinline__ int log_blocks(int end, int blocks) {
    const int most = 31 - __clz(max(1, end >> least_slice_bits));
    return min(most, 31 - __clz(blocks));
}

__device__ __forceinline__ Slice slice_of(const RowMemory& memory, int end, int rank, int log_blocks) {
    const int places = memory.skew + end;
    const int each = (((places - 1) >> log_blocks) / lanes + 1) * lanes;
    const int begin = min(places, rank * each);
    return {memory, begin, min(places, begin + each)};
}

__device__ __forceinline__ int4 positions_from(int first) {
    return {first, first + 1, first + 2, first + 3};
}

/// Writes this block's winners, from where those of the blocks before end.
template <typename Keys, typename Positions>
__device__ __forceinline__ void write_winners(const SelectArgs& args, const Row& row, const Threshold& threshold, int n,
                                              Keys keys_of, Positions positions_of) {
    const int won = stage_winners(threshold, n, keys_of, positions_of);
    const auto before = static_cast<int>(threshold.winners_before + min(threshold.equal_before, threshold.equal_winners));
    const auto* winners = reinterpret_cast<const int32_t*>(shared().histogram[0]);
    write_outputs(args, row.number, row.logits, before, before + won, [&](int i) { return winners[i - before]; });
}

/// Selects whatever the data, where a guess was wrong or too many keys lie close: up to five readings of the slice. All
/// threads of the row's blocks.
inline __device__ __noinline__ void select_any(const SelectArgs& args, Row row) {
    const RowBlocks blocks = row.blocks;
    Range range{1, 0xFFFFFFFFU, static_cast<uint32_t>(args.top_k)};
    Threshold threshold{};
    for (int round = 0;; ++round) {
        const int which = round % 2;
        __syncthreads();  // the histogram is read
        clear_histogram(which);
        __syncthreads();  // the histogram is clear
        const int shift = range.shift();
#pragma unroll 1
        for (int place = thread() * vector_keys; place < row.slice.places(); place += threads * vector_keys) {
            const uint4 keys = row.slice.load(place);
            range.count(which, keys.x, shift);
            range.count(which, keys.y, shift);
            range.count(which, keys.z, shift);
            range.count(which, keys.w, shift);
        }
        __syncthreads();  // the histogram is complete
        if (blocks.count == 1) {
            find_bins<1>(which, range.wanted, 0);
        } else {
            find_bin_in_cluster(which, round, range.wanted, blocks);
        }
        const FoundBin found = shared().found[0];
        const BlocksBefore before = blocks.count == 1 ? BlocksBefore{} : shared().found_before;
        range.narrow(found, shift);
        threshold.all_win = found.count == range.wanted;
        threshold.winners_before += before.above;
        threshold.equal_before = before.inside;
        if (threshold.all_win || shift == 0) {
            break;
        }
    }
    threshold.key = range.low;
    threshold.equal_winners = range.wanted;
    if (threshold.all_win) {
        threshold.winners_before += threshold.equal_before;
        threshold.equal_before = 0;
    }
    if (blocks.count > 1) {
        cluster_arrive();
        cluster_wait();  // for the other blocks to be done with this one's histograms
    } else {
        __syncthreads();  // the histograms are read
    }
    write_winners(
        args, row, threshold, row.slice.places(), [&](int place) { return row.slice.load(place); },
        [&](int place) { return positions_from(row.slice.first_position() + place); });
}

__device__ __forceinline__ uint4 keys_at(int place) {
    return *reinterpret_cast<const uint4*>(&shared().area[place]);
}

/// Of a lone block whose keys fit its shared memory.
__device__ __forceinline__ void select_alone(const SelectArgs& args, const Row& row) {
    ask_for(row.slice);
    Range range{0, 0xFFFFFFFFU, static_cast<uint32_t>(args.top_k)};
    const int shift = range.shift();
    receive(row.slice, [&](uint32_t key) { range.count(0, key, shift); });
    __syncthreads();  // the keys and their histogram are complete
    const int n = row.slice.places();
    const bool all_win = narrow(range, 0, n, 0);
    write_winners(args, row, {range.low, range.wanted, all_win, 0, 0}, n, keys_at,
                  [&](int place) { return positions_from(row.slice.first_position() + place); });
}

/// Of blocks of a cluster, whose keys fit their shared memory. False if a guess was wrong.
__device__ __forceinline__ bool select_in_cluster(const SelectArgs& args, const Row& row) {
    const Sample sample(row.slice.row, row.end);
    ask_for(row.slice);
    const Guess guess = guess_from(sample, row.end, args.top_k);
    KeyCounts seen;
    receive(row.slice, [&](uint32_t key) { seen.see(guess, key); });
    Threshold threshold;
    if (!search_in_cluster(guess, row.slice.places(), seen, args.top_k, row.blocks, threshold)) {
        return false;
    }
    write_winners(args, row, threshold, row.slice.places(), keys_at,
                  [&](int place) { return positions_from(row.slice.first_position() + place); });
    cluster_wait();  // for the other blocks to be done with this one's keys
    return true;
}

/// Of slices that are read as lists. False if a guess was wrong.
__device__ __forceinline__ bool select_from_list(const SelectArgs& args, const Row& row) {
    const Guess guess = guess_from(Sample(row.slice.row, row.end), row.end, args.top_k);
    const int capacity = list_capacity(row.blocks);
    const int n = list_candidates(row.slice, guess, args.top_k, capacity);
    Threshold threshold;
    bool found;
    if (row.blocks.count == 1) {
        found = search_alone(guess, n, args.top_k, threshold);
    } else {
        KeyCounts seen;
        each_key(0, n, [&](uint32_t key) { seen.see(guess, key); });
        found = search_in_cluster(guess, n, seen, args.top_k, row.blocks, threshold);
    }
    if (!found) {
        return false;
    }
    write_winners(args, row, threshold, n, keys_at,
                  [capacity](int place) { return *reinterpret_cast<const int4*>(&shared().area[capacity + place]); });
    if (row.blocks.count > 1) {
        cluster_wait();  // for the other blocks to be done with this one's keys
    }
    return true;
}

/// All threads of the row's blocks.
__device__ __forceinline__ void select_row(const SelectArgs& args, const Row& row) {
    bool done = true;
    if (row.slice.places() > most_held_keys) {
        done = select_from_list(args, row);
    } else if (row.blocks.count == 1) {
        select_alone(args, row);
    } else {
        done = select_in_cluster(args, row);
    }
    if (!done) {
        select_any(args, row);
    }
}

/// What a block works on: a cluster takes a row, or a block, where the tile has more rows than the grid has clusters.
class Assignment {
public:
    __device__ Assignment()
        : cluster_{cluster_rank(), cluster_blocks()},
          number_(static_cast<int>(cluster_number())),
          block_(static_cast<int>(blockIdx.x)) {
        clusters_ = static_cast<int>(gridDim.x) >> (31 - __clz(cluster_.count));  // a power of two
    }

    [[nodiscard]] __device__ int tile_row(int rows) const { return rows <= clusters_ ? number_ : block_; }
    [[nodiscard]] __device__ RowBlocks blocks(int rows) const { return rows <= clusters_ ? cluster_ : RowBlocks{0, 1}; }

private:
    RowBlocks cluster_;
    int number_;  // of the cluster
    int block_;
    int clusters_;
};

/// The row of a tile that a block works on, alone or with others.
struct TileRow {
    int number;   // of all rows
    int of_tile;  // of the tile's
    bool is_there;
    RowBlocks blocks;
    const float* logits;

    __device__ TileRow(const SelectArgs& args, const Assignment& assignment, const TileShape& shape) {
        const TileRows rows(args.tile, shape);
        of_tile = assignment.tile_row(rows.count());
        number = rows.begin + of_tile;
        is_there = of_tile < rows.count();
        blocks = assignment.blocks(rows.count());
        logits = args.logits + int64_t{of_tile} * shape.stride;
    }
};

/// What a block of the kernel does.
__device__ __forceinline__ void select_rows(const SelectArgs& args) {
    clear_shared();
    const Assignment assignment;
    TileShape shape = args.tile.least;
    TileRow row(args, assignment, shape);
    const int32_t* end_address = args.ends + min(row.number, args.tile.rows - 1);
    // Parameters come from memory too: here, and not behind the wait.
    compute_here(end_address);
    compute_here(row.logits);
    __syncthreads();  // the shared memory is clear

    wait_for_producers();  // for the logits and the layout, and for the readers of the last layer's outputs
    if (!args.last_of_layer) {
        let_consumers_start();
    }

    int end = *end_address;
    if (args.tile.shape != nullptr) {
        shape = *args.tile.shape;
        const int likely = row.number;
        row = TileRow(args, assignment, shape);
        if (row.is_there && row.number != likely) {
            end = args.ends[row.number];
        }
    }
    if (!row.is_there) {
        return;
    }
    const RowBlocks blocks = row.blocks;
    if (args.counts != nullptr && thread() == 0 && blocks.rank == 0) {
        args.counts[row.number] = min(args.top_k, end);
    }
    if (args.padded_logits != nullptr) {
        for (int64_t j = end + int64_t{blocks.rank} * threads + thread(); j < args.width; j += blocks.count * threads) {
            args.padded_logits[int64_t{row.of_tile} * shape.stride + j] = -INFINITY;
        }
    }
    if (end <= args.top_k) {
        if (blocks.rank == 0) {
            write_outputs(args, row.number, row.logits, 0, args.top_k, [end](int i) { return i < end ? i : -1; });
        }
        return;
    }
    const int log_count = log_blocks(end, blocks.count);
    if (blocks.rank >> log_count != 0) {
        return;  // the barriers of the cluster do not wait for it
    }
    select_row(args, {row.number,
                      row.logits,
                      end,
                      {blocks.rank, 1 << log_count},
                      slice_of(RowMemory(row.logits), end, blocks.rank, log_count)});
}

}  // namespace stepgraph::selecting
