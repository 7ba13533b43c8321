// How many rows share a tile of logits.
#include <stepgraph/layouts/tiles.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

#include "random.h"

namespace stepgraph {
namespace {

TEST(DefaultTileRows, OfKnownShapesAreTheseNumbers) {
    // max_model_len, width, top_k, heads
    EXPECT_EQ(default_tile_rows(131072, 131072, 2048, 32), 32);
    EXPECT_EQ(default_tile_rows(1048576, 1048576, 2048, 32), 32);
    EXPECT_EQ(default_tile_rows(64, 64, 1, 16), 32);
    EXPECT_EQ(default_tile_rows(131072, 65536, 2048, 32), 53);     // two ranks
    EXPECT_EQ(default_tile_rows(131072, 16384, 2048, 32), 143);    // eight ranks
    EXPECT_EQ(default_tile_rows(1048576, 131072, 2048, 32), 233);  // eight ranks
    EXPECT_EQ(default_tile_rows(163840, 20480, 2048, 64), 154);    // eight ranks
    EXPECT_EQ(default_tile_rows(202752, 25344, 512, 16), 225);     // eight ranks
    EXPECT_EQ(default_tile_rows(4096, 64, 4096, 16), 170);         // top_k above the width counts as the width
}

TEST(DefaultTileRows, AreThirtyTwoWhereverOneRankHoldsTheWholeContext) {
    test::Random random;
    SCOPED_TRACE(random.trace());
    for (int i = 0; i < 10000; ++i) {
        const int64_t width = 64 * random.integer(1, 16777216);
        const int64_t length = random.integer(1, width);
        const int64_t heads = 16 << random.integer(0, 2);
        ASSERT_EQ(default_tile_rows(length, width, random.integer(1, 4096), heads), 32) << length << " of " << width;
    }
}

TEST(DefaultTileRows, GrowUnderContextParallelismAndStayWithinTheMemoryOfOneRank) {
    test::Random random;
    SCOPED_TRACE(random.trace());
    for (int i = 0; i < 10000; ++i) {
        const int64_t world = random.integer(1, 64);
        const int64_t width = 64 * random.integer(1, 100000);
        const int64_t length = random.integer(1, width * world);
        const int64_t top_k = random.integer(1, 4096);
        const int64_t heads = 16 << random.integer(0, 2);
        const int64_t tile = default_tile_rows(length, width, top_k, heads);
        const int64_t row_bytes = 4 * width + 24 * std::min(top_k, width) + 64 * heads + 256;
        ASSERT_GE(tile, 32);
        if (tile > 32) {
            ASSERT_LE(tile * row_bytes, 32 * 4 * length) << "more than 32 rows of the whole context take";
        }
        ASSERT_GT((tile + 1) * row_bytes, 32 * 4 * length) << "one row more would have fitted";
    }
    EXPECT_GT(default_tile_rows(1048576, 1048576 / 4, 2048, 32), 32);
}

TEST(DefaultTileRows, OfTheLongestContextDoNotOverflow) {
    constexpr int64_t longest = std::numeric_limits<int32_t>::max();
    EXPECT_EQ(default_tile_rows(longest, longest - 63, 4096, 16), 32);
    EXPECT_EQ(default_tile_rows(longest, 64, 1, 16), 128 * longest / (256 + 24 + 1024 + 256));
}

TEST(TileCount, RoundsUp) {
    EXPECT_EQ(tile_count(0, 32), 0);
    EXPECT_EQ(tile_count(1, 32), 1);
    EXPECT_EQ(tile_count(31, 32), 1);
    EXPECT_EQ(tile_count(32, 32), 1);
    EXPECT_EQ(tile_count(33, 32), 2);
    EXPECT_EQ(tile_count(64, 32), 2);
    EXPECT_EQ(tile_count(65, 1), 65);
    EXPECT_EQ(tile_count(5, 1024), 1);
    constexpr int most = std::numeric_limits<int>::max();
    EXPECT_EQ(tile_count(most, 2), most / 2 + 1);
    EXPECT_EQ(tile_count(most, most), 1);
}

TEST(TileShape, HoldsAsManyRowsAsFit) {
    test::Random random;
    SCOPED_TRACE(random.trace());
    for (int i = 0; i < 10000; ++i) {
        const auto rows = static_cast<int>(random.integer(1, 2048));
        const int64_t tile_rows = random.integer(1, rows);
        const int64_t width = 64 * random.integer(1, 1 << 14);
        const auto longest = static_cast<int32_t>(random.integer(0, width));
        const TileShape least{static_cast<int32_t>(tile_rows), static_cast<int32_t>(width)};
        const TileShape shape = tile_shape(rows, longest, least);
        ASSERT_GE(shape.stride, longest);
        ASSERT_LT(shape.stride, std::max(longest, 1) + 4);
        ASSERT_EQ(shape.stride % 4, 0);
        ASSERT_LE(int64_t{shape.rows} * shape.stride, tile_rows * width);
        ASSERT_GE(shape.rows, tile_rows);
        ASSERT_LE(shape.rows, most_tile_rows(rows, least.rows));
        ASSERT_TRUE(shape.rows == most_tile_rows(rows, least.rows) ||
                    int64_t{shape.rows + 1} * shape.stride > tile_rows * width);

        // The tiles that were captured hold every row once.
        int next = 0;
        for (int number = 0; number < tile_count(rows, static_cast<int>(tile_rows)); ++number) {
            const Tile tile{number, rows, least, &shape};
            const TileRows of_tile(tile, shape);
            ASSERT_EQ(of_tile.begin, next);
            ASSERT_LE(of_tile.count(), tile.most_rows());
            next = of_tile.end;
        }
        ASSERT_EQ(next, rows);
    }
}

}  // namespace
}  // namespace stepgraph
