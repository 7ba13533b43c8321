// Hopper's scorer without a GPU: the kernel's own code in the emulator, against the host's sums.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <stepgraph/kernels/reference/widen.h>
#include <stepgraph/kernels/score_block.h>

#include "../score_case.h"

namespace stepgraph::test {
namespace {

constexpr int blocks = 3;

template <typename Value>
std::span<const std::byte> bytes_of(const std::vector<Value>& values) {
    return std::as_bytes(std::span(values));
}

/// The pieces of a step, cut and dealt out at random: more often and more unevenly than the schedule would.
class RandomPieces {
public:
    RandomPieces(const ScoreCase& c, Random& random) : random_(random), rows_(c.rows()) {
        for (int request = 0; request < static_cast<int>(c.lengths.size()); ++request) {
            cut_request(c, request);
        }
        std::shuffle(cut_.begin(), cut_.end(), random.engine());
        deal_out();
    }

    [[nodiscard]] const ScorePiece* data() const { return pieces_.data(); }

private:
    void cut_request(const ScoreCase& c, int request) {
        const auto q = static_cast<size_t>(request);
        const int last_end = c.starts[q] < c.starts[q + 1] ? c.ends[static_cast<size_t>(c.starts[q + 1] - 1)] : 0;
        if (last_end <= c.unscored_bound) {
            return;
        }
        // Pages and passes are those of all of a request's rows, also of rows that need fewer or none.
        const int pages = (last_end + page_tokens - 1) / page_tokens;
        for (int row = c.starts[q]; row < c.starts[q + 1];) {
            const int rows = random_.integer32(1, std::min(sm90::row_columns / c.heads, c.starts[q + 1] - row));
            for (int page = 0; page < pages;) {
                const int end = random_.one_in(3) ? pages : random_.integer32(page + 1, pages);
                cut_.push_back({request, page, end, row, rows, c.table[q][static_cast<size_t>(page)], -1, 0});
                page = end;
            }
            row += rows;
        }
    }

    void deal_out() {
        const auto count = static_cast<int>(cut_.size());
        const int drawn_begin = drawn_pieces_begin(blocks, rows_, rows_);
        // Where any is drawn every block has a share, for only then it draws.
        const int first_ones = std::min(blocks, count);
        const int dealt = first_ones < blocks ? count : std::min(random_.integer32(blocks, count), drawn_begin);
        const int drawn = count - dealt;
        pieces_.assign(static_cast<size_t>(drawn_begin + drawn), ScorePiece{});
        int last[blocks];
        int behind = 2 * blocks;  // where a piece stands that is a share's third or later one
        for (int i = 0; i < dealt; ++i) {
            const int block = i < first_ones ? i : random_.integer32(0, first_ones - 1);
            const bool is_second = i >= first_ones && last[block] == 2 * block;
            const int at = i < first_ones ? 2 * block : is_second ? 2 * block + 1 : behind;
            if (at == behind && ++behind > drawn_begin) {
                ADD_FAILURE() << "more pieces than have room";
                return;
            }
            if (i >= first_ones) {
                pieces_[static_cast<size_t>(last[block])].next = at;
            }
            pieces_[static_cast<size_t>(at)] = cut_[static_cast<size_t>(i)];
            last[block] = at;
        }
        for (int i = 0; i < drawn; ++i) {
            pieces_[static_cast<size_t>(drawn_begin + i)] = cut_[static_cast<size_t>(dealt + i)];
        }
        for (ScorePiece& piece : pieces_) {
            piece.drawn = drawn;
        }
    }

