// A thread's keys of a page in its stage, as the matrix units want them in registers.
//
// A dot product does not mind the order of its columns. Here thread t of the four that share a key has the key's columns
// [32*t, 32*t + 32), eight words of E4M3 codes, and in product step s gives the matrix units words 2*s and 2*s + 1 of them
// for columns 4*t and 16 + 4*t of the step.
#pragma once

#include <cmath>

#include <stepgraph/layouts/widened_mxfp4.h>

#include "score_ring.h"

namespace stepgraph::sm90 {

constexpr int steps = head_dim / 32;  // of a product

/// The two keys of a warpgroup's thread: `token` and the one eight further on.
__device__ __forceinline__ int first_token() {
    return static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
}
/// The one of them whose logits the thread writes.
__device__ __forceinline__ int own_token() {
    return static_cast<int>(threadIdx.x) % 2 * 8 + first_token();
}

/// Where word `word` of columns [32*t, 32*t + 32) of key `half` stands among the operands.
struct KeyOperands {
    uint32_t codes[steps][4];

    __device__ __forceinline__ uint32_t& at(int half, int word) { return codes[word / 2][word % 2 * 2 + half]; }
};

/// Keys of FP8 pages.
class Fp8Keys {
public:
    using Page = Fp8Page;
    /// Whether all is in registers when a page is loaded. Else its stage is needed until the page is scored.
    static constexpr bool are_copied = true;

    __device__ explicit Fp8Keys(CacheFormat)
        : offset_(static_cast<uint32_t>(first_token() * head_dim + static_cast<int>(threadIdx.x) % 4 * 32)),
          scale_offset_(static_cast<uint32_t>(scale_offset(CacheFormat::fp8, own_token(), 0))) {
        // Computed here, and not again for every page.
        pin(offset_);
        pin(scale_offset_);
    }

    __device__ void load(const Page& page, CacheFormat format) {
        const uint8_t* keys = page.data + offset_;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Lanes of neighbouring keys meet the same banks. To read their two chunks in opposite order would cost more.
            const uint4 first = *reinterpret_cast<const uint4*>(keys + half * 8 * head_dim);
            const uint4 second = *reinterpret_cast<const uint4*>(keys + half * 8 * head_dim + 16);
            operands.at(half, 0) = first.x;
            operands.at(half, 1) = first.y;
            operands.at(half, 2) = first.z;
            operands.at(half, 3) = first.w;
            operands.at(half, 4) = second.x;
            operands.at(half, 5) = second.y;
            operands.at(half, 6) = second.z;
            operands.at(half, 7) = second.w;
        }
        const uint32_t bits = *reinterpret_cast<const uint32_t*>(page.data + scale_offset_);
        scale = format == CacheFormat::fp8 ? float_of(bits) : ue8m0_scale(static_cast<uint8_t>(bits));
    }

    KeyOperands operands;
    float scale;  // of the own key

private:
    uint32_t offset_;
    uint32_t scale_offset_;
};

/// Keys of MXFP4 pages, widened (see widened_mxfp4.h). A thread has one scale block of each key.
class Mxfp4Keys {
public:
    using Page = Mxfp4Page;
    static constexpr bool are_copied = false;

    __device__ explicit Mxfp4Keys(CacheFormat format)
        : offset_(static_cast<uint32_t>(payload_offset(format, first_token(), block() * mxfp4_block))),
          scale_offset_(static_cast<uint32_t>(scale_offset(format, first_token(), block()))) {
        pin(offset_);
        pin(scale_offset_);
    }

    /// A key that cannot be widened gets the scale NaN.
    __device__ void load(const Page& page, CacheFormat format) {
        const int to_next = payload_offset(format, 8, 0);
        constexpr int to_next_scale = scale_offset(CacheFormat::mxfp4, 8, 0) - scale_offset(CacheFormat::mxfp4, 0, 0);
        static_assert(to_next_scale ==
                      scale_offset(CacheFormat::mxfp4_rowgroup, 8, 0) - scale_offset(CacheFormat::mxfp4_rowgroup, 0, 0));
        const uint4 key = *reinterpret_cast<const uint4*>(page.data + offset_);
        const uint4 next = *reinterpret_cast<const uint4*>(page.data + offset_ + to_next);
        // Two keys' scale bytes go in one word, one in each half.
        const uint32_t scales = page.data[scale_offset_] | static_cast<uint32_t>(page.data[scale_offset_ + to_next_scale])
                                                               << 16U;
        uint32_t largest = largest_of_four(scales);
        uint32_t differences = largest - scales;
        uint32_t lost = too_far(differences, largest);
        if (__any_sync(whole_warp, lost != 0)) {
            const uint3 closer = look_closer(key, next, scales);
            largest = closer.x;
            differences = closer.y;
            lost = closer.z;
        }
        widen(0, key, differences & 0xFFFFU);
        widen(1, next, differences >> 16U);
        const bool odd = threadIdx.x % 2 != 0;
        const bool is_lost = (odd ? lost >> 16U : lost & 0xFFFFU) != 0;
        scale = is_lost ? NAN : widened_scale(static_cast<int>(odd ? largest >> 16U : largest & 0xFFFFU));
    }

