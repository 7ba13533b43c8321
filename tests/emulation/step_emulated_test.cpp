// Whole layers without a GPU: from index inputs to indices, each kernel launched as in a step, in the emulator.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include <stepgraph/kernels/index_inputs.h>
#include <stepgraph/kernels/schedule.h>
#include <stepgraph/kernels/score.h>
#include <stepgraph/kernels/score_sm90.h>
#include <stepgraph/kernels/select.h>
#include <stepgraph/kernels/select_sm90.h>
#include <stepgraph/layouts/query_row.h>
#include <stepgraph/tools/step_checks.h>

#include "../gpu/step_case.h"
#include "../page_oracle.h"
#include "emulator.h"
#include "fresh_seed.h"

namespace stepgraph::test {
namespace {

constexpr int blocks = 3;  // of a scorer
constexpr LaunchContext context{nullptr, true};
constexpr float unwritten = -77.0F;

enum class Kernels { hopper, portable };

void PrintTo(Kernels kernels, std::ostream* out) {
    *out << (kernels == Kernels::hopper ? "Hopper" : "Portable");
}

/// The memory of a step of one layer, and its stages.
class EmulatedStep {
public:
    /// `own_logits`: the caller wants them. Then tiles have the least shape, else they grow.
    EmulatedStep(const StepCase& step, const reference::Layout& layout, int tile_rows, Kernels kernels, bool own_logits)
        : g_(step.geometry),
          step_(step),
          layout_(layout),
          least_{tile_rows, static_cast<int32_t>(g_.width())},
          portable_(kernels == Kernels::portable),
          own_logits_(own_logits),
          cache(step.layers[0].cache),
          logits(size(g_.max_rows * g_.width()), unwritten),
          indices(size(g_.max_rows * g_.top_k), -7),
          counts(size(g_.max_rows), -7),
          physical_slots(size(g_.max_rows * g_.top_k), -7),
          winner_logits(size(own_logits ? g_.max_rows * g_.top_k : 0), unwritten) {}

    void run() {
        const LayerCase& layer = step_.layers[0];
        index_inputs({.format = g_.cache_format,
                      .heads = g_.heads,
                      .rows = g_.max_rows,
                      .max_rows = g_.max_rows,
                      .max_requests = g_.max_requests,
                      .starts = layout_.starts.data(),
                      .iq = layer.iq.data(),
                      .projected = layer.projected.data(),
                      .projected_columns = g_.projected_columns,
                      .key_column = g_.key_column,
                      .weight_column = g_.weight_column,
                      .k_norm_weight = layer.k_norm_weight.data(),
                      .k_norm_bias = layer.k_norm_bias.data(),
                      .k_norm_eps = g_.k_norm_eps,
                      .slots = layout_.slots.data(),
                      .cache = cache.data(),
                      .pages = g_.pages,
                      .page_stride_bytes = g_.page_stride_bytes,
                      .query = query_.data(),
                      .head_weights = head_weights_.data(),
                      .widened_query = portable_ ? nullptr : widened_query_.data(),
                      .widened_weights = portable_ ? nullptr : widened_weights_.data(),
                      .status = &status},
                     context);
        schedule({.starts = layout_.starts.data(),
                  .row_request = layout_.row_request.data(),
                  .ends = layout_.ends.data(),
                  .rows = g_.max_rows,
                  .least = least_,
                  .unscored_bound = unscored_bound(),
                  .shape = own_logits_ ? nullptr : &shape_,
                  .page_prefix = portable_ ? page_prefix_.data() : nullptr,
                  .pieces = portable_ ? nullptr : pieces_.data(),
                  .pieces_a_tile = pieces_a_tile_,
                  .drawn = drawn_.data(),
                  .block_table = step_.block_table.data(),
                  .block_table_stride = g_.block_table_stride,
                  .rows_a_pass = score_sm90_rows_a_pass(g_.heads),
                  .blocks = blocks},
                 context);
        for (int number = 0; number < tiles_; ++number) {
            run_tile({.number = number, .rows = g_.max_rows, .least = least_, .shape = own_logits_ ? nullptr : &shape_});
        }
    }

private:
    static size_t size(int64_t n) { return static_cast<size_t>(n); }
    [[nodiscard]] int unscored_bound() const { return own_logits_ ? 0 : g_.top_k; }

    void run_tile(const Tile& tile) {
        float* const own = logits.data() + (own_logits_ ? int64_t{tile.number} * least_.rows * g_.width() : 0);
        const ScoreArgs args{.format = g_.cache_format,
                             .heads = g_.heads,
                             .tile = tile,
                             .max_rows = g_.max_rows,
                             .query = query_.data(),
                             .head_weights = head_weights_.data(),
                             .widened_query = widened_query_.data(),
                             .widened_weights = widened_weights_.data(),
                             .cache = cache.data(),
                             .pages = g_.pages,
                             .page_stride_bytes = g_.page_stride_bytes,
                             .block_table = step_.block_table.data(),
                             .block_table_stride = g_.block_table_stride,
                             .starts = layout_.starts.data(),
                             .row_request = layout_.row_request.data(),
                             .ends = layout_.ends.data(),
                             .page_prefix = page_prefix_.data(),
                             .pieces = pieces_.data() + tile.number * pieces_a_tile_,
                             .drawn = drawn_.data() + tile.number,
                             .unscored_bound = unscored_bound(),
                             .logits = own,
                             .status = &status};
        const SelectArgs select_args{.tile = tile,
                                     .top_k = g_.top_k,
                                     .ends = layout_.ends.data(),
                                     .logits = own,
                                     .row_request = layout_.row_request.data(),
                                     .block_table = step_.block_table.data(),
                                     .block_table_stride = g_.block_table_stride,
                                     .pages = g_.pages,
                                     .indices = indices.data(),
                                     .counts = counts.data(),
                                     .physical_slots = physical_slots.data(),
                                     .winner_logits = own_logits_ ? winner_logits.data() : nullptr,
                                     .padded_logits = own_logits_ ? own : nullptr,
                                     .width = g_.width(),
                                     .last_of_layer = tile.number + 1 == tiles_};
        if (portable_) {
            score(args, blocks, context);
            select(select_args, context);
        } else {
            score_sm90(args, blocks, context);
            select_sm90(select_args, context);
        }
    }

