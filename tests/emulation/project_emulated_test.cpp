// Projections without a GPU: the kernel's own code in the emulator, against exact products.
#include <algorithm>
#include <cmath>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <stepgraph/kernels/project_block.h>
#include <stepgraph/layouts/number_formats.h>

#include "fresh_seed.h"

namespace stepgraph::test {
namespace {

using Random = std::mt19937_64;

struct Shape {
    int columns;
    int depth;
};

/// One product: operands, and what came out between elements that nobody may write.
class ProductCase {
public:
    ProductCase(Shape shape, int rows, Random& random)
        : shape_(shape),
          rows_(rows),
          x_(draw(static_cast<size_t>(rows) * static_cast<size_t>(shape.depth), random)),
          w_(draw(static_cast<size_t>(shape.columns) * static_cast<size_t>(shape.depth), random)),
          out_(static_cast<size_t>(rows + 2) * static_cast<size_t>(shape.columns), sentinel()) {}

    [[nodiscard]] ProjectProduct product() {
        return {x_.data(), w_.data(), out_.data() + out_begin(), shape_.columns, shape_.depth};
    }

    [[nodiscard]] std::span<const std::byte> weights() const { return std::as_bytes(std::span(w_)); }

    void expect_right() const {
        for (size_t i = 0; i < out_.size(); ++i) {
            if (i < out_begin() || i >= out_.size() - out_begin()) {
                ASSERT_EQ(float_from_bf16(out_[i]), float_from_bf16(sentinel())) << "beside the rows";
            }
        }
        for (int row = 0; row < rows_; ++row) {
            std::vector<double> exact(static_cast<size_t>(shape_.columns));
            double largest = 0;
            for (int column = 0; column < shape_.columns; ++column) {
                exact[static_cast<size_t>(column)] = dot(row, column);
                largest = std::max(largest, std::abs(exact[static_cast<size_t>(column)]));
            }
            for (int column = 0; column < shape_.columns; ++column) {
                const double want = exact[static_cast<size_t>(column)];
                ASSERT_NEAR(at(row, column), want, std::abs(want) / 256 + 1e-3 * largest)
                    << "row " << row << ", column " << column;
            }
        }
    }

    [[nodiscard]] std::vector<float> row(int number) const {
        std::vector<float> values;
        for (int column = 0; column < shape_.columns; ++column) {
            values.push_back(static_cast<float>(at(number, column)));
        }
        return values;
    }

    /// Takes the first rows of another case of the same shape, and its weights.
    void take_operands(const ProductCase& other) {
        w_ = other.w_;
        std::copy_n(other.x_.begin(), std::min(x_.size(), other.x_.size()), x_.begin());
    }

private:
    static __nv_bfloat16 sentinel() { return bf16_from_float(-77); }
    static std::vector<__nv_bfloat16> draw(size_t count, Random& random) {
        std::normal_distribution<float> normal;
        std::vector<__nv_bfloat16> values(count);
        for (auto& value : values) {
            value = bf16_from_float(normal(random));
        }
        return values;
    }
    /// A row of sentinels in front, up to a multiple of 8 bytes, and one behind.
    [[nodiscard]] size_t out_begin() const { return static_cast<size_t>(shape_.columns); }
    [[nodiscard]] double at(int row, int column) const {
        return float_from_bf16(out_[out_begin() + static_cast<size_t>(row) * static_cast<size_t>(shape_.columns) +
                                    static_cast<size_t>(column)]);
    }
    [[nodiscard]] double dot(int row, int column) const {
        double sum = 0;
        for (int k = 0; k < shape_.depth; ++k) {
            sum += double{float_from_bf16(
                       x_[static_cast<size_t>(row) * static_cast<size_t>(shape_.depth) + static_cast<size_t>(k)])} *
                   double{float_from_bf16(
                       w_[static_cast<size_t>(column) * static_cast<size_t>(shape_.depth) + static_cast<size_t>(k)])};
        }
        return sum;
    }

