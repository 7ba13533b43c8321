// What a block of the Hopper scorer shares: a ring of pages and a queue of pieces, filled by one warp and emptied by the
// others, and the rows that are scored.
#pragma once

#include <cstddef>
#include <cstdint>

#include <stepgraph/layouts/cache_page.h>

#include "copy_engine.h"
#include "matrix_units.h"
#include "score.h"

namespace stepgraph::sm90 {

constexpr int consumers = 3;  // warpgroups that take turns at the pages
constexpr int consumer_threads = consumers * 128;
// The producer is one warp. It has a warpgroup to itself all the same: registers are handed out to warpgroups, and consumers
// need more than a thread's even share for two products at a time.
constexpr int threads = consumer_threads + 128;
constexpr int consumer_registers = 144;
constexpr int producer_registers = 80;
static_assert(consumers * consumer_registers + producer_registers <= 65536 / 128);
constexpr int queued_pieces = 4;
// Pages of a piece, beside its first, that are asked for before the next piece is pushed, where that still has to be read:
// one that is drawn, or a share's third and later ones. Consumers take it before they begin with this one: the ring must
// hold these pages without them.
constexpr int pages_before_next = 8;

constexpr int row_columns = 256;  // of a product: heads times the rows that share a reading of the keys
constexpr int row_slots = 2;      // the rows of the next piece come while these are read, where both fit

/// A page in a stage, `bytes` long: of FP8 keys or of MXFP4 ones, of either layout.
template <int bytes>
struct alignas(16) Page {
    // A stage always serves the same warpgroup. If not, one could come back to a stage a whole round ahead of another, when
    // pages arrive out of order, and take the end of an older phase for that of its own.
    static constexpr int stages = bytes == page_bytes(CacheFormat::fp8) ? 12 : 24;
    static_assert(stages % consumers == 0);
    static_assert(pages_before_next + 1 <= stages);  // and the first page
    // Asked for at a time. Pages asked for together arrive together, and consumers wait longer for the first; but of small
    // ones the producer could not ask for enough one by one.
    static constexpr int together = bytes == page_bytes(CacheFormat::fp8) ? 1 : 2;

    uint8_t data[bytes];
};
using Fp8Page = Page<page_bytes(CacheFormat::fp8)>;
using Mxfp4Page = Page<page_bytes(CacheFormat::mxfp4)>;
static_assert(sizeof(Fp8Page) == page_bytes(CacheFormat::fp8_mx) &&
              sizeof(Mxfp4Page) == page_bytes(CacheFormat::mxfp4_rowgroup));

/// The matrix units' swizzle wants the query at a multiple of 1024.
template <typename Page>
struct alignas(1024) Shared {
    static constexpr int stages = Page::stages;

    uint8_t query[row_columns][head_dim];  // E4M3, swizzled, a row's bytes in the order that query_word() tells
    Page pages[stages];
    float weights[row_columns];
    int32_t ends[row_columns / 16];
    float* logits[row_columns / 16];
    ScorePiece pieces[queued_pieces];
    uint64_t page_there[stages];
    uint64_t page_taken[stages];
    uint64_t piece_there[queued_pieces];
    uint64_t piece_taken[queued_pieces];
    bool valid[stages];  // whether the stage holds a page, and not an invalid block
};
template <typename Page>
constexpr size_t shared_bytes = sizeof(Shared<Page>) + 1024;  // the base is aligned to 16 only

template <typename Page>
__device__ __forceinline__ Shared<Page>& align_shared(uint8_t* memory) {
    uint32_t base = (shared_address(memory) + 1023) / 1024 * 1024;
    pin(base);  // kept in a register, and not computed again for every access
    return *static_cast<Shared<Page>*>(__cvta_shared_to_generic(base));
}

/// By one thread, before any other touches a barrier.
template <typename Page>
__device__ __forceinline__ void init_barriers(Shared<Page>& shared) {
    for (int i = 0; i < Page::stages; ++i) {
        barrier_init(&shared.page_there[i], 1);
        barrier_init(&shared.page_taken[i], 4);  // the warps of a warpgroup
    }
    for (int i = 0; i < queued_pieces; ++i) {
        barrier_init(&shared.piece_there[i], 1);
        barrier_init(&shared.piece_taken[i], consumer_threads / 32);
    }
    barrier_init_fence();
}

/// A place in a ring, and the parity of the round it is in.
template <int size>
struct Place {
    int index = 0;
    uint32_t parity = 0;

