// How the Hopper scorer's work is cut, and that its logits do not depend on it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>

#include <stepgraph/kernels/reference/widen.h>
#include <stepgraph/kernels/schedule.h>
#include <stepgraph/kernels/score.h>
#include <stepgraph/kernels/score_sm90.h>
#include <stepgraph/layouts/query_row.h>
#include <stepgraph/layouts/tiles.h>
#include <stepgraph/tools/step_checks.h>

#include "../schedule_case.h"
#include "device_step.h"

namespace stepgraph::test {
namespace {

class Pieces : public GpuTest {};

TEST_F(Pieces, HoldEveryPageOfEveryPassOnce) {
    Random random = fresh_random();
    check_schedules(random, [](const ScheduleCase& c) {
        DeviceMemory starts(c.starts.size() * 4, 4, true);
        DeviceMemory requests(c.row_request.size() * 4, 4, true);
        DeviceMemory ends(c.ends.size() * 4, 4, true);
        DeviceMemory table(c.table.size() * 4, 4, true);
        DeviceMemory shape(sizeof(TileShape), 8, true);
        DeviceMemory pieces(c.all_pieces() * sizeof(ScorePiece), 32, true);
        DeviceMemory drawn(static_cast<size_t>(c.tiles()) * 4, 4, true);
        starts.upload(c.starts);
        requests.upload(c.row_request);
        ends.upload(c.ends);
        table.upload(c.table);
        for (DeviceMemory* written : {&shape, &pieces, &drawn}) {
            written->fill(poison_byte);
        }
        ScheduleArgs args = c.args();
        args.starts = starts.as<int32_t>();
        args.row_request = requests.as<int32_t>();
        args.ends = ends.as<int32_t>();
        args.block_table = table.as<int32_t>();
        args.shape = c.fixed_tiles ? nullptr : shape.as<TileShape>();
        args.pieces = pieces.as<ScorePiece>();
        args.drawn = drawn.as<int32_t>();
        schedule(args, {cudaStreamPerThread, true});
        return Schedule{shape.download<TileShape>().front(), pieces.download<ScorePiece>(), drawn.download<int32_t>()};
    });
}

/// A query and pages of one format, and what the scorers read of them.
struct Operands {
    Operands(CacheFormat format, int heads, int rows, int pages)
        : format_(format),
          heads_(heads),
          rows_(rows),
          query(static_cast<size_t>(query_bytes(format, heads, rows))),
          weights(static_cast<size_t>(rows * heads)),
          widened_query(static_cast<size_t>(rows * heads) * head_dim),
          widened_weights(weights.size()),
          cache(static_cast<size_t>(pages * page_bytes(format))) {}

    void draw_fp8(Random& random) {
        std::normal_distribution<float> normal;
        for (auto* codes : {&cache, &query}) {
            for (auto& code : *codes) {
                code = e4m3_from_float(100.0F * normal(random));
            }
        }
        for (size_t page = 0; page < cache.size(); page += static_cast<size_t>(page_bytes(format_))) {
            for (int token = 0; token < page_tokens; ++token) {
                const float scale = std::ldexp(1.0F, static_cast<int>(random() % 5));
                std::memcpy(cache.data() + page + scale_offset(format_, token, 0), &scale, 4);
            }
        }
        draw_weights(random);
    }

    /// Scales a few powers of two apart. `far`: in some pages, or in some rows, all blocks but the first are so small that
    /// the first would hide them, but it meets zeros.
    enum class Far { none, keys, rows };
    void draw_mxfp4(Far far, Random& random) {
        for (auto* codes : {&cache, &query}) {
            for (auto& code : *codes) {
                code = static_cast<uint8_t>(random());
            }
        }
        const auto scale = [&](bool small) { return static_cast<uint8_t>(124 + random() % 7 - (small ? 30 : 0)); };
        const auto clear = [&](auto offset_of) {
            for (int column = 0; column < mxfp4_block; column += 2) {
                offset_of(column) = 0;
            }
        };
        for (size_t page = 0; page < cache.size(); page += static_cast<size_t>(page_bytes(format_))) {
            const bool small = far == Far::keys && random() % 16 == 0;
            for (int token = 0; token < page_tokens; ++token) {
                for (int block = 0; block < 4; ++block) {
                    cache[page + static_cast<size_t>(scale_offset(format_, token, block))] = scale(small && block > 0);
                }
                if (far == Far::rows) {
                    clear([&](int c) -> auto& {
                        return cache[page + static_cast<size_t>(payload_offset(format_, token, c))];
                    });
                }
            }
        }
        for (int row = 0; row < rows_; ++row) {
            const bool small = far == Far::rows && random() % 8 == 0;
            for (int head = 0; head < heads_; ++head) {
                for (int block = 0; block < 4; ++block) {
                    query[static_cast<size_t>(query_scale_offset(format_, heads_, rows_, row, head, block))] =
                        scale(small && block > 0);
                }
                if (far == Far::keys) {
                    clear([&](int c) -> auto& {
                        return query[static_cast<size_t>(query_payload_offset(format_, heads_, row, head, c))];
                    });
                }
            }
        }
        draw_weights(random);
        reference::widen_query(format_, heads_, rows_, rows_, query.data(), weights.data(), widened_query.data(),
                               widened_weights.data());
    }

private:
    void draw_weights(Random& random) {
        std::normal_distribution<float> normal;
        for (auto& weight : weights) {
            weight = normal(random);
        }
    }

