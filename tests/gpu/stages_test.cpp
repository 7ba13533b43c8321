// Each stage alone against the reference, bit for bit.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include <stepgraph/kernels/index_inputs.h>
#include <stepgraph/kernels/project.h>
#include <stepgraph/kernels/reference/widen.h>
#include <stepgraph/kernels/schedule.h>
#include <stepgraph/layouts/query_row.h>
#include <stepgraph/layouts/tiles.h>

#include "device_step.h"

namespace stepgraph::test {
namespace {

constexpr CacheFormat all_formats[] = {CacheFormat::fp8, CacheFormat::fp8_mx, CacheFormat::mxfp4,
                                       CacheFormat::mxfp4_rowgroup};

class Stages : public GpuTest {};

template <typename Element>
std::vector<Element> read_back(const Element* device, size_t n) {
    std::vector<Element> host(n);
    check_cuda(cudaMemcpy(host.data(), device, n * sizeof(Element), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
}

TEST_F(Stages, IndexInputsWriteTheReferencesQueryWeightsAndKeys) {
    Random random = fresh_random();
    for (const CacheFormat format : all_formats) {
        for (const int heads : {16, 32, 64}) {
            SCOPED_TRACE(std::to_string(static_cast<int>(format)) + ", heads " + std::to_string(heads));
            StepCase step = make_case({.format = format,
                                       .heads = heads,
                                       .max_rows = 11,
                                       .max_requests = 7,
                                       .columns = 3,
                                       .extra_stride_bytes = 260,
                                       .projected_columns = heads + 128 + 13,
                                       .key_column = heads + 5,
                                       .weight_column = 3},
                                      random);
            DeviceStep device(step);
            device.run_eager(step.geometry.max_rows);
            const ExpectedStep expected = expected_step(step, step.geometry.max_rows, true);
            device.expect_equal(step, expected, step.geometry.max_rows);

            // Padding rows keep the poison that the workspace was filled with: compare the live ones.
            const int live = std::min(expected.layout.starts.back(), step.geometry.max_rows);
            const int rows = step.geometry.max_rows;
            const auto query =
                read_back(device.pipeline().state().query, static_cast<size_t>(query_bytes(format, heads, rows)));
            const auto weights = read_back(device.pipeline().state().head_weights, static_cast<size_t>(rows * heads));
            const auto& want = expected.layers[0];
            expect_same_bits(weights.data(), want.head_weights.data(), static_cast<size_t>(live * heads), "head weights");
            const bool rowgroup = format == CacheFormat::mxfp4_rowgroup;
            const size_t pitch = static_cast<size_t>(heads) * (rowgroup ? 64 : 128);
            for (size_t row = 0; row < static_cast<size_t>(live); ++row) {
                const size_t used = format == CacheFormat::mxfp4 ? static_cast<size_t>(heads) * 68 : pitch;
                expect_same_bits(query.data() + row * pitch, want.query.data() + row * pitch, used, "query");
                const size_t scales = static_cast<size_t>(rows) * pitch + row * rowgroup_scale_bytes;
                if (rowgroup) {
                    expect_same_bits(query.data() + scales, want.query.data() + scales, rowgroup_scale_bytes,
                                     "query scales");
                }
            }
        }
    }
}

/// Random bits: every exponent, infinities and NaN.
std::vector<__nv_bfloat16> wild_bf16(size_t n, Random& random) {
    std::vector<__nv_bfloat16> values(n);
    for (auto& value : values) {
        value = __ushort_as_bfloat16(static_cast<unsigned short>(random()));
    }
    return values;
}

TEST_F(Stages, IndexInputsOfAnyBitPatternsAreTheReferences) {
    Random random = fresh_random();
    for (const CacheFormat format : all_formats) {
        SCOPED_TRACE(static_cast<int>(format));
        StepCase step = make_case({.format = format, .heads = 32, .max_rows = 64, .max_requests = 64, .columns = 1}, random);
        step.set_lengths(1, 1);
        step.layers[0].iq = wild_bf16(step.layers[0].iq.size(), random);
        step.layers[0].projected = wild_bf16(step.layers[0].projected.size(), random);
        DeviceStep device(step);
        device.run_eager(step.geometry.max_rows);
        const ExpectedStep expected = expected_step(step, step.geometry.max_rows, true);
        const auto cache = device.layers()[0].cache.download<uint8_t>();
        expect_same_bits(cache.data(), step.layers[0].cache.data(), cache.size(), "cache");
        const auto& want = expected.layers[0];
        const auto query = read_back(device.pipeline().state().query, want.query.size());
        const auto weights = read_back(device.pipeline().state().head_weights, want.head_weights.size());
        for (size_t i = 0; i < weights.size(); ++i) {  // of a NaN only that it is one
            ASSERT_TRUE(bits_of(weights[i]) == bits_of(want.head_weights[i]) ||
                        (std::isnan(weights[i]) && std::isnan(want.head_weights[i])))
                << "head weight " << i << " is " << weights[i] << ", the reference's " << want.head_weights[i];
        }
        const size_t row_bytes = want.query.size() / 64;
        const size_t used = format == CacheFormat::mxfp4 ? 32 * 68 : row_bytes;
        for (size_t row = 0; row < (format == CacheFormat::mxfp4_rowgroup ? 1 : 64); ++row) {
            const bool whole = format == CacheFormat::mxfp4_rowgroup;
            expect_same_bits(query.data() + row * row_bytes, want.query.data() + row * row_bytes,
                             whole ? query.size() : used, "query");
        }
    }
}

TEST_F(Stages, IndexInputsWidenAnMxfp4QueryAsTheReferenceDoes) {
    Random random = fresh_random();
    prepare_index_inputs();
    for (const CacheFormat format : {CacheFormat::mxfp4, CacheFormat::mxfp4_rowgroup}) {
        for (const int heads : {16, 32, 64}) {
            SCOPED_TRACE(std::to_string(static_cast<int>(format)) + ", heads " + std::to_string(heads));
            constexpr int rows = 40;
            const auto all_heads = static_cast<size_t>(rows * heads);
            std::vector<__nv_bfloat16> iq = wild_bf16(all_heads * head_dim, random);
            std::normal_distribution<float> normal;
            for (size_t i = 0; i < iq.size(); ++i) {
                const size_t head = i / head_dim;
                if (head % 4 != 0) {  // usual ones; blocks of zeros; blocks far apart, about as far as can be widened
                    const int exponent = head % 4 == 3 ? -static_cast<int>(i / mxfp4_block % 4 * (2 + head / 4 % 4)) : 0;
                    const bool zero = head % 4 == 2 && (head / 4 >> i / mxfp4_block % 4 & 1U) != 0;
                    iq[i] = bf16_from_float(zero ? 0.0F : std::ldexp(normal(random), exponent));
                }
            }
            std::vector<__nv_bfloat16> projected(static_cast<size_t>(rows * (head_dim + heads)));
            std::generate(projected.begin(), projected.end(), [&] { return bf16_from_float(normal(random)); });
            const auto uploaded = [](const auto& values) {
                DeviceMemory memory(values.size() * sizeof values[0], 16, true);
                memory.upload(values);
                return memory;
            };
            const DeviceMemory device_starts = uploaded(std::vector<int32_t>{0, rows});
            const DeviceMemory device_iq = uploaded(iq);
            const DeviceMemory device_projected = uploaded(projected);
            const DeviceMemory norm = uploaded(std::vector<float>(head_dim, 1.0F));
            const DeviceMemory slots = uploaded(std::vector<int64_t>(rows, -1));
            const DeviceMemory status = uploaded(std::vector<StepStatus>(1));
            DeviceMemory cache(static_cast<size_t>(page_bytes(format)), 16, true);
            DeviceMemory query(static_cast<size_t>(query_bytes(format, heads, rows)), 16, true);
            DeviceMemory weights(all_heads * sizeof(float), 16, true);
            DeviceMemory widened_query(all_heads * head_dim, 16, true);
            DeviceMemory widened_weights(all_heads * sizeof(float), 16, true);
            widened_query.fill(poison_byte);
            widened_weights.fill(poison_byte);
            index_inputs({.format = format,
                          .heads = heads,
                          .rows = rows,
                          .max_rows = rows,
                          .max_requests = 1,
                          .starts = device_starts.as<int32_t>(),
                          .iq = device_iq.as<__nv_bfloat16>(),
                          .projected = device_projected.as<__nv_bfloat16>(),
                          .projected_columns = head_dim + heads,
                          .key_column = 0,
                          .weight_column = head_dim,
                          .k_norm_weight = norm.as<float>(),
                          .k_norm_bias = norm.as<float>(),
                          .k_norm_eps = 1e-6F,
                          .slots = slots.as<int64_t>(),
                          .cache = cache.as<uint8_t>(),
                          .pages = 1,
                          .page_stride_bytes = page_bytes(format),
                          .query = query.as<uint8_t>(),
                          .head_weights = weights.as<float>(),
                          .widened_query = widened_query.as<uint8_t>(),
                          .widened_weights = widened_weights.as<float>(),
                          .status = status.as<StepStatus>()},
                         {cudaStreamPerThread, true});
            check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "index inputs");
            std::vector<uint8_t> want_query(all_heads * head_dim);
            std::vector<float> want_weights(all_heads);
            reference::widen_query(format, heads, rows, rows, query.download<uint8_t>().data(),
                                   weights.download<float>().data(), want_query.data(), want_weights.data());
            expect_same_bits(widened_query.download<uint8_t>().data(), want_query.data(), want_query.size(),
                             "widened query");
            const auto lost = std::count_if(want_weights.begin(), want_weights.end(), [](float w) { return std::isnan(w); });
            EXPECT_GT(lost, 0);
            EXPECT_LT(lost, static_cast<int64_t>(all_heads) / 2);
            const auto actual = widened_weights.download<float>();
            for (size_t i = 0; i < all_heads; ++i) {
                ASSERT_TRUE(bits_of(actual[i]) == bits_of(want_weights[i]) ||
                            (std::isnan(actual[i]) && std::isnan(want_weights[i])))
                    << "weight of head " << i << " is " << actual[i] << ", must be " << want_weights[i];
            }
        }
    }
}

TEST_F(Stages, ScheduleCountsTheLastRowOfEachRequestInItsTile) {
    Random random = fresh_random();
    for (const int rows : {1, 7, 32, 33, 700}) {
        for (const int tile_rows : {1, 5, 32, 600}) {
            SCOPED_TRACE(std::to_string(rows) + " rows in tiles of " + std::to_string(tile_rows));
            const int bound = 100;
            std::vector<int32_t> requests;
            std::vector<int32_t> ends;
            for (int q = 0; static_cast<int>(requests.size()) < rows; ++q) {
                const auto first = static_cast<int32_t>(random() % 3000);
                for (uint64_t i = random() % 5; i > 0 && static_cast<int>(requests.size()) < rows; --i) {
                    requests.push_back(q);
                    ends.push_back(requests.back() < 0 ? 0 : first + static_cast<int32_t>(5 - i));
                }
            }
            std::vector<int32_t> starts(static_cast<size_t>(requests.back()) + 2, rows);
            for (int row = rows - 1; row >= 0; --row) {
                if (requests[static_cast<size_t>(row)] >= 0) {
                    starts[static_cast<size_t>(requests[static_cast<size_t>(row)])] = row;
                }
            }
            std::vector<int32_t> expected(requests.size());
            for (int row = 0, sum = 0; row < rows; ++row) {
                const auto r = static_cast<size_t>(row);
                sum = row % tile_rows == 0 ? 0 : sum;
                const bool last = row + 1 == rows || (row + 1) % tile_rows == 0 || requests[r + 1] != requests[r];
                if (last && requests[r] >= 0 && ends[r] > bound) {
                    sum += (ends[r] + 63) / 64;
                }
                expected[r] = sum;
            }
            DeviceMemory device_requests(requests.size() * 4, 4, true);
            DeviceMemory device_ends(ends.size() * 4, 4, true);
            DeviceMemory device_starts(starts.size() * 4, 4, true);
            device_starts.upload(starts);
            DeviceMemory prefix(ends.size() * 4, 4, true);
            device_requests.upload(requests);
            device_ends.upload(ends);
            schedule({.starts = device_starts.as<int32_t>(),
                      .row_request = device_requests.as<int32_t>(),
                      .ends = device_ends.as<int32_t>(),
                      .rows = rows,
                      .least = {tile_rows, 64 * 64},
                      .unscored_bound = bound,
                      .shape = nullptr,
                      .page_prefix = prefix.as<int32_t>()},
                     {cudaStreamPerThread, true});
            EXPECT_EQ(prefix.download<int32_t>(), expected);
        }
    }
}

TEST_F(Stages, ProductsAreWithinBf16RoundingOfTheExactOnes) {
    // One BF16 step is 2^-8 of a value; FP32 sums of a few thousand terms lie within 1e-3 of the row's largest.
    Random random = fresh_random();
    std::normal_distribution<float> normal;
    for (const auto& [columns, depth, max_rows] :
         {std::tuple{160, 512, 33}, std::tuple{4096, 256, 5}, std::tuple{173, 64, 128}, std::tuple{160, 7168, 300}}) {
        const Product product({columns, depth}, max_rows);
        std::vector<__nv_bfloat16> x(static_cast<size_t>(max_rows * depth));
        std::vector<__nv_bfloat16> w(static_cast<size_t>(columns * depth));
        for (auto* values : {&x, &w}) {
            for (auto& value : *values) {
                value = bf16_from_float(normal(random));
            }
        }
        DeviceMemory device_x(x.size() * 2, 16, true);
        DeviceMemory device_w(w.size() * 2, 16, true);
        DeviceMemory out(static_cast<size_t>(max_rows * columns) * 2, 16, true);
        DeviceMemory workspace(product_workspace_bytes, 256, false);
        std::vector<__nv_bfloat16> first_row;
        device_x.upload(x);
        device_w.upload(w);
        for (const int rows : {1, 2, 3, 5, 31, 33, 128, 300}) {
            if (rows > max_rows) {
                continue;
            }
            SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(columns) + " x " + std::to_string(depth));
            out.fill(poison_byte);
            product.enqueue(device_x.as<__nv_bfloat16>(), device_w.as<__nv_bfloat16>(), out.as<__nv_bfloat16>(), rows,
                            workspace.as<void>(), cudaStreamPerThread);
            const auto actual = out.download<__nv_bfloat16>();
            if (first_row.empty()) {
                first_row.assign(actual.begin(), actual.begin() + columns);
            }
            expect_same_bits(actual.data(), first_row.data(), first_row.size(), "the first row, alone and among others");
            for (int row = 0; row<rows; row += depth> 1000 ? 37 : 1) {
                std::vector<double> exact(static_cast<size_t>(columns));
                double largest = 0;
                for (int n = 0; n < columns; ++n) {
                    double sum = 0;
                    for (int k = 0; k < depth; ++k) {
                        sum += double{float_from_bf16(x[static_cast<size_t>(row * depth + k)])} *
                               double{float_from_bf16(w[static_cast<size_t>(n * depth + k)])};
                    }
                    exact[static_cast<size_t>(n)] = sum;
                    largest = std::max(largest, std::abs(sum));
                }
                for (int n = 0; n < columns; ++n) {
                    const double want = exact[static_cast<size_t>(n)];
                    const double got = float_from_bf16(actual[static_cast<size_t>(row * columns + n)]);
                    ASSERT_NEAR(got, want, std::abs(want) / 256 + 1e-3 * largest) << "row " << row << ", column " << n;
                }
            }
        }
    }
}

}  // namespace
}  // namespace stepgraph::test
