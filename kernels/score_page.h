// Scoring one page of keys on Hopper, by one warpgroup.
#pragma once

#include <cuda_fp8.h>

#include "matrix_units.h"
#include "score_columns.h"
#include "score_keys.h"
#include "score_sm90.h"

namespace stepgraph::sm90 {

/// Where word `word` of a query row's bytes [32*t, 32*t + 32) stands in row `column` of the swizzled query.
template <typename Page>
__device__ __forceinline__ uint8_t* query_word(Shared<Page>& shared, int column, int t, int word) {
    return shared.query[column] + (word ^ (column % 8)) * 16 + t * 4;
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

    /// Adds four.
    __device__ void add(const float4& weights, const float* d) {
        add(weights.x, weights.y, d);
        add(weights.z, weights.w, d + 4);
    }

    /// Adds up the pairs of the four threads that share the keys: even ones get low, odd ones high.
    [[nodiscard]] __device__ float pair_sum() const {
        const bool odd = threadIdx.x % 2 != 0;
        return (odd ? high : low) + __shfl_xor_sync(0xFFFFFFFFU, odd ? low : high, 1);
    }
};

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
          keys_(args.format),
          next_keys_(args.format) {
        pin(mine_);  // computed here, and not again for every page
    }

    __device__ void take(const ScorePiece& piece, int slot) {
        slot_ = slot;
        first_row_ = piece.first_row;
        rows_ = piece.rows;
        query_ = swizzled_rows_low(shared_address(shared_.query[slot]));
        pin(query_);
    }

    /// Takes a page out of its stage.
    __device__ void load(int stage) {
        keys_.load(shared_.pages[stage], args_.format);
        valid_ = shared_.valid[stage];
        stage_ = stage;
        if (Keys::are_copied) {
            release(stage_);
        }
    }

    /// Whether score_two() scores two pages of this piece, from those stages, at a time.
    [[nodiscard]] __device__ bool takes_two(int stage, int next_stage) const {
        return rows_ == 1 && ends()[0] > least_keys_ && shared_.valid[stage] && shared_.valid[next_stage];
    }

    /// Writes the logits of two pages for the one row of the piece.
    __device__ void score_two(int stage, int next_stage, int first_position, int next_first_position) {
        Keys::load_two(keys_, shared_.pages[stage], next_keys_, shared_.pages[next_stage], args_.format);
        float products[heads / 2];
        float next_products[heads / 2];
        prepare(keys_, products);
        prepare(next_keys_, next_products);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            wgmma_e4m3<heads>(products, keys_.operands.codes[step], query_ + step * 2, step);
            wgmma_e4m3<heads>(next_products, next_keys_.operands.codes[step], query_ + step * 2, step);
        }
        wgmma_commit();
        wgmma_wait<0>();
        Sums sums;
        Sums next_sums;
#pragma unroll
        for (int i = 0; i < heads / 2; ++i) {
            pin(products[i]);
            pin(next_products[i]);
        }
#pragma unroll
        for (int j = 0; j < heads / 16; ++j) {
            const float4 w = weights(0, j);
            sums.add(w, products + j * 8);
            next_sums.add(w, next_products + j * 8);
        }
        // The lower pairs of threads write the first page, the upper ones the second.
        const bool upper = writes_second_row();
        const float total = total_of(sums.pair_sum(), next_sums.pair_sum());
        const float logit = total * (upper ? next_keys_.scale : keys_.scale);
        const int position = (upper ? next_first_position : first_position) + static_cast<int>(mine_);
        const Lost lost = store_or_lose(logits(0) + position, logit, position < ends()[0]);
        if (lost.lower) {
            score_again(stage, first_position, 0);
        }
        if (lost.upper) {
            score_again(next_stage, next_first_position, 0);
        }
        release(stage);
        release(next_stage);
    }

    /// Writes the logits of the page that was loaded, whose first key is `first_position`.
    __device__ void score(int first_position) {
        position_ = first_position + static_cast<int>(mine_);
        if (valid_) {
            score_rows();
            if (ends()[0] <= score_sm90_exact_keys) {  // a request's bounds ascend with its rows
                score_exactly();
            }
        } else {
            write_invalid();
        }
        if (!Keys::are_copied) {
            release(stage_);
        }
    }