    __device__ void advance(int by = 1) {
        index += by;
        if (index >= size) {
            index -= size;
            parity ^= 1U;
        }
    }
    /// The place any number of places further on.
    [[nodiscard]] __device__ Place ahead(int by) const {
        const auto rounds = static_cast<uint32_t>(index + by) / size;
        return {index + by - static_cast<int>(rounds) * size, parity ^ (rounds & 1U)};
    }
};

/// The warp that asks for pages: of the pieces of the block's share, then of those that it draws.
///
/// A page comes every 450 cycles, and a load takes microseconds where memory is saturated. So tickets, pieces and block
/// table entries are on their way long before they are used, and what asking for a page needs is made for 32 pages at a
/// time, one in each lane.
template <typename Page>
class Producer {
public:
    __device__ Producer(const ScoreArgs& args, Shared<Page>& shared)
        : args_(args), shared_(shared), policy_(evict_first()), lane_(static_cast<int>(threadIdx.x) % 32) {}

    __device__ void run() {
        // What index inputs stored the ordinary way is read by the copy engine here.
        async_proxy_fence_global();
        ScorePiece piece = args_.pieces[2 * blockIdx.x];
        second_ = args_.pieces[2 * blockIdx.x + 1];  // empty where the first is all
        blocks_ = blocks_of(piece, 1);
        second_blocks_ = blocks_of(second_, 1);
        if (!piece.empty()) {
            ask_for_first(piece);
        }
        push(piece);
        draw_after(piece);
        for (bool first = true; !piece.empty(); first = false) {
            if (!first) {
                ask_for_first(piece);
            }
            piece = ask_for_others(piece);
        }
    }

private:
    __device__ void ask_for_first(const ScorePiece& piece) {
        hold(piece.block);
        ask(piece, 0, 1);
        ring_ = ring_.ahead(1);
    }

    /// Asks for all pages of a piece but the first, and returns the next piece, which is pushed on the way.
    __device__ ScorePiece ask_for_others(const ScorePiece& piece) {
        const int others = piece.page_end - piece.page_begin - 1;
        const bool last = piece.next < 0 && piece.drawn == 0;
        const int before_next = last || is_second(piece.next) ? 0 : min(others, pages_before_next);
        const ScorePiece next = last ? ScorePiece{} : next_of(piece);
        int blocks = blocks_;
        bool pushed = false;
#pragma unroll 1
        for (int first = 0; first < others; first += 32) {
            hold(blocks);
            blocks = blocks_of(piece, first + 33);
            const int held = min(32, others - first);
#pragma unroll 1
            for (int i = 0; i < held; i += Page::together) {
                if (first + i >= before_next && !pushed) {
                    push_next(next, is_second(piece.next));
                    pushed = true;
                }
                ask(piece, i, min(held, i + Page::together));
            }
            ring_ = ring_.ahead(held);
        }
        if (!pushed) {
            push_next(next, is_second(piece.next));
        }
        return next;
    }

    __device__ void push_next(const ScorePiece& next, bool second) {
        push(next);
        blocks_ = second ? second_blocks_ : blocks_of(next, 1);
        draw_after(next);
    }

    [[nodiscard]] __device__ static bool is_second(int index) {
        return index == 2 * static_cast<int>(blockIdx.x) + 1;
    }

    /// This lane's block table entry of the 32 from page `first` of the piece on.
    [[nodiscard]] __device__ int blocks_of(const ScorePiece& piece, int first) const {
        const int page = piece.page_begin + first + lane_;
        return page < piece.page_end ? args_.block_table[piece.request * args_.block_table_stride + page] : 0;
    }

