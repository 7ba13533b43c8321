// The winners of a row, in ascending position, once it is known what wins.
#pragma once

#include "select.h"
#include "select_search.h"

#include <stepgraph/layouts/cache_page.h>

namespace stepgraph::selecting {

/// Writes positions to outputs [from, to) of a row, and what is asked for beside them. All threads of the block.
template <typename Position>
__device__ __forceinline__ void write_outputs(const SelectArgs& args, int64_t row, const float* logits, int from, int to,
                                              Position position_of) {
    int32_t* indices = args.indices + row * args.top_k;
    const bool more = args.physical_slots != nullptr || args.winner_logits != nullptr;
#pragma unroll 1
    for (int i = from + thread(); i < to; i += threads) {
        const int32_t position = position_of(i);
        indices[i] = position;
        if (more) {
            const int64_t at = row * args.top_k + i;
            if (args.physical_slots != nullptr) {
                args.physical_slots[at] =
                    position < 0
                        ? -1
                        : slot_of(args.block_table + args.row_request[row] * args.block_table_stride, position, args.pages);
            }
            if (args.winner_logits != nullptr) {
                args.winner_logits[at] = position < 0 ? -INFINITY : logits[position];
            }
        }
    }
}

/// Leaves the winners' positions in histogram[0] in ascending order, and says how many there are. `keys_of(i)`: the keys of
/// places i to i + 3, a multiple of 4, below `n`, 0 where there is none; `positions_of(i)`: their positions. All threads of
/// the block. The histogram must not be in use.
template <typename Keys, typename Positions>
__device__ __forceinline__ int stage_winners(const Threshold& threshold, int n, Keys keys_of, Positions positions_of) {
    constexpr int most_vectors = 4;
    auto* winners = reinterpret_cast<int32_t*>(shared().histogram[0]);
    uint32_t staged = 0;
    uint32_t equal_before = threshold.equal_before;
#pragma unroll 1
    for (int begin = 0; begin < n; begin += most_vectors * vector_keys * threads) {
        // Neighbouring places to a warp, a vector a lane after the other, as few vectors as reach.
        const int vectors = min(most_vectors, (n - begin + vector_keys * threads - 1) / (vector_keys * threads));
        const int first = begin + warp() * vectors * vector_stretch + lane() * vector_keys;
        uint32_t marks = 0;
        uint32_t equal = 0;
#pragma unroll
        for (int i = 0; i < most_vectors; ++i) {
            if (i < vectors && first + i * vector_stretch < n) {
                const uint4 keys = keys_of(first + i * vector_stretch);
                const auto bits = [i](bool x, bool y, bool z, bool w) {
                    return (x ? 1U << 4 * i : 0U) | (y ? 2U << 4 * i : 0U) | (z ? 4U << 4 * i : 0U) | (w ? 8U << 4 * i : 0U);
                };
                const uint32_t key = threshold.key;
                marks |= bits(keys.x >= key, keys.y >= key, keys.z >= key, keys.w >= key);
                if (!threshold.all_win) {
                    equal |= bits(keys.x == key, keys.y == key, keys.z == key, keys.w == key);
                }
            }
        }
        if (!threshold.all_win) {
            const OrderedPlaces places = ordered_places(equal, shared().warp_words[1]);
#pragma unroll
            for (int i = 0; i < most_vectors; ++i) {
                uint32_t rank = equal_before + places.before[i];
#pragma unroll
                for (int bit = i * vector_keys; bit < (i + 1) * vector_keys; ++bit) {
                    const uint32_t is_equal = equal >> bit & 1U;
                    marks &= ~((rank >= threshold.equal_winners ? is_equal : 0U) << bit);
                    rank += is_equal;
                }
            }
            equal_before += places.total;
        }
        // The two words in turns: whoever has passed a barrier has read the one before.
        const bool odd = (begin / (most_vectors * vector_keys * threads) & 1) != 0;
        const OrderedPlaces places = ordered_places(marks, shared().warp_words[odd ? 2 : 3]);
#pragma unroll
        for (int i = 0; i < most_vectors; ++i) {
            if (i < vectors) {
                uint32_t at = staged + places.before[i];
                const int4 four = positions_of(first + i * vector_stretch);
                const int32_t positions[] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int c = 0; c < vector_keys; ++c) {
                    const bool wins = (marks >> (i * vector_keys + c) & 1U) != 0;
                    if (wins) {
                        winners[at] = positions[c];
                    }
                    at += wins ? 1U : 0U;
                }
            }
        }
        staged += places.total;
    }
    __syncthreads();  // the winners are in place
    return static_cast<int>(staged);
}

}  // namespace stepgraph::selecting