    CacheFormat format_;
    int heads_;
    int rows_;

public:
    std::vector<uint8_t> query;
    std::vector<float> weights;
    std::vector<uint8_t> widened_query;
    std::vector<float> widened_weights;
    std::vector<uint8_t> cache;
};

/// Scores the same with every number of blocks. Rows that share a reading, that follow each other in the two halves of the
/// rows' buffer and that do not fit there, with invalid blocks among the pages; drawn pieces at few blocks, none at many.
template <typename Draw>
void score_however_shared(CacheFormat format, int heads, Random& random, Draw draw) {
    const int pages = 300;
    const std::vector<int> row_counts = {1, 8, 3, 1, 20, 1};
    const std::vector<int> keys = {20011, 30000, 15008, 900, 25025, 2000};
    const int columns = 500;
    std::vector<int32_t> starts{0};
    std::vector<int32_t> row_request;
    std::vector<int32_t> ends;
    for (size_t q = 0; q < keys.size(); ++q) {
        for (int i = 0; i < row_counts[q]; ++i) {
            row_request.push_back(static_cast<int32_t>(q));
            ends.push_back(keys[q] - row_counts[q] + 1 + i);
        }
        starts.push_back(static_cast<int32_t>(ends.size()));
    }
    const auto rows = static_cast<int>(ends.size());
    std::vector<int32_t> table(keys.size() * columns);
    for (auto& block : table) {
        block = random() % 50 == 0 ? -1 : static_cast<int32_t>(random() % pages);
    }
    Operands operands(format, heads, rows, pages);
    draw(operands);
    DeviceMemory device_starts(starts.size() * 4, 4, true);
    DeviceMemory device_requests(row_request.size() * 4, 4, true);
    DeviceMemory device_ends(ends.size() * 4, 4, true);
    DeviceMemory device_table(table.size() * 4, 4, true);
    const auto uploaded = [](const auto& values) {
        DeviceMemory memory(values.size() * sizeof values[0], 16, true);
        memory.upload(values);
        return memory;
    };
    const DeviceMemory device_cache = uploaded(operands.cache);
    const DeviceMemory device_query = uploaded(operands.query);
    const DeviceMemory device_weights = uploaded(operands.weights);
    const DeviceMemory widened_query = uploaded(operands.widened_query);
    const DeviceMemory widened_weights = uploaded(operands.widened_weights);
    DeviceMemory prefix(ends.size() * 4, 4, true);
    const auto capacity = static_cast<size_t>(most_score_pieces(rows, rows, columns));
    DeviceMemory pieces(capacity * sizeof(ScorePiece), 32, true);
    DeviceMemory drawn(4, 4, true);
    DeviceMemory status(sizeof(StepStatus), 16, true);
    const int64_t width = columns * page_tokens;
    const Tile tile{.number = 0, .rows = rows, .least = {rows, static_cast<int32_t>(width)}, .shape = nullptr};
    DeviceMemory logits(static_cast<size_t>(rows * width) * 4, 4, true);
    device_starts.upload(starts);
    device_requests.upload(row_request);
    device_ends.upload(ends);
    device_table.upload(table);
    if (!can_score_sm90(format, device_cache.as<uint8_t>(), page_bytes(format))) {
        GTEST_SKIP() << "needs an NVIDIA GPU of compute capability 9.0 and code for sm_90a";
    }
    prepare_score_sm90(format, heads);
    const ScoreArgs args{.format = format,
                         .heads = heads,
                         .tile = tile,
                         .max_rows = rows,
                         .query = device_query.as<uint8_t>(),
                         .head_weights = device_weights.as<float>(),
                         .widened_query = widened_query.as<uint8_t>(),
                         .widened_weights = widened_weights.as<float>(),
                         .cache = device_cache.as<uint8_t>(),
                         .pages = pages,
                         .page_stride_bytes = page_bytes(format),
                         .block_table = device_table.as<int32_t>(),
                         .block_table_stride = columns,
                         .starts = device_starts.as<int32_t>(),
                         .row_request = device_requests.as<int32_t>(),
                         .ends = device_ends.as<int32_t>(),
                         .page_prefix = prefix.as<int32_t>(),
                         .pieces = pieces.as<ScorePiece>(),
                         .drawn = drawn.as<int32_t>(),
                         .unscored_bound = 1000,
                         .logits = logits.as<float>(),
                         .status = status.as<StepStatus>()};
    const auto scored = [&](int blocks, int times) {
        schedule({.starts = args.starts,
                  .row_request = args.row_request,
                  .ends = args.ends,
                  .rows = rows,
                  .least = tile.least,
                  .unscored_bound = args.unscored_bound,
                  .shape = nullptr,
                  .page_prefix = prefix.as<int32_t>(),
                  .pieces = pieces.as<ScorePiece>(),
                  .pieces_a_tile = static_cast<int64_t>(capacity),
                  .drawn = args.drawn,
                  .block_table = args.block_table,
                  .block_table_stride = columns,
                  .rows_a_pass = score_sm90_rows_a_pass(heads),
                  .blocks = std::max(blocks, 1)},
                 {cudaStreamPerThread, true});
        logits.fill(poison_byte);
        status.fill(0);
        for (int i = 0; i < times; ++i) {
            if (blocks > 0) {
                score_sm90(args, blocks, {cudaStreamPerThread, true});
            } else {
                score(args, score_blocks(heads), {cudaStreamPerThread, true});
            }
        }
        check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "the scorer");
        return logits.download<float>();
    };
    const auto tolerance = static_cast<float>(tools::logit_tolerance(format));
    const std::vector<float> portable = scored(0, 1);
    const auto invalid = status.download<StepStatus>()[0].invalid_blocks;
    EXPECT_GT(invalid, 0U);
    const std::vector<float> undrawn = scored(132, 1);
    EXPECT_EQ(pieces.download<ScorePiece>()[0].drawn, 0);
    EXPECT_EQ(status.download<StepStatus>()[0].invalid_blocks, invalid);
    for (int row = 0; row < rows; ++row) {
        const float* a = undrawn.data() + row * width;
        const float* b = portable.data() + row * width;
        const int end = ends[static_cast<size_t>(row)];
        float largest = 0;
        for (int j = 0; j < end && end > args.unscored_bound; ++j) {
            largest = std::isinf(b[j]) ? largest : std::max(largest, std::abs(b[j]));
        }
        for (int64_t j = 0; j < width; ++j) {
            const bool scored_here = j < end && end > args.unscored_bound && !std::isinf(b[j]);
            ASSERT_TRUE(scored_here ? std::abs(a[j] - b[j]) <= tolerance * largest : bits_of(a[j]) == bits_of(b[j]))
                << "row " << row << ", " << j << ": " << a[j] << " and " << b[j];
        }
    }
    // The last row of each request, when nothing else is scored with it.
    std::vector<int32_t> alone(ends.size());
    for (size_t q = 0; q + 1 < starts.size(); ++q) {
        alone[static_cast<size_t>(starts[q + 1] - 1)] = ends[static_cast<size_t>(starts[q + 1] - 1)];
    }
    device_ends.upload(alone);
    const std::vector<float> apart = scored(132, 1);
    device_ends.upload(ends);
    for (size_t row = 0; row < ends.size(); ++row) {
        expect_same_bits(apart.data() + row * static_cast<size_t>(width), undrawn.data() + row * static_cast<size_t>(width),
                         alone[row] > args.unscored_bound ? static_cast<size_t>(alone[row]) : 0, "logits of a row alone");
    }
    for (const int blocks : {1, 3, 8, 11, 64}) {
        SCOPED_TRACE(blocks);
        const std::vector<float> actual = scored(blocks, 3);
        EXPECT_EQ(pieces.download<ScorePiece>()[0].drawn > 0, blocks < 30);
        EXPECT_EQ(drawn.download<int32_t>()[0], 0);
        EXPECT_EQ(status.download<StepStatus>()[0].invalid_blocks, 3 * invalid);
        expect_same_bits(actual.data(), undrawn.data(), undrawn.size(), "logits");
    }
}

TEST_F(Pieces, GiveTheSameBitsHoweverTheyAreShared) {
    Random random = fresh_random();
    for (const int heads : {16, 32, 64}) {
        SCOPED_TRACE(heads);
        score_however_shared(CacheFormat::fp8, heads, random, [&](Operands& o) { o.draw_fp8(random); });
        for (const CacheFormat format : {CacheFormat::mxfp4, CacheFormat::mxfp4_rowgroup}) {
            for (const auto far : {Operands::Far::none, Operands::Far::keys, Operands::Far::rows}) {
                if (far != Operands::Far::none && heads != 32) {
                    continue;  // column by column it takes its time
                }
                SCOPED_TRACE(std::to_string(static_cast<int>(format)) + ", far " + std::to_string(static_cast<int>(far)));
                score_however_shared(format, heads, random, [&](Operands& o) { o.draw_mxfp4(far, random); });
            }
        }
    }
}

}  // namespace
}  // namespace stepgraph::test
