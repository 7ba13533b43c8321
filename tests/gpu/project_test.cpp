// Both products in Hopper's kernel, against exact ones, and a row alone against itself among others.
#include <cmath>
#include <random>

#include <stepgraph/kernels/project_sm90.h>
#include <stepgraph/layouts/number_formats.h>

#include "device_step.h"

namespace stepgraph::test {
namespace {

constexpr int most_rows = 300;

struct Shape {
    int columns;
    int depth;
};

std::vector<__nv_bfloat16> normal_bf16(size_t count, Random& random) {
    std::normal_distribution<float> normal;
    std::vector<__nv_bfloat16> values(count);
    for (auto& value : values) {
        value = bf16_from_float(normal(random));
    }
    return values;
}

/// A product of up to most_rows rows: operands on host and device.
class ProductCase {
public:
    ProductCase(Shape shape, Random& random)
        : shape_(shape),
          x_(normal_bf16(static_cast<size_t>(most_rows) * static_cast<size_t>(shape.depth), random)),
          w_(normal_bf16(static_cast<size_t>(shape.columns) * static_cast<size_t>(shape.depth), random)),
          device_x_(x_.size() * 2, 16, true),
          device_w_(w_.size() * 2, 16, true),
          out_(static_cast<size_t>(most_rows) * static_cast<size_t>(shape.columns) * 2, 16, true) {
        device_x_.upload(x_);
        device_w_.upload(w_);
    }

    [[nodiscard]] ProjectProduct product() const {
        return {device_x_.as<__nv_bfloat16>(), device_w_.as<__nv_bfloat16>(), out_.as<__nv_bfloat16>(), shape_.columns,
                shape_.depth};
    }
    void poison() { out_.fill(poison_byte); }
    [[nodiscard]] std::vector<__nv_bfloat16> out() const { return out_.download<__nv_bfloat16>(); }

    /// Some of the first `rows` rows, within BF16 rounding plus 1e-3 of the row's largest; the rows behind them still
    /// poisoned.
    void expect_right(int rows) const {
        const auto actual = out();
        const auto columns = static_cast<size_t>(shape_.columns);
        for (int row = 0; row < rows; row += std::max(1, rows / 3)) {
            std::vector<double> exact(columns);
            double largest = 0;
            for (size_t n = 0; n < columns; ++n) {
                exact[n] = dot(static_cast<size_t>(row), n);
                largest = std::max(largest, std::abs(exact[n]));
            }
            for (size_t n = 0; n < columns; ++n) {
                const double got = float_from_bf16(actual[static_cast<size_t>(row) * columns + n]);
                ASSERT_NEAR(got, exact[n], std::abs(exact[n]) / 256 + 1e-3 * largest) << "row " << row << ", column " << n;
            }
        }
        const auto* bytes = reinterpret_cast<const uint8_t*>(actual.data());
        for (size_t i = static_cast<size_t>(rows) * columns * 2; i < actual.size() * 2; ++i) {
            ASSERT_EQ(bytes[i], poison_byte) << "byte " << i << " behind the last row";
        }
    }

private:
    [[nodiscard]] double dot(size_t row, size_t column) const {
        const auto depth = static_cast<size_t>(shape_.depth);
        double sum = 0;
        for (size_t k = 0; k < depth; ++k) {
            sum += double{float_from_bf16(x_[row * depth + k])} * double{float_from_bf16(w_[column * depth + k])};
        }
        return sum;
    }

