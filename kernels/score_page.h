// Scoring one page of keys on Hopper, by one warpgroup.
#pragma once

#include <cuda_fp8.h>

#include <stepgraph/layouts/query_row.h>

#include "matrix_units.h"
#include "score_keys.h"
#include "score_sm90.h"

namespace stepgraph::sm90 {

/// Where word `word` of a query row's bytes [32*t, 32*t + 32) stands in row `column` of the swizzled query.
template <typename Page>
__device__ __forceinline__ uint8_t* query_word(Shared<Page>& shared, int column, int t, int word) {
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

/// The head whose weight stands at `place` among those of its row: a thread's weights, heads 2*t and 2*t + 1 of every eight,
/// stand together.
template <int heads>
__device__ __forceinline__ int head_of_place(int place) {
    constexpr int of_a_thread = heads / 4;
    return place % of_a_thread / 2 * 8 + place / of_a_thread * 2 + place % 2;
}

/// Weighted sums over the heads of one row for a thread's two keys, over the heads that the thread has.
struct Sums {
    float low = 0.0F;   // key lane / 4 of the warp's sixteen
    float high = 0.0F;  // the one eight further on

    /// Adds two heads; d as the matrix units leave it.
    __device__ void add(float weight, float next_weight, const float* d) {
        low = fmaf(weight, relu(d[0]), low);
        low = fmaf(next_weight, relu(d[1]), low);
        high = fmaf(weight, relu(d[2]), high);
        high = fmaf(next_weight, relu(d[3]), high);
    }

    /// Adds up the pairs of the four threads that share the keys: even ones get low, odd ones high.
    [[nodiscard]] __device__ float pair_sum() const {
        const bool odd = threadIdx.x % 2 != 0;
        return (odd ? high : low) + __shfl_xor_sync(0xFFFFFFFFU, odd ? low : high, 1);
    }
};

/// Scores a warp's sixteen keys, from `token` of a page on, for rows of which MXFP4 numbers could not be widened, or with
/// keys of which they could not: as the portable scorer does, a lane a key, in no hurry.
template <int heads>
__device__ __noinline__ void score_by_columns(const ScoreArgs& args, const uint8_t* page, int token, int position,
                                              int first_row, int rows, const int32_t* ends) {
    token += static_cast<int>(threadIdx.x) % 32;
    position += static_cast<int>(threadIdx.x) % 32;
    for (int i = 0; i < rows; ++i) {
        const int row = first_row + i;
        if (threadIdx.x % 32 >= 16 || ends[i] <= args.unscored_bound || position >= ends[i]) {
            continue;
        }
        float sum = 0.0F;
        for (int head = 0; head < heads; ++head) {
            float dot = 0.0F;
            for (int column = 0; column < head_dim; ++column) {
                const float query = query_value(args.format, args.query, heads, args.max_rows, row, head, column);
                dot = add_rn(dot, mul_rn(query, key_value(args.format, page, token, column)));
            }
            sum = add_rn(sum, mul_rn(args.head_weights[int64_t{row} * heads + head], relu(dot)));
        }
        args.logits[int64_t{row - args.tile_begin} * args.logits_stride + position] = sum;
    }
}

/// Scores pages in the registers of a warpgroup, for the rows of a piece, which stand in shared memory from column `slot`
/// on.
template <int heads, typename Keys>
class PageScorer {
public:
    using Page = typename Keys::Page;

    __device__ PageScorer(const ScoreArgs& args, Shared<Page>& shared)
        : args_(args),
          shared_(shared),
          policy_(evict_last()),
          least_keys_(max(args.unscored_bound, score_sm90_exact_keys)),
          mine_(static_cast<uint32_t>(own_token())),
          keys_(args.format) {
        pin(mine_);  // computed here, and not again for every page
    }

    __device__ void take(const ScorePiece& piece, int slot) {
        slot_ = slot;
        first_row_ = piece.first_row;
        rows_ = piece.rows;
        const int64_t row = piece.first_row - args_.tile_begin + (writes_second_row() ? 1 : 0);
        logits_ = args_.logits + row * args_.logits_stride + mine_;
        query_ = swizzled_rows_low(shared_address(shared_.query[slot]));
        pin(query_);
    }

    /// Takes a page out of its stage.
    __device__ void load(int stage) {
        keys_.load(shared_.pages[stage], args_.format);
        valid_ = shared_.valid[stage];
        stage_ = stage;
        if (Keys::are_copied) {
            release();
        }
    }

    /// Writes the logits of the page that was loaded, whose first key is `first_position`.
    __device__ void score(int first_position) {
        position_ = first_position + static_cast<int>(mine_);
        out_ = logits_ + first_position;
        if (valid_) {
            score_rows();
            if (ends()[0] <= score_sm90_exact_keys) {  // a request's bounds ascend with its rows
                score_exactly();
            }
        } else {
            write_invalid();
        }
        if (!Keys::are_copied) {
            release();
        }
    }

private:
    /// Lets the stage have its next page.
    __device__ void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(&shared_.page_taken[stage_]);
        }
    }

