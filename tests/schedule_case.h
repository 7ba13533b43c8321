// Steps to cut into pieces, and what must hold of the pieces.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include <stepgraph/kernels/schedule.h>
#include <stepgraph/layouts/cache_page.h>

namespace stepgraph::test {

/// A step's layout and how its tiles are to be cut. The last row is padding; entry i of the block table is i.
struct ScheduleCase {
    static constexpr int columns = 3000;
    static constexpr int bound = 100;

    int tile_rows = 32;
    int rows_a_pass = 8;
    int blocks = 1;
    bool fixed_tiles = true;
    std::vector<int32_t> starts{0};
    std::vector<int32_t> row_request{};
    std::vector<int32_t> ends{};
    std::vector<int32_t> table{};

    [[nodiscard]] int rows() const { return static_cast<int>(ends.size()); }
    [[nodiscard]] int tiles() const { return tile_count(rows(), tile_rows); }
    [[nodiscard]] int64_t pieces_a_tile() const { return most_score_pieces(rows(), tile_rows, columns); }
    [[nodiscard]] size_t all_pieces() const { return static_cast<size_t>(tiles() * pieces_a_tile()); }
    /// Without pointers.
    [[nodiscard]] ScheduleArgs args() const {
        ScheduleArgs args{};
        args.rows = rows();
        args.least = {tile_rows, columns * page_tokens};
        args.unscored_bound = bound;
        args.pieces_a_tile = pieces_a_tile();
        args.block_table_stride = columns;
        args.rows_a_pass = rows_a_pass;
        args.blocks = blocks;
        return args;
    }
};

/// What schedule() left.
struct Schedule {
    TileShape shape;  // where tiles are not fixed
    std::vector<ScorePiece> pieces;
    std::vector<int32_t> drawn;
};

/// The pieces of a tile: follows every block's share, then takes what is drawn. Each page of each pass must be there once.
class PiecesOfTile {
public:
    PiecesOfTile(const ScheduleCase& c, const ScorePiece* pieces, int begin, int end)
        : case_(c),
          pieces_(pieces),
          begin_(begin),
          end_(end),
          drawn_begin_(drawn_pieces_begin(c.blocks, c.rows(), c.tile_rows)) {}

    void check() {
        follow_shares();
        take_drawn();
        if (!::testing::Test::HasFatalFailure()) {
            expect_every_page_once();
        }
    }

private:
    void take(const ScorePiece& piece) {
        EXPECT_FALSE(piece.empty());
        EXPECT_TRUE((sorted_.insert({{piece.request, piece.first_row, piece.page_begin}, piece}).second));
    }

    void follow_shares() {
        int least = std::numeric_limits<int>::max();
        int most = 0;
        for (int block = 0; block < case_.blocks; ++block) {
            int share = 0;
            for (int at = 2 * block, place = 0; at >= 0; ++place) {
                ASSERT_EQ(at == 2 * block + place, place < 2);
                ASSERT_LT(at, drawn_begin_);
                const ScorePiece& piece = pieces_[at];
                ASSERT_EQ(piece.drawn, pieces_->drawn);
                share += piece.page_end - piece.page_begin;
                if (piece.empty()) {
                    ASSERT_EQ(at, 2 * block);
                    ASSERT_EQ(piece.next, -1);
                } else {
                    take(piece);
                }
                at = piece.next;
            }
            least = std::min(least, share);
            most = std::max(most, share);
        }
        ASSERT_LE(most - least, 1);
    }

    void take_drawn() {
        ASSERT_LE(drawn_begin_ + pieces_->drawn, case_.pieces_a_tile());
        for (int i = 0; i < pieces_->drawn; ++i) {
            const ScorePiece& piece = pieces_[drawn_begin_ + i];
            ASSERT_EQ(piece.next, -1);
            ASSERT_EQ(piece.drawn, pieces_->drawn);
            take(piece);
        }
    }