    /// Starts to draw the piece behind `piece`, if that is to be drawn.
    __device__ void draw_after(const ScorePiece& piece) {
        if (lane_ == 0 && !piece.empty() && piece.next < 0 && piece.drawn > 0) {
            ticket_ = atomicAdd(args_.drawn, 1);
        }
    }

    /// The piece behind `piece`, an empty one if there is none.
    __device__ ScorePiece next_of(const ScorePiece& piece) {
        if (piece.next >= 0) {
            return is_second(piece.next) ? second_ : args_.pieces[piece.next];
        }
        // Every block draws until it comes away empty-handed. Of all, the last to do so leaves the count as it was.
        if (lane_ == 0 && ticket_ == piece.drawn + static_cast<int>(gridDim.x) - 1) {
            *args_.drawn = 0;
        }
        const int ticket = __shfl_sync(0xFFFFFFFFU, ticket_, 0);
        const int drawn_begin = drawn_pieces_begin(static_cast<int>(gridDim.x), args_.tile.rows, args_.tile.least.rows);
        return ticket < piece.drawn ? args_.pieces[drawn_begin + ticket] : ScorePiece{};
    }

    __device__ void push(const ScorePiece& piece) {
        if (lane_ == 0) {
            barrier_wait(&shared_.piece_taken[queue_.index], queue_.parity ^ 1U);
            shared_.pieces[queue_.index] = piece;
            barrier_arrive(&shared_.piece_there[queue_.index]);
        }
        __syncwarp();
        queue_.advance();
    }

    /// Holds the page of `block` ready in this lane, whose place in the ring is as many further on as the lane's number.
    __device__ void hold(int block) {
        place_ = ring_.ahead(lane_);
        valid_ = block >= 0 && block < args_.pages;
        page_ = page_address(args_.cache, block, args_.page_stride_bytes);
    }

    /// Asks for the pages that lanes [begin, end) hold.
    __device__ void ask(const ScorePiece& piece, int begin, int end) {
        if (begin <= lane_ && lane_ < end) {
            const int stage = place_.index;
            barrier_wait(&shared_.page_taken[stage], place_.parity ^ 1U);
            shared_.valid[stage] = valid_;
            if (valid_) {
                barrier_arrive_expect(&shared_.page_there[stage], sizeof(Page));
                copy_bytes(&shared_.pages[stage], page_, sizeof(Page), &shared_.page_there[stage], policy_);
            } else {
                // Every pass and every tile of a straddling request meets it; that with the last row counts it.
                if (piece.first_row + piece.rows == min(args_.starts[piece.request + 1], args_.tile.rows)) {
                    count(&args_.status->invalid_blocks);
                }
                barrier_arrive(&shared_.page_there[stage]);
            }
        }
        __syncwarp();
    }

    const ScoreArgs& args_;
    Shared<Page>& shared_;
    uint64_t policy_;
    int lane_;
    int ticket_ = 0;       // of the next piece, in lane 0
    int blocks_ = 0;       // block table entry of the piece's page 1 + lane
    ScorePiece second_{};  // of the block
    int second_blocks_ = 0;
    Place<Page::stages> ring_;
    Place<queued_pieces> queue_;
    // What hold() made.
    Place<Page::stages> place_;
    bool valid_ = false;
    const uint8_t* page_ = nullptr;
};

/// A consumer's end of the queue. Every warp takes every piece.
template <typename Page>
class PieceQueue {
public:
    __device__ explicit PieceQueue(Shared<Page>& shared) : shared_(shared) {}

    __device__ ScorePiece pop() {
        barrier_wait(&shared_.piece_there[place_.index], place_.parity);
        const ScorePiece piece = shared_.pieces[place_.index];
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(&shared_.piece_taken[place_.index]);
        }
        place_.advance();
        return piece;
    }

private:
    Shared<Page>& shared_;
    Place<queued_pieces> place_;
};

}  // namespace stepgraph::sm90