    [[nodiscard]] __device__ static bool writes_second_row() { return threadIdx.x % 4 >= 2; }

    [[nodiscard]] __device__ const int32_t* ends() const { return shared_.ends + slot_ / heads; }

    /// The weights of four of this thread's heads of row `row`.
    [[nodiscard]] __device__ float4 weights(int row, int four) const {
        const float* of_row = shared_.weights + slot_ + row * heads;
        return *reinterpret_cast<const float4*>(of_row + threadIdx.x % 4 * (heads / 4) + four * 4);
    }

    /// Gives the keys of an invalid block, for which nothing was copied, the logit -inf.
    __device__ void write_invalid() {
        for (int row = writes_second_row() ? 1 : 0; row < rows_; row += 2) {
            const int end = ends()[row];
            if (end > args_.unscored_bound && position_ < end) {
                store(out_ + row / 2 * 2 * args_.logits_stride, -INFINITY, policy_);
            }
        }
    }

    /// Scores the rows of the piece, four or two at a time or the last one.
    __device__ void score_rows() {
        int row = 0;
        if constexpr (heads <= 32) {  // of 64 the registers hold the products of two rows only
#pragma unroll 1
            for (; row + 4 <= rows_; row += 4) {
                // The matrix units multiply the third and the fourth while the first two are summed up.
                float products[heads];
                float next_products[heads];
                multiply<2>(row, products);
                multiply<2>(row + 2, next_products);
                wgmma_wait<1>();
                sum_up<2>(row, products);
                wgmma_wait<0>();
                sum_up<2>(row + 2, next_products);
            }
        }
#pragma unroll 1
        for (; row + 2 <= rows_; row += 2) {
            float products[heads];
            multiply<2>(row, products);
            wgmma_wait<0>();
            sum_up<2>(row, products);
        }
        if (row < rows_) {
            float products[heads / 2];
            multiply<1>(row, products);
            wgmma_wait<0>();
            sum_up<1>(row, products);
        }
    }

    /// Starts to multiply by `rows` rows, from `row` of the piece on.
    template <int rows>
    __device__ void multiply(int row, float (&products)[rows * heads / 2]) {
#pragma unroll
        for (auto& product : products) {
            leave_undefined(product);
        }
#pragma unroll
        for (auto& step : keys_.operands.codes) {
#pragma unroll
            for (auto& word : step) {
                pin(word);
            }
        }
        const uint32_t query = query_ + static_cast<uint32_t>(row * heads * head_dim / 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            wgmma_e4m3<rows * heads>(products, keys_.operands.codes[step], query + step * 2, step);
        }
        wgmma_commit();
    }