    KeyOperands operands;
    float scale;  // of the own key

private:
    static constexpr unsigned whole_warp = 0xFFFFFFFFU;
    static constexpr uint32_t sign_bits = 0x80008000U;

    [[nodiscard]] __device__ static int block() { return static_cast<int>(threadIdx.x) % 4; }
    /// A number in both halves of a word.
    [[nodiscard]] __device__ static constexpr uint32_t both(uint32_t x) { return x | x << 16U; }

    [[nodiscard]] __device__ static uint32_t largest_of_four(uint32_t bytes) {
        bytes = __vmaxu2(bytes, __shfl_xor_sync(whole_warp, bytes, 1));
        return __vmaxu2(bytes, __shfl_xor_sync(whole_warp, bytes, 2));
    }

    /// Not 0, in its half or the one above, where a key's scales lie too far apart, or too far from 1.
    [[nodiscard]] __device__ static uint32_t too_far(uint32_t differences, uint32_t largest) {
        const uint32_t apart = differences + both(0x7FFF - most_widened_difference);
        const uint32_t small = largest - both(least_widened_scale);
        const uint32_t large = largest + both(0x7FFF - most_widened_scale);
        return (apart | small | large) & sign_bits;
    }

    /// The largest scales, the differences from them, and a number in the half of a key that cannot be widened, where blocks
    /// of zeros are left out: any scale fits them.
    __device__ static __noinline__ uint3 look_closer(uint4 key, uint4 next, uint32_t scales) {
        constexpr uint32_t magnitudes = 0x77777777U;
        const uint32_t in_key = ((key.x | key.y | key.z | key.w) & magnitudes) != 0 ? 0xFFFFU : 0;
        const uint32_t in_next = ((next.x | next.y | next.z | next.w) & magnitudes) != 0 ? 0xFFFF0000U : 0;
        uint32_t largest = largest_of_four(scales & (in_key | in_next));
        const uint32_t empty = ((largest & 0xFFFFU) == 0 ? 0xFFFFU : 0) | (largest >> 16U == 0 ? 0xFFFF0000U : 0);
        largest |= both(127) & empty;  // of a key of zeros
        uint32_t differences = (largest - scales) & (in_key | in_next);
        uint32_t low = too_far(differences & 0xFFFFU, (largest & 0xFFFFU) | 127U << 16U);
        uint32_t high = too_far(differences & 0xFFFF0000U, (largest & 0xFFFF0000U) | 127U);
        low |= __shfl_xor_sync(whole_warp, low, 1);
        high |= __shfl_xor_sync(whole_warp, high, 1);
        low |= __shfl_xor_sync(whole_warp, low, 2);
        high |= __shfl_xor_sync(whole_warp, high, 2);
        differences &= (low != 0 ? 0 : 0xFFFFU) | (high != 0 ? 0 : 0xFFFF0000U);
        return {largest, differences, (low != 0 ? 1U : 0) | (high != 0 ? 1U << 16U : 0)};
    }

    /// Four E2M1 codes from the low half of `codes`, widened: what a byte permutation selects from tables of eight bytes.
    [[nodiscard]] __device__ static uint32_t widen_four(uint32_t codes, uint32_t magnitudes, uint32_t small,
                                                        uint32_t large) {
        constexpr uint32_t bit = 0x40404040U;
        // Of a selector with its highest bit set comes the sign of the byte, here 0, eight times: the turned sign.
        return permute(small, large, magnitudes) + 2 * permute(bit, bit, codes);
    }

    /// __byte_perm(), but for the highest bits of the selectors, which that masks out.
    [[nodiscard]] __device__ static uint32_t permute(uint32_t a, uint32_t b, uint32_t selectors) {
        uint32_t result;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selectors));
        return result;
    }

    __device__ void widen(int half, const uint4& key, uint32_t difference) {
        const uint32_t small = widened_small(difference);
        const uint32_t large = widened_large(difference);
        const uint32_t eights[] = {key.x, key.y, key.z, key.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t magnitudes = eights[i] & 0x77777777U;
            operands.at(half, 2 * i) = widen_four(eights[i], magnitudes, small, large);
            operands.at(half, 2 * i + 1) = widen_four(eights[i] >> 16U, magnitudes >> 16U, small, large);
        }
    }

    uint32_t offset_;
    uint32_t scale_offset_;
};

}  // namespace stepgraph::sm90
