#include "select.h"

#include <cub/block/block_scan.cuh>

#include <stepgraph/layouts/cache_page.h>

namespace stepgraph {
namespace {

constexpr int threads = 1024;
constexpr int digit_bits = 8;
constexpr int digits = 1 << digit_bits;
constexpr int thread_items = 4;  // consecutive positions of a thread in the writing pass
constexpr int stretch = threads * thread_items;

using Scan = cub::BlockScan<uint32_t, threads>;

/// Integers that order as the logits do: NaN as -inf, -0 as +0.
__device__ uint32_t order_key(float logit) {
    if (isnan(logit)) {
        logit = -INFINITY;
    }
    const uint32_t bits = bits_of(add_rn(logit, 0.0F));  // -0 + 0 = +0
    return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

struct Shared {
    typename Scan::TempStorage scan;
    uint32_t histogram[digits];
    uint32_t digit;      // chosen in this pass
    uint32_t remaining;  // winners still to be found below the digits chosen so far
};

/// The K-th largest key of a row, and how many of the keys that equal it win.
struct Threshold {
    uint32_t key;
    uint32_t equal_winners;
};

/// Radix selection from the highest digit down: any data takes the same four readings.
__device__ Threshold find_threshold(const float* logits, int end, uint32_t top_k, Shared& shared) {
    uint32_t prefix = 0;
    uint32_t remaining = top_k;
    for (int shift = 32 - digit_bits; shift >= 0; shift -= digit_bits) {
        const uint32_t mask = shift == 32 - digit_bits ? 0U : ~0U << (shift + digit_bits);
        if (threadIdx.x < digits) {
            shared.histogram[threadIdx.x] = 0;
        }
        __syncthreads();  // the histogram is clear
        for (int j = static_cast<int>(threadIdx.x); j < end; j += threads) {
            const uint32_t key = order_key(logits[j]);
            if ((key & mask) == prefix) {
                atomicAdd(&shared.histogram[(key >> shift) % digits], 1U);
            }
        }
        __syncthreads();  // the histogram is complete
        // Thread t looks at the t-th largest digit: its bin holds the threshold if the bins above leave it some winners.
        const uint32_t digit = digits - 1 - threadIdx.x;
        const uint32_t keys = threadIdx.x < digits ? shared.histogram[digit] : 0;
        uint32_t above;
        Scan(shared.scan).ExclusiveSum(keys, above);
        if (above < remaining && remaining <= above + keys) {
            shared.digit = digit;
            shared.remaining = remaining - above;
        }
        __syncthreads();  // digit and remaining are chosen
        prefix |= shared.digit << shift;
        remaining = shared.remaining;
    }
    return {prefix, remaining};
}

/// Writes one output position of the row.
__device__ void emit(const SelectArgs& args, int64_t row, int index, int position, const float* logits) {
    const int64_t at = row * args.top_k + index;
    args.indices[at] = position;
    if (args.physical_slots != nullptr) {
        int64_t slot = -1;
        if (position >= 0) {
            slot = slot_of(args.block_table + args.row_request[row] * args.block_table_stride, position, args.pages);
        }
        args.physical_slots[at] = slot;
    }
    if (args.winner_logits != nullptr) {
        args.winner_logits[at] = position < 0 ? -INFINITY : logits[position];
    }
}

/// Writes the winners in ascending position: all above the threshold, and the first of those that equal it.
__device__ void write_winners(const SelectArgs& args, int64_t row, const float* logits, int end, Threshold threshold,
                              Shared& shared) {
    uint32_t above_before = 0;
    uint32_t equal_before = 0;
    for (int base = 0; base < end; base += stretch) {
        // Both counts in one word: neither exceeds the 4,096 positions of a stretch.
        const int first = base + static_cast<int>(threadIdx.x) * thread_items;
        uint32_t flags[thread_items];
        uint32_t sum = 0;
        for (int i = 0; i < thread_items; ++i) {
            const uint32_t key = first + i < end ? order_key(logits[first + i]) : 0;
            const bool inside = first + i < end;
            flags[i] = !inside ? 0U : key > threshold.key ? 1U : key == threshold.key ? 1U << 16U : 0U;
            sum += flags[i];
        }
        uint32_t before;
        uint32_t total;
        Scan(shared.scan).ExclusiveSum(sum, before, total);
        uint32_t above = above_before + (before & 0xFFFFU);
        uint32_t equal = equal_before + (before >> 16U);
        for (int i = 0; i < thread_items; ++i) {
            const bool is_equal = flags[i] > 1U;
            if (flags[i] == 1U || (is_equal && equal < threshold.equal_winners)) {
                emit(args, row, static_cast<int>(above + min(equal, threshold.equal_winners)), first + i, logits);
            }
            above += flags[i] & 1U;
            equal += is_equal ? 1U : 0U;
        }
        above_before += total & 0xFFFFU;
        equal_before += total >> 16U;
        if (above_before + min(equal_before, threshold.equal_winners) == static_cast<uint32_t>(args.top_k)) {
            return;  // all are written; the same for every thread
        }
        __syncthreads();  // the scan's storage is used again
    }
}

__global__ void __launch_bounds__(threads) select_kernel(SelectArgs args) {
    __shared__ Shared shared;

    wait_for_producers();  // for the logits and the layout, and for the readers of the last layer's outputs
    if (!args.last_of_layer) {
        let_consumers_start();
    }

    const TileShape shape = args.tile.shape_of_step();
    const TileRows rows(args.tile, shape);
    const int64_t tile_row = blockIdx.x;
    if (tile_row >= rows.count()) {
        return;
    }
    const int64_t row = rows.begin + tile_row;
    const int end = args.ends[row];
    const float* logits = args.logits + tile_row * shape.stride;
    const int winners = min(args.top_k, end);
    if (args.counts != nullptr && threadIdx.x == 0) {
        args.counts[row] = winners;
    }
    if (args.padded_logits != nullptr) {
        for (int64_t j = end + static_cast<int64_t>(threadIdx.x); j < args.width; j += threads) {
            args.padded_logits[tile_row * shape.stride + j] = -INFINITY;
        }
    }
    if (end > args.top_k) {
        write_winners(args, row, logits, end, find_threshold(logits, end, static_cast<uint32_t>(args.top_k), shared),
                      shared);
        return;
    }
    for (int i = static_cast<int>(threadIdx.x); i < args.top_k; i += threads) {
        emit(args, row, i, i < end ? i : -1, logits);
    }
}

}  // namespace

void select(const SelectArgs& args, LaunchContext context) {
    launch(select_kernel, "select", context, static_cast<unsigned>(args.tile.most_rows()), threads, 0, args);
}

void prepare_select() {
    prepare_kernel(select_kernel, "select");
}

}  // namespace stepgraph