    /// Sums up the products of one or two rows, which are complete, and writes their logits.
    template <int rows>
    __device__ void sum_up(int row, float (&products)[rows * heads / 2]) {
#pragma unroll
        for (auto& product : products) {
            pin(product);
        }
        // Read, and computed, before the sums, which nothing then follows but the store.
        const int end = ends()[row + (rows > 1 && writes_second_row() ? 1 : 0)];
        float* to = out_ + row * args_.logits_stride;
        float sums[rows];
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            Sums row_sums;
#pragma unroll
            for (int j = 0; j < heads / 16; ++j) {
                const float* d = products + i * heads / 2 + j * 8;
                const float4 w = weights(row + i, j);
                row_sums.add(w.x, w.y, d);
                row_sums.add(w.z, w.w, d + 4);
            }
            sums[i] = row_sums.pair_sum();
        }
        if (write<(rows > 1)>(to, sums[0], sums[rows - 1], end > least_keys_ && position_ < end)) {
            score_again(row, rows);
        }
    }

    /// Scores the rows of few keys, by products that are exact but for the order of their sums.
    __device__ void score_exactly() {
        uint32_t keys[steps * 2][4];
#pragma unroll
        for (int i = 0; i < steps * 2; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                keys[i][k] = halves(keys_.operands.codes[i / 2][k] >> i % 2 * 16 & 0xFFFFU);
            }
        }
#pragma unroll 1
        for (int row = 0; row < rows_ && ends()[row] <= score_sm90_exact_keys; ++row) {
            Sums sums;
#pragma unroll 1
            for (int eight = 0; eight < heads / 8; ++eight) {
                float products[4] = {};
#pragma unroll
                for (int i = 0; i < steps * 2; ++i) {
                    const int column = slot_ + row * heads + eight * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
                    const int t = static_cast<int>(threadIdx.x) % 4;
                    const auto low = *reinterpret_cast<uint32_t*>(query_word(shared_, column, t, i / 2 * 2));
                    const auto high = *reinterpret_cast<uint32_t*>(query_word(shared_, column, t, i / 2 * 2 + 1));
                    mma_f16(products, keys[i], halves(low >> i % 2 * 16 & 0xFFFFU), halves(high >> i % 2 * 16 & 0xFFFFU));
                }
                const float4 w = weights(row, eight / 2);
                sums.add(eight % 2 == 0 ? w.x : w.z, eight % 2 == 0 ? w.y : w.w, products);
            }
            const float sum = sums.pair_sum();
            const bool wanted = ends()[row] > args_.unscored_bound && position_ < ends()[row];
            if (write<false>(out_ + row * args_.logits_stride, sum, sum, wanted)) {
                score_again(row, 1);
            }
        }
    }

    /// Scores the warp's keys anew for `rows` rows, from `row` of the piece on.
    __device__ void score_again(int row, int rows) {
        const int warp_token = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
        score_by_columns<heads>(args_, shared_.pages[stage_].data, warp_token,
                                position_ - static_cast<int>(mine_) + warp_token, first_row_ + row, rows, ends() + row);
    }

    /// Adds up the two pairs of threads that share keys, the lower pair for row `row`, the upper for the next one if there
    /// are two, and writes the logit if it is wanted. Whether the warp has to score anew by columns.
    template <bool two>
    __device__ bool write(float* to, float sum, float next_sum, bool wanted) {
        const bool upper = writes_second_row();
        const float total = (upper ? next_sum : sum) + __shfl_xor_sync(0xFFFFFFFFU, upper ? sum : next_sum, 2);
        const float logit = total * keys_.scale;
        wanted = wanted && (two || !upper);
        const bool again = !Keys::are_copied && __any_sync(0xFFFFFFFFU, wanted && isnan(logit)) != 0;
        if (wanted && !again) {
            store(to, logit, policy_);
        }
        return again;
    }

    const ScoreArgs& args_;
    Shared<Page>& shared_;
    uint64_t policy_;
    int least_keys_;
    uint32_t mine_;  // the key of a page whose logits this thread writes
    // Of the piece:
    int slot_;
    int first_row_;
    int rows_;
    uint32_t query_;  // the low word of its descriptor
    float* logits_;   // of key mine_ of the first row, or, for the threads that write every other row, of the second
    // Of the page:
    Keys keys_;
    int stage_;
    bool valid_;
    int position_;  // of key mine_
    float* out_;    // its logit, as logits_
};

}  // namespace stepgraph::sm90
