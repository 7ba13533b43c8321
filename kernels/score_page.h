// Scoring one page of FP8 keys on Hopper, by one warpgroup.
#pragma once

#include <cuda_fp8.h>

#include "matrix_units.h"
#include "score_ring.h"
#include "score_sm90.h"

namespace stepgraph::sm90 {

constexpr int chunk_columns = 64;     // that a warpgroup multiplies at a time
constexpr int steps = head_dim / 32;  // of a product

// A dot product does not mind the order of its columns. Here thread t of the four that share a key has the key's bytes
// [32*t, 32*t + 32), two reads of 16, and in product step s gives the matrix units words 2*s and 2*s + 1 of them for columns
// 4*t and 16 + 4*t of the step.

/// Where word `word` of a query row's bytes [32*t, 32*t + 32) stands in row `column` of the swizzled query.
__device__ __forceinline__ uint8_t* query_word(Shared& shared, int column, int t, int word) {
    return shared.query[column] + (word ^ (column % 8)) * 16 + t * 4;
}

/// max(0, x) that keeps a NaN, in one instruction.
__device__ __forceinline__ float relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

/// Two E4M3 codes, the first in the low byte, as two FP16 numbers; each is exact.
__device__ __forceinline__ uint32_t halves(uint32_t codes) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
    return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16U;
}

/// Weighted sums over the heads of one row for a thread's two keys, over the heads that the thread has.
struct Sums {
    float low = 0.0F;   // key lane / 4 of the warp's sixteen
    float high = 0.0F;  // the one eight further on

    /// Adds heads 2*t and 2*t + 1 of the eight whose weights begin at `weights`; d as the matrix units leave it.
    __device__ void add(const float* weights, float d0, float d1, float d2, float d3) {
        const float2 w = *reinterpret_cast<const float2*>(weights + threadIdx.x % 4 * 2);
        low = fmaf(w.x, relu(d0), low);
        low = fmaf(w.y, relu(d1), low);
        high = fmaf(w.x, relu(d2), high);
        high = fmaf(w.y, relu(d3), high);
    }

    /// Adds up the pairs of the four threads that share the keys: even ones get low, odd ones high.
    [[nodiscard]] __device__ float pair_sum() const {
        const bool odd = threadIdx.x % 2 != 0;
        return (odd ? high : low) + __shfl_xor_sync(0xFFFFFFFFU, odd ? low : high, 1);
    }
};

/// A page in the registers of a warpgroup, scored for the rows of a piece, which stand in shared memory from column `slot`
/// on.
template <int heads>
class PageScorer {
public:
    __device__ PageScorer(const ScoreArgs& args, Shared& shared, const ScorePiece& piece, int slot)
        : args_(args),
          shared_(shared),
          slot_(slot),
          rows_(piece.rows),
          logits_(args.logits + (piece.first_row - args.tile_begin) * args.logits_stride) {}

    /// Takes the page, whose first key is `first_position`, out of a stage.
    __device__ void load(int stage, int first_position) {
        const Page& page = shared_.pages[stage];
        const auto lane = static_cast<int>(threadIdx.x) % 32;
        const int token = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Neighbouring keys read their two chunks in opposite order: eight lanes then meet different banks.
            const auto* chunks = reinterpret_cast<const uint4*>(page.payload[token + half * 8]) + lane % 4 * 2;
            const bool swapped = token % 2 != 0;
            const uint4 one = chunks[swapped ? 1 : 0];
            const uint4 other = chunks[swapped ? 0 : 1];
            const uint4 first = swapped ? other : one;
            const uint4 second = swapped ? one : other;
            keys_[0][half] = first.x;
            keys_[0][2 + half] = first.y;
            keys_[1][half] = first.z;
            keys_[1][2 + half] = first.w;
            keys_[2][half] = second.x;
            keys_[2][2 + half] = second.y;
            keys_[3][half] = second.z;
            keys_[3][2 + half] = second.w;
        }
        const int mine = lane % 2 * 8 + token;  // the key whose logits this thread writes
        position_ = first_position + mine;
        out_ = logits_ + position_ + (lane % 4 >= 2 ? args_.logits_stride : 0);
        asm volatile("" : "+l"(out_));  // computed here, and not again for every row
        const uint32_t scale = page.scales[mine];
        scale_ = args_.format == CacheFormat::fp8 ? float_of(scale) : ue8m0_scale(static_cast<uint8_t>(scale));
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(&shared_.page_taken[stage]);  // all is in registers
        }
    }

    __device__ void score() {
        constexpr int most = chunk_columns / heads;
#pragma unroll
        for (int row = 0; row < row_columns / heads; row += most) {
            if (row + most <= rows_) {
                score_chunk<most>(row);
            }
        }
        int row = rows_ / most * most;
        if constexpr (most > 2) {
            if (row + 2 <= rows_) {
                score_chunk<2>(row);
                row += 2;
            }
        }
        if constexpr (most > 1) {
            if (row < rows_) {
                score_chunk<1>(row);
            }
        }
        if (ends()[0] <= score_sm90_exact_keys) {  // a request's bounds ascend with its rows
            score_exactly();
        }
    }

