// The keys of a row's slice in a block's shared memory, and the ranges of keys that a search narrows.
#pragma once

#include <cstddef>

#include <stepgraph/layouts/host_device.h>

#include "block_instructions.h"
#include "select_block.h"

namespace stepgraph::selecting {

using namespace device;

inline constexpr int bins = 4096;  // of a histogram
inline constexpr int bin_bits = 12;
inline constexpr int segment_bins = 64;  // whose sum the other blocks read
inline constexpr int segments = bins / segment_bins;
inline constexpr int most_rounds = 3;                       // of 12 bits of a key each
inline constexpr int few_keys = lanes;                      // are ranked by every warp for itself
inline constexpr int vector_keys = 4;                       // consecutive keys of 16 bytes
inline constexpr int vector_stretch = lanes * vector_keys;  // keys of a warp's load of a vector a lane
inline constexpr int most_winners = 4096;

/// Integers that order as the logits do: NaN as -inf, -0 as +0. Never 0, which stands for no key.
__device__ __forceinline__ uint32_t order_key(float logit) {
    const uint32_t bits = bits_of(add_rn(fmaxf(logit, -INFINITY), 0.0F));  // fmaxf drops a NaN; -0 + 0 = +0
    return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000U);
}
inline constexpr uint32_t key_of_minus_infinity = 0x007FFFFFU;
__device__ __forceinline__ float logit_of_key(uint32_t key) {
    return float_of((key & 0x80000000U) != 0 ? key ^ 0x80000000U : ~key);
}

/// The blocks of a row that have keys. A cluster may hold more of them: those without keys have left, and its barriers do
/// not wait for them.
struct RowBlocks {
    int rank;   // of this block
    int count;  // 1: nothing is exchanged
};

/// The bin of a histogram in which a key of a certain rank lies.
struct FoundBin {
    uint32_t bin;
    uint32_t above;  // keys in higher bins
    uint32_t count;  // keys in this bin
};

/// Of a found bin: keys in the blocks of the row before this one.
struct BlocksBefore {
    uint32_t inside;  // the bin
    uint32_t above;   // it
};

// Words of the area that holds keys. A block alone fills it; a block of a cluster leaves room for the keys it exchanges.
inline constexpr int area_words = 16384;
// More keys of a lone block are read faster as a list.
inline constexpr int most_held_keys = 8192;
inline constexpr int exchanged_keys = 4096;  // at most, by all blocks of a row together
inline constexpr int kept_at = 8192;         // this block's keys that the others fetch
inline constexpr int gathered_at = kept_at + exchanged_keys;
static_assert(most_held_keys <= kept_at);
/// Of a list of keys with as many positions behind them.
__device__ __forceinline__ int list_capacity(RowBlocks blocks) {
    return (blocks.count == 1 ? area_words : kept_at) / 2;
}

/// A block's shared memory.
struct Shared {
    // Clear at the beginning:
    uint32_t histogram[2][bins];
    uint32_t kept[3];  // counts of keys: above the guessed range, in it (they are at kept_at), equal to the heavy key
    uint32_t few_count;
    // Not cleared:
    alignas(8) WarpWords warp_words[6];
    uint32_t few[few_keys];
    FoundBin found[2];
    BlocksBefore found_before;  // of found[0]
    uint32_t segment_sums[most_rounds][segments];
    alignas(16) uint32_t area[area_words + vector_keys];
};
static_assert(sizeof(Shared) <= 99 * 1024, "what the smallest GPUs from sm_80 on give a block");

/// The only way to it: through a pointer that was handed on the compiler would no longer know that it is shared.
__device__ __forceinline__ Shared& shared() {
    return *reinterpret_cast<Shared*>(dynamic_shared_memory());
}

/// Followed by a barrier.
__device__ __forceinline__ void clear_shared() {
#pragma unroll 1
    for (int i = thread(); i < static_cast<int>(offsetof(Shared, warp_words) / sizeof(uint4)); i += threads) {
        reinterpret_cast<uint4*>(&shared())[i] = {};
    }
}
__device__ __forceinline__ void clear_histogram(int which) {
#pragma unroll 1
    for (int i = thread(); i < bins / vector_keys; i += threads) {
        reinterpret_cast<uint4*>(shared().histogram[which])[i] = {};
    }
}

