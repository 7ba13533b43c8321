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
    /// Whether they are widened, and the query too. Then some may be lost.
    static constexpr bool are_widened = false;
    /// Whether two pages at a time are faster: where instructions, not memory, bound a page.
    static constexpr bool come_in_twos = false;

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
    static constexpr bool are_widened = true;
    static constexpr bool come_in_twos = true;

    __device__ explicit Mxfp4Keys(CacheFormat format)
        : offset_(static_cast<uint32_t>(payload_offset(format, first_token(), block() * mxfp4_block))),
          scale_offset_(static_cast<uint32_t>(scale_offset(format, first_token(), block()))) {
        pin(offset_);
        pin(scale_offset_);
    }

    /// A key that cannot be widened gets the scale NaN.
    __device__ void load(const Page& page, CacheFormat format) {
        const Codes codes = codes_in(page, format);
        Scales scales(codes);
        if (__any_sync(whole_warp, scales.lost != 0)) {
            scales = look_closer(codes);
        }
        widen(codes, scales);
    }

    /// Both at once: neither waits for what the other reads.
    __device__ static void load_two(Mxfp4Keys& first, const Page& first_page, Mxfp4Keys& second, const Page& second_page,
                                    CacheFormat format) {
        const Codes codes = first.codes_in(first_page, format);
        const Codes second_codes = second.codes_in(second_page, format);
        Scales scales(codes);
        Scales second_scales(second_codes);
        if (__any_sync(whole_warp, (scales.lost | second_scales.lost) != 0)) {
            scales = look_closer(codes);
            second_scales = look_closer(second_codes);
        }
        first.widen(codes, scales);
        second.widen(second_codes, second_scales);
    }

    KeyOperands operands;
    float scale;  // of the own key

private:
    static constexpr unsigned whole_warp = 0xFFFFFFFFU;

    [[nodiscard]] __device__ static int block() { return static_cast<int>(threadIdx.x) % 4; }
    /// A number in both halves of a word.
    [[nodiscard]] __device__ static constexpr uint32_t both(uint32_t x) { return x | x << 16U; }

    /// A thread's block of its two keys as it stands in the page. Of two keys, each has a half of a word.
    struct Codes {
        uint4 key;
        uint4 next;
        uint32_t scales;
    };

    [[nodiscard]] __device__ Codes codes_in(const Page& page, CacheFormat format) const {
        const int to_next = payload_offset(format, 8, 0);
        constexpr int to_next_scale = scale_offset(CacheFormat::mxfp4, 8, 0) - scale_offset(CacheFormat::mxfp4, 0, 0);
        static_assert(to_next_scale ==
                      scale_offset(CacheFormat::mxfp4_rowgroup, 8, 0) - scale_offset(CacheFormat::mxfp4_rowgroup, 0, 0));
        const uint32_t low = page.data[scale_offset_];
        const uint32_t high = page.data[scale_offset_ + to_next_scale];
        return {*reinterpret_cast<const uint4*>(page.data + offset_),
                *reinterpret_cast<const uint4*>(page.data + offset_ + to_next), low | high << 16U};
    }

    [[nodiscard]] __device__ static uint32_t largest_of_four(uint32_t bytes) {
        bytes = __vmaxu2(bytes, __shfl_xor_sync(whole_warp, bytes, 1));
        return __vmaxu2(bytes, __shfl_xor_sync(whole_warp, bytes, 2));
    }

    struct Scales {
        uint32_t largest;      // of the four blocks
        uint32_t differences;  // of this thread's block from it
        uint32_t lost;         // not 0 in the half, or the one above it, of a key that cannot be widened

        __device__ explicit Scales(const Codes& codes)
            : largest(largest_of_four(codes.scales)), differences(largest - codes.scales), lost(too_far()) {}
        __device__ Scales(uint32_t largest, uint32_t differences)
            : largest(largest), differences(differences), lost(too_far()) {}

    private:
        /// Not 0, likewise, where a key's scales lie too far apart, or too far from 1.
        [[nodiscard]] __device__ uint32_t too_far() const {
            const uint32_t apart = differences + both(0x7FFF - most_widened_difference);
            const uint32_t small = largest - both(least_widened_scale);
            const uint32_t large = largest + both(0x7FFF - most_widened_scale);
            return (apart | small | large) & both(0x8000);
        }
    };

    /// Leaves blocks of zeros out: any scale fits them.
    __device__ static __noinline__ Scales look_closer(Codes codes) {
        constexpr uint32_t of_zeros = widened_scale_of_zeros;
        constexpr uint32_t low_half = 0xFFFFU;
        const auto any_magnitude = [](const uint4& c) { return ((c.x | c.y | c.z | c.w) & e2m1_magnitudes) != 0; };
        const uint32_t filled = (any_magnitude(codes.key) ? low_half : 0) | (any_magnitude(codes.next) ? ~low_half : 0);
        uint32_t largest = largest_of_four(codes.scales & filled);
        // Of a key of zeros.
        largest |= (largest & low_half) == 0 ? of_zeros : 0;
        largest |= (largest & ~low_half) == 0 ? of_zeros << 16U : 0;
        const uint32_t differences = (largest - (codes.scales & filled)) & filled;
        // Each for itself: what one borrows would show in the other. All four threads must know.
        uint32_t lost = (Scales((largest & low_half) | of_zeros << 16U, differences & low_half).lost != 0 ? 1U : 0) |
                        (Scales((largest & ~low_half) | of_zeros, differences & ~low_half).lost != 0 ? 1U << 16U : 0);
        lost |= __shfl_xor_sync(whole_warp, lost, 1);
        lost |= __shfl_xor_sync(whole_warp, lost, 2);
        Scales scales(largest, differences & ~(lost * low_half));
        scales.lost = lost;
        return scales;
    }

    __device__ void widen(const Codes& codes, const Scales& scales) {
        widen_key(0, codes.key, scales.differences & 0xFFFFU);
        widen_key(1, codes.next, scales.differences >> 16U);
        const unsigned own_half = threadIdx.x % 2 * 16;
        const bool is_lost = (scales.lost >> own_half & 0xFFFFU) != 0;
        scale = is_lost ? NAN : widened_scale(static_cast<int>(scales.largest >> own_half & 0xFFFFU));
    }

    /// Four E2M1 codes from the low half of `codes`, widened: what a byte permutation selects from tables of eight bytes.
    [[nodiscard]] __device__ static uint32_t widen_four(uint32_t codes, uint32_t magnitudes, uint32_t small,
                                                        uint32_t large) {
        constexpr uint32_t bit = 0x40404040U;
        // Of a selector with its highest bit set comes the sign of the byte, here 0, eight times: the turned sign.
        return device::permute_bytes(small, large, magnitudes) + 2 * device::permute_bytes(bit, bit, codes);
    }

    __device__ void widen_key(int half, const uint4& key, uint32_t difference) {
        const uint32_t small = widened_small(difference);
        const uint32_t large = widened_large(difference);
        const uint32_t eights[] = {key.x, key.y, key.z, key.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t magnitudes = eights[i] & e2m1_magnitudes;
            operands.at(half, 2 * i) = widen_four(eights[i], magnitudes, small, large);
            operands.at(half, 2 * i + 1) = widen_four(eights[i] >> 16U, magnitudes >> 16U, small, large);
        }
    }

    uint32_t offset_;
    uint32_t scale_offset_;
};

}  // namespace stepgraph::sm90