    Random& random_;
    int rows_;
    std::vector<ScorePiece> cut_;
    std::vector<ScorePiece> pieces_;
};

template <typename Keys>
void score_emulated(const ScoreCase& c, const ScoreArgs& args, std::vector<std::span<const std::byte>> readable,
                    uint64_t seed) {
    const auto run = [&]<int heads>(std::integral_constant<int, heads>) {
        emulation::run({.kernel = [&] { sm90::score_block<heads, Keys>(args); },
                        .blocks = blocks,
                        .threads = sm90::threads,
                        .grid_blocks = blocks,
                        .shared_bytes = sm90::shared_bytes<typename Keys::Page>,
                        .readable = std::move(readable),
                        .seed = seed});
    };
    if (c.heads == 16) {
        run(std::integral_constant<int, 16>{});
    } else if (c.heads == 32) {
        run(std::integral_constant<int, 32>{});
    } else {
        run(std::integral_constant<int, 64>{});
    }
}

/// As scored(), by Hopper's kernel.
std::vector<float> scored_emulated(const ScoreCase& c, Random& random, StepStatus* status) {
    const auto table_columns = static_cast<size_t>(c.columns);
    std::vector<int32_t> table;
    for (const std::vector<int32_t>& row : c.table) {
        table.insert(table.end(), row.begin(), row.end());
    }
    const auto weights = static_cast<size_t>(c.rows() * c.heads);
    std::vector<uint8_t> widened_query(is_mxfp4(c.format) ? weights * head_dim : 0);
    std::vector<float> widened_weights(is_mxfp4(c.format) ? weights : 0);
    if (is_mxfp4(c.format)) {
        reference::widen_query(c.format, c.heads, c.rows(), c.rows(), c.query.data(), c.head_weights.data(),
                               widened_query.data(), widened_weights.data());
    }
    const RandomPieces pieces(c, random);
    std::vector<float> logits(static_cast<size_t>(c.rows() * c.width()), unwritten_logit);
    // The copy engine wants pages at multiples of 16 bytes, which a vector's are.
    int32_t drawn = 0;
    ScoreArgs args{};
    args.format = c.format;
    args.heads = c.heads;
    args.tile = {0, c.rows(), {c.rows(), static_cast<int32_t>(c.width())}, nullptr};
    args.max_rows = c.rows();
    args.query = c.query.data();
    args.head_weights = c.head_weights.data();
    args.widened_query = widened_query.data();
    args.widened_weights = widened_weights.data();
    args.cache = c.cache.data();
    args.pages = c.pages;
    args.page_stride_bytes = c.page_stride;
    args.block_table = table.data();
    args.block_table_stride = static_cast<int64_t>(table_columns);
    args.starts = c.starts.data();
    args.row_request = c.row_request.data();
    args.ends = c.ends.data();
    args.pieces = pieces.data();
    args.drawn = &drawn;
    args.unscored_bound = c.unscored_bound;
    args.logits = logits.data();
    args.status = status;
    const auto run = is_mxfp4(c.format) ? score_emulated<sm90::Mxfp4Keys> : score_emulated<sm90::Fp8Keys>;
    run(c, args,
        {bytes_of(c.query), bytes_of(c.head_weights), bytes_of(widened_query), bytes_of(widened_weights), bytes_of(c.cache),
         bytes_of(c.ends)},
        static_cast<uint64_t>(random.integer(0, std::numeric_limits<int64_t>::max())));
    EXPECT_EQ(drawn, 0);
    return logits;
}

/// The sums of the magnitudes of what logits are sums of.
std::vector<float> magnitudes(ScoreCase c) {
    const unsigned unsigned_bits = is_mxfp4(c.format) ? 0x77 : 0x7F;
    const auto clear_signs = [&](uint8_t& codes) { codes = static_cast<uint8_t>(codes & unsigned_bits); };
    for (int64_t page = 0; page < c.pages; ++page) {
        std::for_each_n(c.page(page), page_bytes(c.format) - page_tokens * 4, clear_signs);
    }
    for (int row = 0; row < c.rows(); ++row) {
        for (int head = 0; head < c.heads; ++head) {
            for (int column = 0; column < head_dim; ++column) {
                clear_signs(c.query[static_cast<size_t>(query_payload_at(c.format, c.heads, row, head, column))]);
            }
        }
    }
    for (float& weight : c.head_weights) {
        weight = std::fabs(weight);
    }
    StepStatus unread;
    return scored(c, &unread);
}

/// NaN to NaN, sentinels and infinities to the same, all others within what two orders of FP32 sums may differ by: products
/// are exact here.
void expect_near(const ScoreCase& c, const std::vector<float>& got, const std::vector<float>& want) {
    const std::vector<float> sums = magnitudes(c);
    for (size_t i = 0; i < want.size(); ++i) {
        const auto place = [&] {
            return "row " + std::to_string(i / static_cast<size_t>(c.width())) + ", position " +
                   std::to_string(i % static_cast<size_t>(c.width()));
        };
        if (!std::isfinite(want[i]) || want[i] == unwritten_logit) {
            ASSERT_TRUE(std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i])
                << place() << ": " << got[i] << " instead of " << want[i];
        } else {
            ASSERT_NEAR(got[i], want[i], 2 * (128 + 64 + 4) * 0x1p-24F * sums[i]) << place();
        }
    }
}

/// Both scorers' logits, and those of a second emulation, cut and dealt out differently.
void expect_scored(const ScoreCase& c, Random& random) {
    StepStatus wanted_status;
    const std::vector<float> wanted = scored(c, &wanted_status);
    StepStatus status;
    StepStatus second_status;
    const std::vector<float> logits = scored_emulated(c, random, &status);
    expect_near(c, logits, wanted);
    EXPECT_EQ(status, wanted_status);
    const std::vector<float> second = scored_emulated(c, random, &second_status);
    EXPECT_EQ(std::memcmp(logits.data(), second.data(), logits.size() * sizeof(float)), 0)
        << "other pieces, or an other order of threads, give other bits";
    EXPECT_EQ(second_status, wanted_status);
}

uint8_t& scale_of_query(ScoreCase& c, int row, int head, int block) {
    return c.query[static_cast<size_t>(query_scale_at(c.format, c.heads, c.rows(), row, head, block))];
}

/// Draws the scales of MXFP4 anew so that every number can be widened.
void keep_scales_together(ScoreCase& c, Random& random) {
    const auto draw = [&] { return static_cast<uint8_t>(random.integer(120, 131)); };
    for (int64_t page = 0; is_mxfp4(c.format) && page < c.pages; ++page) {
        for (int i = 0; i < page_tokens * 4; ++i) {
            *scale_byte(c.format, c.page(page), i / 4, i % 4) = draw();
        }
    }
    for (int row = 0; is_mxfp4(c.format) && row < c.rows(); ++row) {
        for (int i = 0; i < c.heads * 4; ++i) {
            scale_of_query(c, row, i / 4, i % 4) = draw();
        }
    }
}

class ScoreEmulated : public ::testing::TestWithParam<CacheFormat> {
protected:
    ScoreCase random_step(int heads, std::vector<int> query_lens, std::vector<int> lengths) {
        ScoreCase c = random_case(random_, GetParam(), heads, std::move(query_lens), std::move(lengths), 16);
        keep_scales_together(c, random_);
        return c;
    }