    Shape shape_;
    std::vector<__nv_bfloat16> x_, w_;
    DeviceMemory device_x_, device_w_, out_;
};

class Project : public GpuTest {
protected:
    void SetUp() override {
        GpuTest::SetUp();
        if (!IsSkipped() && !can_project_sm90(64, 64)) {
            GTEST_SKIP() << "needs an NVIDIA GPU of the Hopper generation with code of its own for sm_90";
        }
    }
};

void project_and_compare(ProductCase& a, ProductCase& b, int rows) {
    a.poison();
    b.poison();
    const ProjectArgs args{{a.product(), b.product()}, rows};
    prepare_project_sm90(args);
    project_sm90(args, {cudaStreamPerThread, true});
    a.expect_right(rows);
    b.expect_right(rows);
}

TEST_F(Project, IsWithinBf16RoundingOfTheExactProducts) {
    Random random = fresh_random();
    // Of K3, of GLM-5, small ones, columns that are no multiple of anything, and a depth that must be split for both.
    for (const auto& [first, second] :
         {std::pair{Shape{160, 7168}, Shape{4096, 1536}}, std::pair{Shape{160, 6144}, Shape{512, 2048}},
          std::pair{Shape{144, 64}, Shape{16, 32}}, std::pair{Shape{173, 192}, Shape{129, 4160}},
          std::pair{Shape{333, 4128}, Shape{40, 3072}}, std::pair{Shape{160, 4480}, Shape{64, 24576}}}) {
        ProductCase a(first, random);
        ProductCase b(second, random);
        std::vector<__nv_bfloat16> first_row_a;
        std::vector<__nv_bfloat16> first_row_b;
        for (const int rows : {1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65, 127, 128, 200, 256, 300}) {
            SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(first.columns) + " x " +
                         std::to_string(first.depth) + " and " + std::to_string(second.columns) + " x " +
                         std::to_string(second.depth));
            project_and_compare(a, b, rows);
            const auto out_a = a.out();
            const auto out_b = b.out();
            if (first_row_a.empty()) {
                first_row_a.assign(out_a.begin(), out_a.begin() + first.columns);
                first_row_b.assign(out_b.begin(), out_b.begin() + second.columns);
            }
            expect_same_bits(out_a.data(), first_row_a.data(), first_row_a.size(), "the first row, alone and among others");
            expect_same_bits(out_b.data(), first_row_b.data(), first_row_b.size(), "the first row, alone and among others");
            if (HasFailure()) {
                return;
            }
        }
    }
}

// The blocks that share a tile have parts of the depth that differ by a box, in every way that eight of them allow; every
// other depth ends in the middle of a box.
TEST_F(Project, SplitsDepthsOfEveryRemainder) {
    Random random = fresh_random();
    for (int chunks = 97; chunks <= 112; ++chunks) {
        SCOPED_TRACE("depth " + std::to_string(chunks * 32));
        ProductCase a({24, chunks * 32}, random);
        ProductCase b({40, (chunks + 16) * 32}, random);
        for (const int rows : {1, 16, 32, 64, 65}) {
            project_and_compare(a, b, rows);
        }
    }
}

TEST_F(Project, GivesARowTheSameBitsInEveryPlace) {
    Random random = fresh_random();
    ProductCase a({160, 7168}, random);
    ProductCase b({4096, 1536}, random);
    const ProjectArgs all{{a.product(), b.product()}, 256};
    a.poison();
    b.poison();
    prepare_project_sm90(all);
    project_sm90(all, {cudaStreamPerThread, true});
    const auto want_a = a.out();
    const auto want_b = b.out();
    for (const int row : {1, 7, 8, 63, 64, 130, 255}) {
        SCOPED_TRACE("row " + std::to_string(row));
        ProjectArgs alone = all;
        alone.rows = 1;
        alone.products[0].x += row * 7168;
        alone.products[1].x += row * 1536;
        a.poison();
        b.poison();
        project_sm90(alone, {cudaStreamPerThread, true});
        expect_same_bits(a.out().data(), want_a.data() + row * 160, 160, "key and weights");
        expect_same_bits(b.out().data(), want_b.data() + row * 4096, 4096, "query");
    }
}

TEST_F(Project, TakesDepthsThatFit) {
    EXPECT_TRUE(can_project_sm90(7168, 1536));
    EXPECT_TRUE(can_project_sm90(most_project_sm90_depth, 32));
    EXPECT_FALSE(can_project_sm90(7168, 40));
    EXPECT_FALSE(can_project_sm90(most_project_sm90_depth + 32, 1536));
}

}  // namespace
}  // namespace stepgraph::test