private:
    /// Lets the stage have its next page.
    __device__ void release(int stage) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(&shared_.page_taken[stage]);
        }
    }

    [[nodiscard]] __device__ static bool writes_second_row() {
        return threadIdx.x % 4 >= 2;
    }

    [[nodiscard]] __device__ const int32_t* ends() const {
        return shared_.ends + slot_ / heads;
    }
    /// Of row `row` of the piece, from its first key on.
    [[nodiscard]] __device__ float* logits(int row) const {
        return shared_.logits[slot_ / heads + row];
    }

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
                store(logits(row) + position_, -INFINITY, policy_);
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

    /// Lets registers be what the matrix units read and write.
    template <int n>
    __device__ static void prepare(Keys& keys, float (&products)[n]) {
#pragma unroll
        for (auto& product : products) {
            leave_undefined(product);
        }
#pragma unroll
        for (auto& step : keys.operands.codes) {
#pragma unroll
            for (auto& word : step) {
                pin(word);
            }
        }
    }

    /// Starts to multiply by `rows` rows, from `row` of the piece on.
    template <int rows>
    __device__ void multiply(int row, float (&products)[rows * heads / 2]) {
        prepare(keys_, products);
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
        const int own_row = row + (rows > 1 && writes_second_row() ? 1 : 0);
        const int end = ends()[own_row];
        float* to = logits(own_row) + position_;
        float sums[rows];
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            Sums row_sums;
#pragma unroll
            for (int j = 0; j < heads / 16; ++j) {
                row_sums.add(weights(row + i, j), products + i * heads / 2 + j * 8);
            }
            sums[i] = row_sums.pair_sum();
        }
        const Lost lost = write<(rows > 1)>(to, sums[0], sums[rows - 1], end > least_keys_ && position_ < end);
        if (lost.lower) {
            score_again(stage_, position_ - static_cast<int>(mine_), row);
        }
        if (rows > 1 && lost.upper) {
            score_again(stage_, position_ - static_cast<int>(mine_), row + 1);
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
            if (write<false>(logits(row) + position_, sum, sum, wanted).lower) {
                score_again(stage_, position_ - static_cast<int>(mine_), row);
            }
        }
    }

    /// Scores the warp's keys of a page anew for row `row` of the piece.
    __device__ void score_again(int stage, int first_position, int row) {
        const int warp_token = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
        score_by_columns<heads>(args_, shared_.pages[stage].data, warp_token, first_position + warp_token, first_row_ + row);
    }

    /// Adds up the two pairs of threads that share keys: the lower pair gets the first sum, the upper pair the second.
    [[nodiscard]] __device__ static float total_of(float sum, float next_sum) {
        const bool upper = writes_second_row();
        return (upper ? next_sum : sum) + __shfl_xor_sync(0xFFFFFFFFU, upper ? sum : next_sum, 2);
    }

    /// Whether a logit is NaN, which tells that its row and page must be scored by columns, among those that the lower pairs
    /// of a warp's threads write, or the upper ones. Each for itself: what is scored with a row must not change its bits.
    struct Lost {
        bool lower;
        bool upper;
    };

    /// Writes a logit that is wanted, if nothing is lost among those of its row and page.
    __device__ Lost store_or_lose(float* to, float logit, bool wanted) {
        const uint32_t lanes = Keys::are_widened ? __ballot_sync(0xFFFFFFFFU, wanted && isnan(logit)) : 0;
        const Lost lost{(lanes & 0x33333333U) != 0, (lanes & 0xCCCCCCCCU) != 0};
        if (wanted && !(writes_second_row() ? lost.upper : lost.lower)) {
            store(to, logit, policy_);
        }
        return lost;
    }

    /// Writes the logit of row `row`, or of the next one if there are two, if it is wanted.
    template <bool two>
    __device__ Lost write(float* to, float sum, float next_sum, bool wanted) {
        return store_or_lose(to, total_of(sum, next_sum) * keys_.scale, wanted && (two || !writes_second_row()));
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
    // Of the page:
    Keys keys_;
    Keys next_keys_;  // of a second one that is scored with it
    int stage_;
    bool valid_;
    int position_;  // of key mine_
};

}  // namespace stepgraph::sm90