private:
    [[nodiscard]] __device__ const int32_t* ends() const {
        return shared_.ends + slot_ / heads;
    }

    /// Scores `rows` rows, from `row` of the piece on, by E4M3 products.
    template <int rows>
    __device__ void score_chunk(int row) {
        constexpr int columns = rows * heads;
        float products[columns / 2];
#pragma unroll
        for (auto& product : products) {
            leave_undefined(product);
        }
#pragma unroll
        for (auto& step : keys_) {
#pragma unroll
            for (auto& word : step) {
                pin(word);
            }
        }
        const uint64_t query = swizzled_rows(shared_address(shared_.query[slot_ + row * heads]));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            wgmma_e4m3<columns>(products, keys_[step], query + step * 2, step);
        }
        wgmma_commit();
        wgmma_wait_all();
#pragma unroll
        for (auto& product : products) {
            pin(product);
        }
        const float* weights = shared_.weights + slot_ + row * heads;
        const int least_keys = max(args_.unscored_bound, score_sm90_exact_keys);
#pragma unroll
        for (int pair = 0; pair < rows; pair += 2) {
            float sums[2];
#pragma unroll
            for (int i = 0; i < 2 && pair + i < rows; ++i) {
                Sums row_sums;
#pragma unroll
                for (int j = (pair + i) * heads / 8; j < (pair + i + 1) * heads / 8; ++j) {
                    row_sums.add(weights + j * 8, products[j * 4], products[j * 4 + 1], products[j * 4 + 2],
                                 products[j * 4 + 3]);
                }
                sums[i] = row_sums.pair_sum();
            }
            write<(rows > 1)>(row + pair, sums[0], sums[rows > 1 ? 1 : 0],
                              [&](int end) { return end > least_keys && position_ < end; });
        }
    }

    /// Scores the rows of few keys, by products that are exact but for the order of their sums.
    __device__ void score_exactly() {
        uint32_t keys[steps * 2][4];
#pragma unroll
        for (int i = 0; i < steps * 2; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                keys[i][k] = halves(keys_[i / 2][k] >> i % 2 * 16 & 0xFFFFU);
            }
        }
#pragma unroll 1
        for (int row = 0; row < rows_ && ends()[row] <= score_sm90_exact_keys; ++row) {
            Sums sums;
#pragma unroll 1
            for (int first = slot_ + row * heads; first < slot_ + (row + 1) * heads; first += 8) {
                float products[4] = {};
#pragma unroll
                for (int i = 0; i < steps * 2; ++i) {
                    const int column = first + static_cast<int>(threadIdx.x) % 32 / 4;
                    const int t = static_cast<int>(threadIdx.x) % 4;
                    const auto low = *reinterpret_cast<uint32_t*>(query_word(shared_, column, t, i / 2 * 2));
                    const auto high = *reinterpret_cast<uint32_t*>(query_word(shared_, column, t, i / 2 * 2 + 1));
                    mma_f16(products, keys[i], halves(low >> i % 2 * 16 & 0xFFFFU), halves(high >> i % 2 * 16 & 0xFFFFU));
                }
                sums.add(shared_.weights + first, products[0], products[1], products[2], products[3]);
            }
            const float sum = sums.pair_sum();
            write<false>(row, sum, sum, [&](int end) { return end > args_.unscored_bound && position_ < end; });
        }
    }

    /// Adds up the two pairs of threads that share keys, the lower pair for row `row`, the upper for the next one if there
    /// are two, and writes the logits that are wanted, given the row's bound.
    template <bool two, typename Wanted>
    __device__ void write(int row, float sum, float next_sum, Wanted wanted) {
        const bool upper = threadIdx.x % 4 >= 2;
        const float total = (upper ? next_sum : sum) + __shfl_xor_sync(0xFFFFFFFFU, upper ? sum : next_sum, 2);
        const int mine = row + (upper && two ? 1 : 0);
        if (wanted(ends()[mine]) && (two || !upper)) {
            out_[row * args_.logits_stride] = total * scale_;
        }
    }

    const ScoreArgs& args_;
    Shared& shared_;
    int slot_;
    int rows_;
    float* logits_;  // of the piece's first row
    uint32_t keys_[steps][4];
    // Of the key whose logits this thread writes.
    int position_;
    float scale_;
    float* out_;  // of the piece's first row, or, for the threads that write every other row, of its second
};

}  // namespace stepgraph::sm90