/// Visits keys at words `at` to `at + n` of the area, zeros behind them up to a multiple of four. In no order.
template <typename Visit>
__device__ __forceinline__ void each_key(int at, int n, Visit visit) {
#pragma unroll 1
    for (int i = thread() * vector_keys; i < n; i += threads * vector_keys) {
        const uint4 keys = *reinterpret_cast<const uint4*>(&shared().area[at + i]);
        visit(keys.x);
        visit(keys.y);
        visit(keys.z);
        visit(keys.w);
    }
}

/// Keys from `low` to `high`: the K-th largest of the row is the wanted-th of them.
struct Range {
    uint32_t low;
    uint32_t high;
    uint32_t wanted;

    __device__ __forceinline__ bool holds(uint32_t key) const { return key - low <= high - low; }
    /// Bits of a key that a bin leaves open.
    __device__ __forceinline__ int shift() const { return max(0, 32 - __clz(static_cast<int>(high - low)) - bin_bits); }
    __device__ __forceinline__ void count(int which, uint32_t key, int shift) const {
        if (holds(key)) {
            atomicAdd(&shared().histogram[which][(key - low) >> shift], 1U);
        }
    }
    __device__ __forceinline__ void narrow(const FoundBin& found, int shift) {
        low += found.bin << shift;
        high = min(high, low + ((1U << shift) - 1U));
        wanted -= found.above;
    }
};

/// A row's logits from the last 16-byte boundary before them on: its places. The first `skew` of them are not the row's.
struct RowMemory {
    const float* aligned;
    int skew;

    __device__ __forceinline__ explicit RowMemory(const float* logits)
        : aligned(logits), skew(static_cast<int>(reinterpret_cast<uintptr_t>(logits) / sizeof(float) % vector_keys)) {
        aligned -= skew;
    }
};

/// Places [begin, end) of a row, of which those below the skew hold no key; begin is a multiple of 32.
struct Slice {
    RowMemory row;
    int begin;
    int end;

    [[nodiscard]] __device__ __forceinline__ int places() const { return end - begin; }
    /// Position in the row of the slice's place 0.
    [[nodiscard]] __device__ __forceinline__ int first_position() const { return begin - row.skew; }
    /// Whether the vector at a place of the slice holds four keys.
    [[nodiscard]] __device__ __forceinline__ bool whole(int place) const {
        return begin + place >= row.skew && begin + place + vector_keys <= end;
    }
    [[nodiscard]] __device__ __forceinline__ bool has(int place) const {
        return begin + place >= row.skew && begin + place < end;
    }
    [[nodiscard]] __device__ __forceinline__ const float* at(int place) const { return row.aligned + begin + place; }
    /// A vector of keys straight from memory, 0 where there is none.
    [[nodiscard]] __device__ __forceinline__ uint4 load(int place) const {
        if (whole(place)) {
            const float4 four = __ldcg(reinterpret_cast<const float4*>(at(place)));
            return {order_key(four.x), order_key(four.y), order_key(four.z), order_key(four.w)};
        }
        return {load_one(place), load_one(place + 1), load_one(place + 2), load_one(place + 3)};
    }

private:
    [[nodiscard]] __device__ __forceinline__ uint32_t load_one(int place) const {
        return has(place) ? order_key(__ldcg(at(place))) : 0U;
    }
};

/// Asks for the slice's logits, to the beginning of the area.
__device__ __forceinline__ void ask_for(const Slice& slice) {
#pragma unroll 1
    for (int place = thread() * vector_keys; place < slice.places(); place += threads * vector_keys) {
        if (slice.whole(place)) {
            start_copy(&shared().area[place], slice.at(place));
        }
    }
}

/// Waits for them and puts keys in their place; `visit` sees each. Followed by a barrier.
template <typename Visit>
__device__ __forceinline__ void receive(const Slice& slice, Visit visit) {
    finish_copies();
#pragma unroll 1
    for (int place = thread() * vector_keys; place < slice.places(); place += threads * vector_keys) {
        uint4& four = *reinterpret_cast<uint4*>(&shared().area[place]);
        uint4 keys = four;
        if (slice.whole(place)) {
            keys = {order_key(float_of(keys.x)), order_key(float_of(keys.y)), order_key(float_of(keys.z)),
                    order_key(float_of(keys.w))};
        } else {
            keys = slice.load(place);
        }
        four = keys;
        visit(keys.x);
        visit(keys.y);
        visit(keys.z);
        visit(keys.w);
    }
}

}  // namespace stepgraph::selecting
