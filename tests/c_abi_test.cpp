// Pins what callers of the C interface were compiled with: a change here breaks them.
#include <cstddef>
#include <string>

#include <gtest/gtest.h>

#include <stepgraph/pipeline/stepgraph.h>

namespace {

static_assert(sizeof(stepgraph_geometry) == 104);
static_assert(offsetof(stepgraph_geometry, heads) == 8 && offsetof(stepgraph_geometry, top_k) == 12);
static_assert(offsetof(stepgraph_geometry, max_rows) == 16 && offsetof(stepgraph_geometry, max_requests) == 20);
static_assert(offsetof(stepgraph_geometry, max_model_len) == 24 && offsetof(stepgraph_geometry, block_table_stride) == 32);
static_assert(offsetof(stepgraph_geometry, pages) == 40 && offsetof(stepgraph_geometry, page_stride_bytes) == 48);
static_assert(offsetof(stepgraph_geometry, block_table_columns) == 56 && offsetof(stepgraph_geometry, cache_format) == 60);
static_assert(offsetof(stepgraph_geometry, q_lora_rank) == 64 && offsetof(stepgraph_geometry, hidden_size) == 68);
static_assert(offsetof(stepgraph_geometry, projected_columns) == 72 && offsetof(stepgraph_geometry, key_column) == 76);
static_assert(offsetof(stepgraph_geometry, weight_column) == 80 && offsetof(stepgraph_geometry, k_norm_eps) == 84);
static_assert(offsetof(stepgraph_geometry, dcp_world_size) == 88 && offsetof(stepgraph_geometry, dcp_rank) == 92);
static_assert(offsetof(stepgraph_geometry, dcp_interleave) == 96 && offsetof(stepgraph_geometry, reserved) == 100);

static_assert(sizeof(stepgraph_options) == 24);
static_assert(offsetof(stepgraph_options, programmatic_edges) == 8 && offsetof(stepgraph_options, portable_scorer) == 12);
static_assert(offsetof(stepgraph_options, portable_select) == 16 && offsetof(stepgraph_options, tile_rows) == 20);

static_assert(sizeof(stepgraph_step_buffers) == 48);
static_assert(offsetof(stepgraph_step_buffers, seq_lens) == 8 && offsetof(stepgraph_step_buffers, query_lens) == 16);
static_assert(offsetof(stepgraph_step_buffers, num_requests) == 24 && offsetof(stepgraph_step_buffers, block_table) == 32);
static_assert(offsetof(stepgraph_step_buffers, slots) == 40);

static_assert(sizeof(stepgraph_layer_buffers) == 120);
static_assert(offsetof(stepgraph_layer_buffers, q_c) == 8 && offsetof(stepgraph_layer_buffers, hidden) == 16);
static_assert(offsetof(stepgraph_layer_buffers, wq_b) == 24 && offsetof(stepgraph_layer_buffers, w_kv) == 32);
static_assert(offsetof(stepgraph_layer_buffers, iq) == 40 && offsetof(stepgraph_layer_buffers, projected) == 48);
static_assert(offsetof(stepgraph_layer_buffers, k_norm_weight) == 56 &&
              offsetof(stepgraph_layer_buffers, k_norm_bias) == 64);
static_assert(offsetof(stepgraph_layer_buffers, cache) == 72 && offsetof(stepgraph_layer_buffers, indices) == 80);
static_assert(offsetof(stepgraph_layer_buffers, counts) == 88 && offsetof(stepgraph_layer_buffers, physical_slots) == 96);
static_assert(offsetof(stepgraph_layer_buffers, winner_logits) == 104 && offsetof(stepgraph_layer_buffers, logits) == 112);

static_assert(sizeof(stepgraph_status) == 24);
static_assert(offsetof(stepgraph_status, invalid_slots) == 8 && offsetof(stepgraph_status, invalid_blocks) == 12);
static_assert(offsetof(stepgraph_status, clamped_bounds) == 16 && offsetof(stepgraph_status, dropped_rows) == 20);

static_assert(sizeof(stepgraph_result) == 4 && STEPGRAPH_OK == 0 && STEPGRAPH_INVALID_GEOMETRY == 1);
static_assert(STEPGRAPH_INVALID_BUFFER == 2 && STEPGRAPH_WORKSPACE_TOO_SMALL == 3 && STEPGRAPH_WRONG_ORDER == 4);
static_assert(STEPGRAPH_INVALID_ROWS == 5 && STEPGRAPH_INVALID_LAYER == 6 && STEPGRAPH_INVALID_CAPTURE == 7);
static_assert(STEPGRAPH_CUDA == 8 && STEPGRAPH_CUBLAS == 9 && STEPGRAPH_INVALID_ARGUMENT == 10);
static_assert(STEPGRAPH_CALLBACK_FAILED == 11 && STEPGRAPH_OUT_OF_MEMORY == 12 && STEPGRAPH_INTERNAL == 13);
static_assert(STEPGRAPH_FP8 == 0 && STEPGRAPH_FP8_MX == 1 && STEPGRAPH_MXFP4 == 2 && STEPGRAPH_MXFP4_ROWGROUP == 3);

TEST(CAbi, HasTheVersionOfTheProject) {
    const std::string version = std::to_string(STEPGRAPH_VERSION_MAJOR) + "." + std::to_string(STEPGRAPH_VERSION_MINOR) +
                                "." + std::to_string(STEPGRAPH_VERSION_PATCH);
    EXPECT_EQ(version, STEPGRAPH_PROJECT_VERSION);
    EXPECT_EQ(stepgraph_version(), 100);
}

}  // namespace