    Shape shape_;
    int rows_;
    std::vector<__nv_bfloat16> x_, w_, out_;
};

sm90::TensorMap map_of(const __nv_bfloat16* matrix, int rows, int columns, int box_rows) {
    return {reinterpret_cast<const uint16_t*>(matrix), rows, columns, box_rows, projecting::box_columns};
}

template <int row_blocks>
void project(ProductCase& a, ProductCase& b, int rows, uint64_t seed) {
    projecting::ProjectLaunch launch{{{a.product(), b.product()}, rows}, {}};
    const ProjectArgs& args = launch.args;
    for (int i = 0; i < 2; ++i) {
        const ProjectProduct& product = args.products[i];
        launch.activations[i] = map_of(product.x, rows, product.depth, projecting::box_rows(rows));
    }
    const int group_rows = row_blocks * projecting::product_rows;
    const int blocks = (rows + group_rows - 1) / group_rows * projecting::blocks_of_rows(args);
    for (int cluster = 0; cluster < blocks / projecting::cluster_size; ++cluster) {
        ASSERT_NO_THROW(emulation::run({.kernel = [&] { projecting::project_block<row_blocks>(launch); },
                                        .blocks = projecting::cluster_size,
                                        .threads = projecting::threads,
                                        .cluster_number = static_cast<unsigned>(cluster),
                                        .shared_bytes = projecting::shared_bytes<row_blocks>(args),
                                        .readable = {a.weights(), b.weights()},
                                        .seed = seed + static_cast<uint64_t>(cluster)}));
    }
}

TEST(ProjectEmulated, IsWithinBf16RoundingOfTheExactProducts) {
    const uint64_t seed = fresh_seed();
    Random random(seed);
    for (const auto& [first, second] :
         {std::pair{Shape{144, 64}, Shape{16, 32}}, std::pair{Shape{173, 192}, Shape{33, 3104}},
          std::pair{Shape{20, 4480}, Shape{8, 3072}}}) {
        for (const int rows : {1, 7, 9, 64}) {
            SCOPED_TRACE("seed " + std::to_string(seed) + ": " + std::to_string(rows) + " rows of " +
                         std::to_string(first.columns) + " x " + std::to_string(first.depth) + " and " +
                         std::to_string(second.columns) + " x " + std::to_string(second.depth));
            ProductCase a(first, rows, random);
            ProductCase b(second, rows, random);
            project<1>(a, b, rows, seed);
            a.expect_right();
            b.expect_right();
            if (::testing::Test::HasFailure()) {
                return;
            }
        }
    }
}

// The blocks that share a tile have parts of the depth that differ by a box, in every way that eight of them and four allow;
// of a small depth some have none. Depths end in the middle of a box.
TEST(ProjectEmulated, SplitsDepthsOfEveryRemainder) {
    const uint64_t seed = fresh_seed();
    Random random(seed);
    for (int chunks = 97; chunks <= 112; ++chunks) {
        SCOPED_TRACE("seed " + std::to_string(seed) + ", depth " + std::to_string(chunks * 32));
        ProductCase a({12, chunks * 32}, 3, random);
        ProductCase b({9, (chunks - 96) * 32}, 3, random);
        project<1>(a, b, 3, seed);
        a.expect_right();
        b.expect_right();
        if (::testing::Test::HasFailure()) {
            return;
        }
    }
}

TEST(ProjectEmulated, GivesARowTheSameBitsInEveryForm) {
    const uint64_t seed = fresh_seed();
    Random random(seed);
    ProductCase alone_a({24, 3360}, 1, random);
    ProductCase alone_b({40, 160}, 1, random);
    project<1>(alone_a, alone_b, 1, seed);
    const auto check = [&](auto form, int rows) {
        SCOPED_TRACE("seed " + std::to_string(seed) + ", rows " + std::to_string(rows));
        ProductCase a({24, 3360}, rows, random);
        ProductCase b({40, 160}, rows, random);
        a.take_operands(alone_a);
        b.take_operands(alone_b);
        form(a, b, rows, seed);
        EXPECT_EQ(a.row(0), alone_a.row(0));
        EXPECT_EQ(b.row(0), alone_b.row(0));
        a.expect_right();
        b.expect_right();
    };
    check(project<1>, 13);
    check(project<1>, 64);
    check(project<2>, 70);
    check(project<2>, 130);  // a second group
}

}  // namespace
}  // namespace stepgraph::test