    Random random_;
    ::testing::ScopedTrace trace_{__FILE__, __LINE__, random_.trace()};
};

TEST_P(ScoreEmulated, OfFewKeysIsThatOfTheHost) {
    for (const int heads : {16, 32, 64}) {
        SCOPED_TRACE(std::to_string(heads) + " heads");
        expect_scored(random_step(heads, {1, 3, 0, 2, 1}, {1, 67, 100, 130, 384}), random_);
    }
}

TEST_P(ScoreEmulated, OfManyKeysIsThatOfTheHost) {
    for (const int heads : {16, 32, 64}) {
        SCOPED_TRACE(std::to_string(heads) + " heads");
        const int keys = random_.integer32(1100, 1900);
        ScoreCase c = random_step(heads, {1, random_.integer32(2, 9), 1}, {keys, 1026 + random_.integer32(0, 6), 500});
        c.unscored_bound = random_.integer32(0, 1027);
        expect_scored(c, random_);
    }
}

TEST_P(ScoreEmulated, OfInvalidBlocksIsMinusInfinityAndCounted) {
    ScoreCase c = random_step(32, {1, 5, 2}, {5000, 1040, 200});  // rings go round
    for (std::vector<int32_t>& blocks_of_request : c.table) {
        for (int32_t& block : blocks_of_request) {
            if (random_.one_in(5)) {
                block = random_.one_in(2) ? -1 - random_.integer32(0, 1 << 30) : static_cast<int32_t>(c.pages);
            }
        }
    }
    expect_scored(c, random_);
}

TEST_P(ScoreEmulated, KeepsNanAndSpoilsNothingBesideIt) {
    ScoreCase c = random_step(32, {1, 5, 2}, {1300, 1040, 200});
    for (int i = 0; i < 30; ++i) {
        uint8_t* page = c.page(random_.integer(0, c.pages - 1));
        if (is_mxfp4(c.format)) {
            *scale_byte(c.format, page, random_.integer32(0, 63), random_.integer32(0, 3)) = 255;
        } else {
            *payload_byte(c.format, page, random_.integer32(0, 63), random_.integer32(0, 127)) = 0x7F;
        }
    }
    expect_scored(c, random_);
}

INSTANTIATE_TEST_SUITE_P(Formats, ScoreEmulated, ::testing::ValuesIn(all_formats), format_name);

class ScoreMxfp4Emulated : public ScoreEmulated {};

/// Sets the scale, and perhaps the 32 numbers, of a block so that its key or head can perhaps not be widened.
void set_wild_block(Random& random, uint8_t& scale, auto&& payload) {
    scale = static_cast<uint8_t>(random.one_in(2) ? random.integer(105, 140) : random.integer(60, 194));
    if (random.one_in(2)) {  // of zeros, which any scale fits
        for (int column = 0; column < mxfp4_block; column += 2) {
            payload(column) = random.one_in(2) ? 0x80 : 0x08;
        }
    }
}

TEST_P(ScoreMxfp4Emulated, OfKeysThatCannotBeWidenedIsThatOfTheHost) {
    for (const int heads : {16, 32, 64}) {
        ScoreCase c = random_step(heads, {1, 5, 2}, {1300, 1040, 200});
        for (int i = 0; i < 300; ++i) {
            uint8_t* page = c.page(random_.integer(0, c.pages - 1));
            const int token = random_.integer32(0, 63);
            const int block = random_.integer32(0, 3);
            set_wild_block(random_, *scale_byte(c.format, page, token, block), [&](int column) -> uint8_t& {
                return *payload_byte(c.format, page, token, block * mxfp4_block + column);
            });
        }
        expect_scored(c, random_);
    }
}

TEST_P(ScoreMxfp4Emulated, OfRowsThatCannotBeWidenedIsThatOfTheHost) {
    ScoreCase c = random_step(32, {1, 5, 1, 2}, {1300, 1040, 1100, 200});
    for (const int row : {0, 2, 5, 8}) {
        const int head = random_.integer32(0, c.heads - 1);
        const int block = random_.integer32(0, 3);
        set_wild_block(random_, scale_of_query(c, row, head, block), [&](int column) -> uint8_t& {
            return c
                .query[static_cast<size_t>(query_payload_at(c.format, c.heads, row, head, block * mxfp4_block + column))];
        });
    }
    expect_scored(c, random_);
}

INSTANTIATE_TEST_SUITE_P(Formats, ScoreMxfp4Emulated, ::testing::Values(CacheFormat::mxfp4, CacheFormat::mxfp4_rowgroup),
                         format_name);

}  // namespace
}  // namespace stepgraph::test
