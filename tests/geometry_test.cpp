// Every number of a geometry that cannot be right is refused by name, and every one that can is taken.
#include <stepgraph/pipeline/geometry.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <stepgraph/layouts/tiles.h>
#include <stepgraph/pipeline/pipeline.h>

#include "page_oracle.h"
#include "refused.h"

namespace stepgraph {
namespace {

constexpr int32_t most = std::numeric_limits<int32_t>::max();
constexpr int32_t least = std::numeric_limits<int32_t>::min();

/// A geometry in which every number that a test changes has room on both sides.
Geometry valid_geometry() {
    return {.heads = 32,
            .top_k = 512,
            .max_rows = 64,
            .max_requests = 16,
            .max_model_len = 4096,
            .block_table_columns = 64,
            .block_table_stride = 80,
            .cache_format = CacheFormat::fp8,
            .pages = 1000,
            .page_stride_bytes = 8448,
            .q_lora_rank = 1536,
            .hidden_size = 7168,
            .projected_columns = 256,
            .key_column = 0,
            .weight_column = 128,
            .k_norm_eps = 1e-5F,
            .dcp = {}};
}

struct Wrong {
    std::string what;
    std::function<void(Geometry&)> change;
    std::vector<std::string> sentence;  // in this order
};

void PrintTo(const Wrong& wrong, std::ostream* out) {
    *out << wrong.what;
}

class WrongGeometry : public ::testing::TestWithParam<Wrong> {};

TEST_P(WrongGeometry, IsRefusedWithNameValueAndWhatItMustBe) {
    Geometry geometry = valid_geometry();
    GetParam().change(geometry);
    EXPECT_TRUE(test::refused([&] { validate(geometry); }, ErrorCode::invalid_geometry, GetParam().sentence));
    EXPECT_TRUE(test::refused([&] { Pipeline pipeline(geometry); }, ErrorCode::invalid_geometry, GetParam().sentence));
}

/// One case for each of `values` of the number that `member` gives.
template <typename Number, typename Member>
void add(std::vector<Wrong>& cases, const std::string& name, const std::string& must, Member member,
         const std::vector<Number>& values) {
    for (const Number value : values) {
        cases.push_back({name + " = " + std::to_string(value),
                         [member, value](Geometry& g) { member(g) = value; },
                         {name + " is " + std::to_string(value), "must be", must}});
    }
}

std::vector<Wrong> wrong_numbers() {
    std::vector<Wrong> cases;
    const auto ints = [&cases](const std::string& name, const std::string& must, auto member, std::vector<int> values) {
        add<int>(cases, name, must, member, values);
    };
    const auto longs = [&cases](const std::string& name, const std::string& must, auto member, std::vector<int64_t> values) {
        add<int64_t>(cases, name, must, member, values);
    };
    constexpr int64_t longest = std::numeric_limits<int64_t>::max();

    ints("heads", "16, 32 or 64", [](Geometry& g) -> int& { return g.heads; },
         {least, -32, 0, 1, 8, 15, 17, 31, 33, 48, 63, 65, 128, most});
    ints("top_k", "1 to 4096", [](Geometry& g) -> int& { return g.top_k; }, {least, -1, 0, 4097, most});
    ints("max_rows", "at least 1", [](Geometry& g) -> int& { return g.max_rows; }, {least, -1, 0});
    ints("max_requests", "1 to 2^31 - 2", [](Geometry& g) -> int& { return g.max_requests; }, {least, -1, 0, most});
    ints("block_table_columns", "1 to 16777216", [](Geometry& g) -> int& { return g.block_table_columns; },
         {least, -1, 0, 33554432, most});
    longs("block_table_stride", "0 or at least block_table_columns (64)",
          [](Geometry& g) -> int64_t& { return g.block_table_stride; }, {-longest, -1, 1, 63});
    longs("block_table_stride", "the table's bytes fit 63 bits",
          [](Geometry& g) -> int64_t& { return g.block_table_stride; }, {longest, longest / 4});
    longs("max_model_len", "1 to dcp.world_size * 64 * block_table_columns (4096)",
          [](Geometry& g) -> int64_t& { return g.max_model_len; }, {-longest, -1, 0, 4097, int64_t{1} << 40U, longest});
    ints("dcp.world_size", "at least 1", [](Geometry& g) -> int& { return g.dcp.world_size; }, {least, -1, 0});
    ints("dcp.rank", "0 to world_size - 1 (0)", [](Geometry& g) -> int& { return g.dcp.rank; }, {least, -1, 1, most});
    ints("dcp.interleave", "at least 1", [](Geometry& g) -> int& { return g.dcp.interleave; }, {least, -1, 0});
    longs("pages", "1 to 2^31 - 1", [](Geometry& g) -> int64_t& { return g.pages; },
          {-longest, -1, 0, int64_t{1} << 31U, longest});
    longs("page_stride_bytes", "multiple of 4 that is at least the page's own 8448",
          [](Geometry& g) -> int64_t& { return g.page_stride_bytes; },
          {-longest, -8448, -4, 1, 4, 4352, 8444, 8447, 8449, 8450, 8451});
    longs("page_stride_bytes", "pages * page_stride_bytes fits 63 bits",
          [](Geometry& g) -> int64_t& { return g.page_stride_bytes; }, {longest - 3});
    for (const int64_t stride : {4348, 4351, 4353, 4354}) {
        cases.push_back({"mxfp4 page_stride_bytes = " + std::to_string(stride),
                         [stride](Geometry& g) {
                             g.cache_format = CacheFormat::mxfp4;
                             g.page_stride_bytes = stride;
                         },
                         {"page_stride_bytes is " + std::to_string(stride), "must be", "4352"}});
    }
    for (const int32_t format : {least, -1, 4, most}) {
        cases.push_back({"cache_format = " + std::to_string(format),
                         [format](Geometry& g) { g.cache_format = static_cast<CacheFormat>(format); },
                         {"cache_format is " + std::to_string(format), "must be", "fp8", "mxfp4_rowgroup"}});
        cases.push_back({"cache_format = " + std::to_string(format) + " without a stride",
                         [format](Geometry& g) {
                             g.cache_format = static_cast<CacheFormat>(format);
                             g.page_stride_bytes = 0;
                         },
                         {"cache_format is " + std::to_string(format), "must be", "fp8", "mxfp4_rowgroup"}});
    }
    ints("q_lora_rank", "0 or a positive multiple of 8", [](Geometry& g) -> int& { return g.q_lora_rank; },
         {least, -64, -1, 1, 63, 65, 1537});
    ints("hidden_size", "0 or a positive multiple of 8", [](Geometry& g) -> int& { return g.hidden_size; },
         {least, -64, -1, 1, 63, 65, 7167});
    cases.push_back({"hidden_size alone 0",
                     [](Geometry& g) { g.hidden_size = 0; },
                     {"hidden_size is 0", "must be", "above 0 where q_lora_rank is"}});
    cases.push_back({"q_lora_rank alone 0",
                     [](Geometry& g) { g.q_lora_rank = 0; },
                     {"hidden_size is 7168", "must be", "0 where q_lora_rank is 0"}});
    ints("projected_columns", "128 + heads (160)", [](Geometry& g) -> int& { return g.projected_columns; },
         {least, -1, 1, 128, 159, most});
    ints("key_column", "0 to projected_columns - 128 (128)", [](Geometry& g) -> int& { return g.key_column; },
         {least, -1, 129, most});
    ints("weight_column", "0 to projected_columns - heads (224)", [](Geometry& g) -> int& { return g.weight_column; },
         {least, -1, 225, most});
    ints("weight_column", "outside the key's columns 0 to 127", [](Geometry& g) -> int& { return g.weight_column; },
         {0, 1, 64, 127});
    cases.push_back({"weights that end in the key",
                     [](Geometry& g) {
                         g.key_column = 31;
                         g.weight_column = 0;
                     },
                     {"weight_column is 0", "must be", "outside the key's columns 31 to 158"}});
    const auto eps = [&cases](float value, const std::string& printed) {
        cases.push_back({"k_norm_eps = " + printed,
                         [value](Geometry& g) { g.k_norm_eps = value; },
                         {"k_norm_eps is " + printed, "must be", "finite and not negative"}});
    };
    eps(-1.0F, "-1");
    eps(-1e-12F, "-1e-12");
    eps(std::numeric_limits<float>::infinity(), "inf");
    eps(-std::numeric_limits<float>::infinity(), "-inf");
    eps(std::numeric_limits<float>::quiet_NaN(), "nan");
    return cases;
}

std::vector<Wrong> wrong_products() {
    return {{"rows times requests",
             [](Geometry& g) {
                 g.max_rows = 65536;
                 g.max_requests = 32768;
                 g.top_k = 1;
             },
             {"max_requests * max_rows is 2147483648", "must be", "at most 2^31 - 1"}},
            {"the most rows times the most requests",
             [](Geometry& g) { g.max_rows = most, g.max_requests = most - 1; },
             {"max_requests * max_rows is 4611686011984936962", "must be", "at most 2^31 - 1"}},
            {"rows times winners",
             [](Geometry& g) {
                 g.max_rows = 524288;
                 g.top_k = 4096;
             },
             {"max_rows * top_k is 2147483648", "must be", "at most 2^31 - 1"}},
            {"ranks times interleave",
             [](Geometry& g) { g.dcp = {.world_size = 65536, .rank = 0, .interleave = 32768}; },
             {"dcp.world_size * dcp.interleave is 2147483648", "must be", "at most 2^31 - 1"}},
            {"the most ranks times the most interleave",
             [](Geometry& g) { g.dcp = {.world_size = most, .rank = 0, .interleave = most}; },
             {"dcp.world_size * dcp.interleave is 4611686014132420609", "must be", "at most 2^31 - 1"}},
            {"rank of four",
             [](Geometry& g) { g.dcp = {.world_size = 4, .rank = 4, .interleave = 1}; },
             {"dcp.rank is 4", "must be", "0 to world_size - 1 (3)"}},
            {"a sequence longer than two ranks hold",
             [](Geometry& g) {
                 g.dcp = {.world_size = 2, .rank = 0, .interleave = 1};
                 g.max_model_len = 8193;
             },
             {"max_model_len is 8193", "must be", "(8192)"}},
            {"a sequence longer than 31 bits",
             [](Geometry& g) {
                 g.block_table_columns = 16777216;
                 g.block_table_stride = 0;
                 g.dcp.world_size = 8;
                 g.max_model_len = int64_t{most} + 1;
             },
             {"max_model_len is 2147483648", "must be", "(2147483647)"}},
            {"rows times packed columns",
             [](Geometry& g) { g.projected_columns = 33554432; },
             {"projected_columns is 33554432", "must be", "at most 2^31 / max_rows"}},
            {"pages times stride",
             [](Geometry& g) {
                 g.pages = most;
                 g.page_stride_bytes = int64_t{1} << 33U;
             },
             {"page_stride_bytes is 8589934592", "must be", "fits 63 bits"}}};
}

std::string case_number(const ::testing::TestParamInfo<Wrong>& info) {
    std::string name;
    for (const char letter : info.param.what) {
        name += std::isalnum(static_cast<unsigned char>(letter)) != 0 ? letter : '_';
    }
    return name + "_case_" + std::to_string(info.index);
}

INSTANTIATE_TEST_SUITE_P(Numbers, WrongGeometry, ::testing::ValuesIn(wrong_numbers()), case_number);
INSTANTIATE_TEST_SUITE_P(Products, WrongGeometry, ::testing::ValuesIn(wrong_products()), case_number);

TEST(DefaultGeometry, OfNothingIsRefused) {
    EXPECT_TRUE(test::refused([] { validate({}); }, ErrorCode::invalid_geometry, {"max_rows is 0", "must be at least 1"}));
}

TEST(DefaultGeometry, IsFilledInAndTheRestIsLeftAlone) {
    for (const int heads : {16, 32, 64}) {
        Geometry geometry = valid_geometry();
        geometry.heads = heads;
        geometry.block_table_stride = 0;
        geometry.page_stride_bytes = 0;
        geometry.projected_columns = 0;
        const Geometry filled = validate(geometry);
        EXPECT_EQ(filled.block_table_stride, 64);
        EXPECT_EQ(filled.page_stride_bytes, 8448);
        EXPECT_EQ(filled.projected_columns, 128 + heads);
        EXPECT_EQ(filled.width(), 4096);
        EXPECT_EQ(filled.heads, heads);
        EXPECT_EQ(filled.pages, 1000);
        EXPECT_EQ(filled.max_model_len, 4096);
        EXPECT_EQ(Pipeline(geometry).geometry().page_stride_bytes, 8448);
    }
    for (const CacheFormat format : test::all_formats) {
        Geometry geometry = valid_geometry();
        geometry.cache_format = format;
        geometry.page_stride_bytes = 0;
        EXPECT_EQ(validate(geometry).page_stride_bytes, test::own_bytes(format));
    }
}

TEST(DefaultGeometry, SaysWhoProjects) {
    Geometry geometry = valid_geometry();
    EXPECT_TRUE(geometry.projects());
    geometry.q_lora_rank = geometry.hidden_size = 0;
    EXPECT_FALSE(validate(geometry).projects());
}

TEST(ValidGeometry, TakesTheCountsInUse) {
    for (const int top_k : {1, 63, 64, 65, 512, 1024, 2048, 2051, 4096}) {
        for (const int heads : {16, 32, 64}) {
            for (const CacheFormat format : test::all_formats) {
                Geometry geometry = valid_geometry();
                geometry.top_k = top_k;
                geometry.heads = heads;
                geometry.cache_format = format;
                EXPECT_NO_THROW(validate(geometry)) << top_k << " " << heads;
                EXPECT_GT(Pipeline(geometry).workspace_bytes(), 0U);
            }
        }
    }
}

TEST(ValidGeometry, TakesEdges) {
    const std::vector<std::function<void(Geometry&)>> edges{
        [](Geometry& g) { g.page_stride_bytes = 1002240; },
        [](Geometry& g) { g.page_stride_bytes = 8452; },
        [](Geometry& g) { g.block_table_stride = 64; },
        [](Geometry& g) { g.max_model_len = 1; },
        [](Geometry& g) { g.max_rows = g.max_requests = 1; },
        [](Geometry& g) { g.pages = 1; },
        [](Geometry& g) { g.pages = most; },
        [](Geometry& g) { g.key_column = g.projected_columns - 128, g.weight_column = 0; },
        [](Geometry& g) { g.key_column = 32, g.weight_column = 0; },
        [](Geometry& g) { g.weight_column = 224; },
        [](Geometry& g) { g.projected_columns = 160; },
        [](Geometry& g) { g.q_lora_rank = g.hidden_size = 64; },
        [](Geometry& g) { g.k_norm_eps = 0.0F; },
        [](Geometry& g) {
            g.dcp = {8, 7, 64}, g.max_model_len = 8 * 4096;
        },
        [](Geometry& g) { g.max_rows = 32767, g.max_requests = 65536; },
        [](Geometry& g) { g.max_rows = 65536, g.max_requests = 32767, g.top_k = 4096; }};
    for (size_t i = 0; i < edges.size(); ++i) {
        Geometry geometry = valid_geometry();
        edges[i](geometry);
        EXPECT_NO_THROW(validate(geometry)) << "edge " << i;
        EXPECT_NO_THROW(Pipeline{geometry}) << "edge " << i;
        EXPECT_NO_THROW(validate(validate(geometry))) << "a validated geometry is valid, edge " << i;
    }
}

TEST(ValidGeometry, TakesTheModelsServed) {
    Geometry kimi = valid_geometry();
    kimi.top_k = 2048;
    kimi.max_model_len = 1048576;
    kimi.block_table_columns = 16384;
    kimi.block_table_stride = 0;
    EXPECT_NO_THROW(Pipeline{kimi});
    Geometry deepseek = kimi;
    deepseek.heads = 64;
    deepseek.q_lora_rank = deepseek.hidden_size = 0;
    deepseek.projected_columns = 0;
    EXPECT_NO_THROW(Pipeline{deepseek});
}

// ---- tiles and workspace

TEST(TileRows, AreTheDefaultOrTheWishAndNeverMoreThanTheRows) {
    Geometry geometry = valid_geometry();
    EXPECT_EQ(Pipeline(geometry).tile_rows(), 32);
    EXPECT_EQ(Pipeline(geometry, {.tile_rows = 1}).tile_rows(), 1);
    EXPECT_EQ(Pipeline(geometry, {.tile_rows = 7}).tile_rows(), 7);
    EXPECT_EQ(Pipeline(geometry, {.tile_rows = 64}).tile_rows(), 64);
    EXPECT_EQ(Pipeline(geometry, {.tile_rows = 65}).tile_rows(), 64);
    EXPECT_EQ(Pipeline(geometry, {.tile_rows = most}).tile_rows(), 64);
    geometry.max_rows = 3;
    EXPECT_EQ(Pipeline(geometry).tile_rows(), 3);
}

TEST(TileRows, GrowUnderContextParallelism) {
    Geometry geometry = valid_geometry();
    geometry.max_rows = 1000;
    geometry.top_k = 2048;
    geometry.block_table_columns = 256;  // 16384 positions
    geometry.block_table_stride = 0;
    geometry.dcp.world_size = 8;
    geometry.max_model_len = 131072;
    EXPECT_EQ(Pipeline(geometry).tile_rows(), 143);
}

TEST(TileRows, BelowZeroOrBeyondAnyCountAreRefused) {
    Geometry geometry = valid_geometry();
    for (const int tile_rows : {-1, least}) {
        EXPECT_TRUE(test::refused([&] { Pipeline(geometry, {.tile_rows = tile_rows}); }, ErrorCode::invalid_geometry,
                                  {"tile_rows is " + std::to_string(tile_rows), "must be", "at least 1"}));
    }
    geometry.block_table_columns = 16777216;
    geometry.block_table_stride = 0;
    geometry.max_rows = 1000;
    EXPECT_TRUE(test::refused([&] { Pipeline(geometry, {.tile_rows = 65}); }, ErrorCode::invalid_geometry,
                              {"tile_rows is 65", "must be at most 2^30 / block_table_columns (64)"}));
    EXPECT_NO_THROW(Pipeline(geometry, {.tile_rows = 64}));
}

TEST(WorkspaceBytes, HoldOneTileOfLogitsAndNotThoseOfEveryRow) {
    Geometry geometry = valid_geometry();
    geometry.max_rows = 1024;
    geometry.block_table_columns = 16384;  // 2^20 positions: 4 GiB for every row
    geometry.block_table_stride = 0;
    geometry.max_model_len = 1048576;
    const size_t tile = size_t{32} * 1048576 * 4;
    const size_t bytes = Pipeline(geometry).workspace_bytes();
    EXPECT_GE(bytes, tile);
    EXPECT_LT(bytes, 2 * tile);
}

TEST(WorkspaceBytes, GrowWithRowsAndNotWithTheirSquare) {
    const auto bytes = [](int rows, int tile_rows, int columns) {
        Geometry geometry = valid_geometry();
        geometry.q_lora_rank = geometry.hidden_size = 0;
        geometry.max_rows = rows;
        geometry.block_table_columns = columns;
        geometry.block_table_stride = 0;
        geometry.max_model_len = int64_t{columns} * page_tokens;
        const auto all = static_cast<int64_t>(Pipeline(geometry, {.tile_rows = tile_rows}).workspace_bytes());
        return all - int64_t{tile_rows} * geometry.width() * 4;
    };
    for (const int tile_rows : {1, 32, 100}) {
        for (const int columns : {1, 64, 2048}) {
            for (const int rows : {512, 1024, 4096}) {
                if (rows >= most_tile_growth * tile_rows) {
                    EXPECT_LE(bytes(2 * rows, tile_rows, columns), 2 * bytes(rows, tile_rows, columns) + 1024)
                        << rows << " rows in tiles of " << tile_rows << ", " << columns << " columns";
                }
            }
        }
    }
    // Some 5.3 KB are query and weights, 1 KB pieces; for each tile 16 KB for blocks and 64 KB for 2^22 keys.
    EXPECT_LE(bytes(4096, 32, 2048), int64_t{4096} * 7168 + int64_t{128} * 83000 + 500000);
}

TEST(WorkspaceBytes, GrowWithRowsRequestsAndTheTileAndDoNotDependOnPages) {
    const Geometry geometry = valid_geometry();
    const size_t bytes = Pipeline(geometry).workspace_bytes();
    Geometry larger = geometry;
    larger.max_rows *= 2;
    EXPECT_GT(Pipeline(larger).workspace_bytes(), bytes);
    larger = geometry;
    larger.max_requests *= 100;
    EXPECT_GT(Pipeline(larger).workspace_bytes(), bytes);
    // One more row of logits, and room for two more pieces of scoring.
    EXPECT_GE(Pipeline(geometry, {.tile_rows = 33}).workspace_bytes(), bytes + 4096 * 4);
    EXPECT_LE(Pipeline(geometry, {.tile_rows = 33}).workspace_bytes(), bytes + 4096 * 4 + 512);
    larger = geometry;
    larger.pages *= 1000;
    EXPECT_EQ(Pipeline(larger).workspace_bytes(), bytes);
    Geometry projected_elsewhere = geometry;
    projected_elsewhere.q_lora_rank = projected_elsewhere.hidden_size = 0;
    EXPECT_LT(Pipeline(projected_elsewhere).workspace_bytes(), bytes);
}

TEST(WorkspaceBytes, OfTheLargestGeometriesDoNotWrap) {
    Geometry rows = valid_geometry();
    rows.heads = 64;
    rows.max_rows = most;
    rows.max_requests = 1;
    rows.top_k = 1;
    rows.q_lora_rank = rows.hidden_size = 0;
    rows.projected_columns = 0;
    EXPECT_TRUE(test::refused([&] { validate(rows); }, ErrorCode::invalid_geometry, {"projected_columns is 192"}));
    rows.max_rows = most / 192;
    EXPECT_GE(Pipeline(rows).workspace_bytes(), static_cast<size_t>(rows.max_rows) * 64 * (128 + 4));

    Geometry wide = valid_geometry();
    wide.block_table_columns = 16777216;
    wide.block_table_stride = 0;
    wide.max_model_len = wide.width();
    EXPECT_GE(Pipeline(wide, {.tile_rows = 64}).workspace_bytes(), static_cast<size_t>(wide.width()) * 64 * 4);

    Geometry requests = valid_geometry();
    requests.max_rows = 1;
    requests.max_requests = most - 1;
    EXPECT_GE(Pipeline(requests).workspace_bytes(), size_t{most} * 4);
}

}  // namespace
}  // namespace stepgraph