    void expect_every_page_once() {
        auto next = sorted_.begin();
        for (int row = begin_; row < end_; ++row) {
            const auto r = static_cast<size_t>(row);
            const int request = case_.row_request[r];
            const bool last = row + 1 == end_ || case_.row_request[r + 1] != request;
            if (!last || request < 0 || case_.ends[r] <= ScheduleCase::bound) {
                continue;
            }
            const int pages = (case_.ends[r] + page_tokens - 1) / page_tokens;
            const int first = std::max(begin_, case_.starts[static_cast<size_t>(request)]);
            for (int pass_row = first; pass_row <= row; pass_row += case_.rows_a_pass) {
                for (int page = 0; page < pages; ++next) {
                    ASSERT_NE(next, sorted_.end());
                    const ScorePiece& piece = next->second;
                    ASSERT_EQ(piece.request, request);
                    ASSERT_EQ(piece.page_begin, page);
                    ASSERT_GT(piece.page_end, page);
                    ASSERT_LE(piece.page_end, pages);
                    ASSERT_EQ(piece.first_row, pass_row);
                    ASSERT_EQ(piece.rows, std::min(case_.rows_a_pass, row + 1 - pass_row));
                    ASSERT_EQ(piece.block, request * ScheduleCase::columns + page);
                    page = piece.page_end;
                }
            }
        }
        ASSERT_EQ(next, sorted_.end());
    }

    const ScheduleCase& case_;
    const ScorePiece* pieces_;
    int begin_;
    int end_;
    int drawn_begin_;
    std::map<std::tuple<int, int, int>, ScorePiece> sorted_;  // by request, first row and page
};

inline void expect_right(const ScheduleCase& c, const Schedule& schedule) {
    EXPECT_EQ(schedule.drawn, std::vector<int32_t>(static_cast<size_t>(c.tiles()), 0));
    TileShape shape = c.args().least;
    if (!c.fixed_tiles) {
        shape = tile_shape(c.rows(), *std::max_element(c.ends.begin(), c.ends.end()), shape);
        ASSERT_EQ(schedule.shape.rows, shape.rows);
        ASSERT_EQ(schedule.shape.stride, shape.stride);
    }
    for (int tile = 0; tile < c.tiles(); ++tile) {
        SCOPED_TRACE("tile " + std::to_string(tile));
        const int begin = std::min(c.rows(), tile * shape.rows);
        const int end = std::min(c.rows(), begin + shape.rows);
        PiecesOfTile(c, schedule.pieces.data() + tile * c.pieces_a_tile(), begin, end).check();
    }
}

/// Has `make` schedule steps of many kinds. `random`: a generator of 64-bit numbers.
template <typename Engine, typename Make>
void check_schedules(Engine& random, Make make) {
    const auto check = [&](int requests, int most_rows, int most_keys, int tile_rows, int rows_a_pass, int blocks,
                           bool fixed_tiles = true) {
        SCOPED_TRACE(std::to_string(requests) + " requests of " + std::to_string(most_keys) + " keys at most, tiles of " +
                     std::to_string(tile_rows) + ", " + std::to_string(blocks) + " blocks");
        ScheduleCase c{.tile_rows = tile_rows, .rows_a_pass = rows_a_pass, .blocks = blocks, .fixed_tiles = fixed_tiles};
        for (int q = 0; q < requests; ++q) {
            const auto own = static_cast<int>(random() % static_cast<uint64_t>(most_rows + 1));
            const auto first = static_cast<int>(random() % static_cast<uint64_t>(most_keys));
            for (int i = 0; i < own; ++i) {
                c.row_request.push_back(q);
                c.ends.push_back(first + i + 1);
            }
            c.starts.push_back(c.rows());
        }
        c.row_request.push_back(-1);  // padding
        c.ends.push_back(0);
        c.table.resize(static_cast<size_t>(requests * ScheduleCase::columns));
        std::iota(c.table.begin(), c.table.end(), 0);
        expect_right(c, make(c));
    };
    for (const int blocks : {1, 8, 132}) {
        check(1, 1, 4096, 32, 8, blocks);
        check(1, 40, 190000, 16, 8, blocks);
        check(8, 1, 8000, 32, 8, blocks);
        check(8, 20, 64, 7, 8, blocks);
        check(100, 3, 3000, 32, 4, blocks);
        check(60, 9, 190000, 500, 8, blocks);
        check(700, 2, 700, 2000, 16, blocks);
        // Tiles that grow: all rows in the first, two or three large ones, and as small as they may be.
        check(100, 3, 3000, 32, 4, blocks, false);
        check(100, 3, 100000, 32, 4, blocks, false);
        check(60, 9, 191000, 7, 8, blocks, false);
    }
}

}  // namespace stepgraph::test