    const Geometry& g_;
    const StepCase& step_;
    const reference::Layout& layout_;
    TileShape least_;
    bool portable_;
    bool own_logits_;
    int tiles_ = tile_count(g_.max_rows, least_.rows);
    TileShape shape_{-7, -7};
    std::vector<uint8_t> query_ = std::vector<uint8_t>(size(query_bytes(g_.cache_format, g_.heads, g_.max_rows)), 0xA5);
    std::vector<float> head_weights_ = std::vector<float>(size(g_.max_rows * g_.heads), unwritten);
    std::vector<uint8_t> widened_query_ = std::vector<uint8_t>(size(g_.max_rows * g_.heads * head_dim), 0xA5);
    std::vector<float> widened_weights_ = std::vector<float>(size(g_.max_rows * g_.heads), unwritten);
    std::vector<int32_t> page_prefix_ = std::vector<int32_t>(size(g_.max_rows), -7);
    std::vector<int32_t> drawn_ = std::vector<int32_t>(size(tiles_), -7);
    int64_t pieces_a_tile_ = most_score_pieces(g_.max_rows, least_.rows, g_.block_table_columns);
    std::vector<ScorePiece> pieces_ =
        std::vector<ScorePiece>(size(tiles_ * pieces_a_tile_), {-7, -7, -7, -7, -7, -7, -7, -7});

public:
    StepStatus status;
    std::vector<uint8_t> cache;
    std::vector<float> logits;
    std::vector<int32_t> indices;
    std::vector<int32_t> counts;
    std::vector<int64_t> physical_slots;
    std::vector<float> winner_logits;
};

class StepEmulated : public ::testing::TestWithParam<std::tuple<CacheFormat, Kernels>> {
protected:
    static CacheFormat format() { return std::get<0>(GetParam()); }
    static Kernels kernels() { return std::get<1>(GetParam()); }

    /// A step's logits, then, in another order of threads and with tiles that grow, its selection once more.
    void check(const CaseOptions& options, int tile_rows) {
        SCOPED_TRACE(std::to_string(options.heads) + " heads, " + std::to_string(options.columns) + " columns");
        StepCase step = make_case(options, random_);
        const StepCase before = step;
        const ExpectedStep expected = expected_step(step, options.max_rows, true);
        EmulatedStep own(before, expected.layout, tile_rows, kernels(), true);
        ASSERT_NO_THROW(own.run());
        expect_right(own, step, expected);

        EmulatedStep grown(before, expected.layout, tile_rows, kernels(), false);
        ASSERT_NO_THROW(grown.run());
        EXPECT_EQ(grown.cache, own.cache);
        EXPECT_EQ(grown.indices, own.indices);
        EXPECT_EQ(grown.counts, own.counts);
        EXPECT_EQ(grown.physical_slots, own.physical_slots);
    }

    void expect_right(const EmulatedStep& own, const StepCase& after, const ExpectedStep& expected) const {
        const reference::LayerOutputs& want = expected.layers[0];
        EXPECT_EQ(own.cache, after.layers[0].cache);
        EXPECT_EQ(own.status, expected.status);
        EXPECT_EQ(own.counts, want.counts);
        if (kernels() == Kernels::portable) {
            EXPECT_EQ(own.logits, want.logits);
            EXPECT_EQ(own.indices, want.indices);
            EXPECT_EQ(own.physical_slots, want.physical_slots);
            EXPECT_EQ(own.winner_logits, want.winner_logits);
            return;
        }
        EXPECT_EQ(tools::check_logits(after.geometry, expected.layout.ends, want.logits, own.logits, 1e-4), "");
        EXPECT_EQ(tools::check_selection(after.geometry, expected.layout.ends, own.logits, own.indices), "");
    }

    uint64_t seed_ = fresh_seed();
    Random random_{seed_};
    void SetUp() override { emulation::seed_launches(seed_); }
};

TEST_P(StepEmulated, OfFewKeysIsThatOfTheHost) {
    for (const int heads : {16, 32, 64}) {
        check({.format = format(), .heads = heads, .top_k = 32, .columns = 4, .extra_stride_bytes = 48}, 3);
    }
}

TEST_P(StepEmulated, OfManyKeysIsThatOfTheHost) {
    check({.format = format(), .heads = 32, .top_k = 256, .max_rows = 6, .max_requests = 3, .columns = 24}, 2);
}

std::string step_name(const ::testing::TestParamInfo<StepEmulated::ParamType>& info) {
    return ::testing::PrintToString(std::get<0>(info.param)) + "_" + ::testing::PrintToString(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(FormatsAndKernels, StepEmulated,
                         ::testing::Combine(::testing::ValuesIn(all_formats),
                                            ::testing::Values(Kernels::hopper, Kernels::portable)),
                         step_name);

}  // namespace
}  // namespace stepgraph::test
