// Slices that are too long for shared memory: read once, and only keys that may win are kept.
#pragma once

#include "select_search.h"

namespace stepgraph::selecting {

/// 16 logits a thread, on their way from memory: in each warp consecutive ones, a vector a lane after the other.
struct ComingLogits {
    static constexpr int vectors = 4;
    static constexpr int n = vectors * vector_keys;
    static constexpr int block_places = threads * n;

    float logits[n];

    /// Place, behind the chunk's first, of this thread's vector i.
    __device__ __forceinline__ static int place(int i) {
        return (warp() * vectors + i) * vector_stretch + lane() * vector_keys;
    }

    /// Asks for those from `chunk` on; NaN where there is none.
    __device__ __forceinline__ void ask(const Slice& slice, int chunk) {
        const int first = chunk + warp() * vectors * vector_stretch;
        if (slice.whole(first) && slice.whole(first + vectors * vector_stretch - vector_keys)) {
            const auto* from = reinterpret_cast<const float4*>(slice.at(chunk + place(0)));
#pragma unroll
            for (int i = 0; i < vectors; ++i) {
                const float4 four = __ldcg(from + i * lanes);
                logits[vector_keys * i] = four.x;
                logits[vector_keys * i + 1] = four.y;
                logits[vector_keys * i + 2] = four.z;
                logits[vector_keys * i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < n; ++i) {
                const int at = chunk + place(i / vector_keys) + i % vector_keys;
                logits[i] = slice.has(at) ? __ldcg(slice.at(at)) : NAN;
            }
        }
    }
};

/// Lists the keys of the slice from guess.bound() on, at the beginning of the area, and their positions behind `capacity`
/// words, in ascending position; of the heavy key only the first K. The number of keys, or -1 if there are too many of them.
/// All threads of the block.
__device__ __forceinline__ int list_candidates(const Slice& slice, const Guess& guess, int top_k, int capacity) {
    if (guess.bound() <= key_of_minus_infinity) {
        return -1;  // a NaN might win, which no comparison of logits tells
    }
    const float bound = logit_of_key(guess.bound());
    int n = 0;
    int equal_listed = 0;
    ComingLogits coming;
    coming.ask(slice, 0);
#pragma unroll 1
    for (int chunk = 0; chunk < slice.places(); chunk += ComingLogits::block_places) {
        float logits[ComingLogits::n];
#pragma unroll
        for (int i = 0; i < ComingLogits::n; ++i) {
            logits[i] = coming.logits[i];
        }
        coming.ask(slice, chunk + ComingLogits::block_places);
        uint32_t marks = 0;
#pragma unroll
        for (int i = 0; i < ComingLogits::n; ++i) {
            marks |= logits[i] >= bound ? 1U << i : 0U;
        }
        if (guess.heavy != 0) {
            uint32_t equal = 0;
#pragma unroll
            for (int i = 0; i < ComingLogits::n; ++i) {
                equal |= logits[i] == bound ? 1U << i : 0U;
            }
            const OrderedPlaces places = ordered_places(equal, shared().warp_words[5]);
#pragma unroll
            for (int i = 0; i < ComingLogits::vectors; ++i) {
                int rank = equal_listed + static_cast<int>(places.before[i]);
#pragma unroll
                for (int bit = i * vector_keys; bit < (i + 1) * vector_keys; ++bit) {
                    const uint32_t is_equal = equal >> bit & 1U;
                    marks &= ~((rank >= top_k ? is_equal : 0U) << bit);
                    rank += static_cast<int>(is_equal);
                }
            }
            equal_listed += static_cast<int>(places.total);
        }
        // The two words in turns: whoever has passed a barrier has read the one before.
        const bool odd = (chunk & ComingLogits::block_places) != 0;
        const OrderedPlaces places = ordered_places(marks, shared().warp_words[odd ? 1 : 2]);
        if (n + static_cast<int>(places.total) > capacity) {
            return -1;
        }
#pragma unroll
        for (int i = 0; i < ComingLogits::vectors; ++i) {
            int at = n + static_cast<int>(places.before[i]);
            const int position = slice.first_position() + chunk + ComingLogits::place(i);
#pragma unroll
            for (int c = 0; c < vector_keys; ++c) {
                const bool listed = (marks >> (i * vector_keys + c) & 1U) != 0;
                if (listed) {
                    shared().area[at] = bits_of(logits[i * vector_keys + c]);
                    shared().area[at + capacity] = static_cast<uint32_t>(position + c);
                }
                at += listed ? 1 : 0;
            }
        }
        n += static_cast<int>(places.total);
    }
    __syncthreads();  // the list of logits is complete
#pragma unroll 1
    for (int i = thread(); i < n; i += threads) {
        shared().area[i] = order_key(float_of(shared().area[i]));
    }
    if (thread() < vector_keys && n + thread() < capacity) {
        shared().area[n + thread()] = 0;
    }
    __syncthreads();  // the list of keys is complete
    return n;
}

}  // namespace stepgraph::selecting
