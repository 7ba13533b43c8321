// Scoring on Hopper: what one block does.
#pragma once

#include <algorithm>

#include <stepgraph/layouts/query_row.h>

#include "copy_engine.h"
#include "score_page.h"
#include "score_ring.h"

namespace stepgraph::sm90 {

/// The warps that score pages.
template <int heads, typename Keys>
class Consumer {
public:
    using Page = typename Keys::Page;

    __device__ Consumer(const ScoreArgs& args, Shared<Page>& shared)
        // The shuffle tells the compiler that a warp's threads agree on whose turn it is.
        : args_(args),
          shared_(shared),
          queue_(shared),
          page_(args, shared),
          warpgroup_(__shfl_sync(~0U, static_cast<int>(threadIdx.x) / 128, 0)) {
        ring_.index = warpgroup_;
    }

    __device__ void run() {
        ScorePiece piece = queue_.pop();
        int slot = 0;  // first of the columns that the piece's rows take
        bool other_rows = true;
        if (!piece.empty()) {
            copy_rows(piece, slot);
        }
        while (!piece.empty()) {
            if (other_rows) {
                wait_for_rows();
            }
            const ScorePiece next = queue_.pop();
            other_rows = next.first_row != piece.first_row || next.rows != piece.rows;
            const bool both_fit = max(piece.rows, next.rows) * heads * row_slots <= row_columns;
            int next_slot = slot;
            if (!next.empty() && other_rows) {
                next_slot = both_fit ? row_columns / row_slots - slot : 0;
                if (both_fit) {
                    copy_rows(next, next_slot);
                }
            }
            score_pages(piece, slot);
            if (!next.empty() && other_rows && !both_fit) {
                synchronise();  // nobody reads the piece's rows any more
                copy_rows(next, next_slot);
            }
            piece = next;
            slot = next_slot;
        }
    }

private:
    __device__ static void synchronise() { device::partial_barrier<consumer_threads>(); }

    /// Starts to copy query, weights and bounds of a piece's rows, and says where their logits go.
    __device__ void copy_rows(const ScorePiece& piece, int slot) {
        const auto thread = static_cast<int>(threadIdx.x);
        const int columns = piece.rows * heads;
        const uint8_t* all = Keys::are_widened ? args_.widened_query : args_.query;
        const uint8_t* query = all + query_payload_offset(CacheFormat::fp8, heads, piece.first_row, 0, 0);
#pragma unroll 1
        for (int column = thread / 32; column < columns; column += consumer_threads / 32) {
            copy_word(query_word(shared_, slot + column, thread % 32 / 8, thread % 8),
                      query + column * head_dim + thread % 32 * 4);
        }
        if (thread < columns) {
            const float* weights =
                (Keys::are_widened ? args_.widened_weights : args_.head_weights) + int64_t{piece.first_row} * heads;
            copy_word(shared_.weights + slot + thread,
                      weights + thread / heads * heads + head_of_place<heads>(thread % heads));
        }
        if (thread < piece.rows) {
            copy_word(shared_.ends + slot / heads + thread, args_.ends + piece.first_row + thread);
            shared_.logits[slot / heads + thread] =
                logits_of_row(args_, args_.tile.shape_of_step(), piece.first_row + thread);
        }
    }

    /// Waits until the rows whose copies every consumer started are there, and nobody reads those before them any more.
    __device__ static void wait_for_rows() {
        wait_for_copied_words();
        async_proxy_fence_shared();
        synchronise();
    }

    __device__ void wait_for_page(const Place<Page::stages>& place) {
        barrier_wait(&shared_.page_there[place.index], place.parity);
        __syncwarp();  // the lanes stay together: what the stage holds changes when the first of them has released it
    }

    __device__ void score_pages(const ScorePiece& piece, int slot) {
        page_.take(piece, slot);
        // Warpgroups take turns, through all pieces.
        for (int i = piece.page_begin + (warpgroup_ - turn_ + consumers) % consumers; i < piece.page_end; i += consumers) {
            wait_for_page(ring_);
            if constexpr (Keys::come_in_twos) {
                // Not of a piece's last pages: the first would wait for the second.
                if (i + 2 * consumers < piece.page_end) {
                    const auto next = ring_.ahead(consumers);
                    wait_for_page(next);
                    if (page_.takes_two(ring_.index, next.index)) {
                        page_.score_two(ring_.index, next.index, i * page_tokens, (i + consumers) * page_tokens);
                        ring_.advance(2 * consumers);
                        i += consumers;
                        continue;
                    }
                }
            }
            page_.load(ring_.index);
            page_.score(i * page_tokens);
            ring_.advance(consumers);
        }
        turn_ = (turn_ + piece.page_end - piece.page_begin) % consumers;
    }

    const ScoreArgs& args_;
    Shared<Page>& shared_;
    PieceQueue<Page> queue_;
    PageScorer<heads, Keys> page_;
    int warpgroup_;
    Place<Page::stages> ring_;
    int turn_ = 0;  // whose a piece's first page is
};

/// `args` stands in memory that a thread may read at any time: a kernel's parameters.
template <int heads, typename Keys>
__device__ __forceinline__ void score_block(const ScoreArgs& args) {
    using Page = typename Keys::Page;
    auto& shared = align_shared<Page>(device::dynamic_shared_memory());
    if (threadIdx.x == 0) {
        init_barriers(shared);
    }
    __syncthreads();  // the barriers are there

    wait_for_producers();  // for keys, query, weights, layout and schedule, and for select's reading of the logits
    let_consumers_start();

    if (threadIdx.x < consumer_threads) {
        take_registers<consumer_registers>();
        Consumer<heads, Keys>(args, shared).run();
    } else {
        leave_registers<producer_registers>();
        if (threadIdx.x < consumer_threads + 32) {
            Producer<Page>(args, shared).run();
        }
    }
}

}  // namespace stepgraph::sm90
