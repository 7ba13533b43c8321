// Index inputs on the host, byte for byte against the definitions in double and against arrays laid out by hand.
#include <stepgraph/kernels/reference/index_inputs.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include <stepgraph/layouts/query_row.h>

#include "number_oracle.h"
#include "page_oracle.h"
#include "random.h"

namespace stepgraph {
namespace {

constexpr uint8_t sentinel = 0xA5;
constexpr int all_heads[] = {16, 32, 64};

struct Inputs {
    CacheFormat format = CacheFormat::fp8;
    int heads = 16;
    int rows = 1;
    int max_rows = 1;
    int projected_columns = 0;
    int key_column = 0;
    int weight_column = 0;
    float eps = 1e-5F;
    int64_t pages = 1;
    int64_t page_stride = 0;
    std::vector<__nv_bfloat16> iq;
    std::vector<__nv_bfloat16> projected;
    std::vector<float> norm_weight;
    std::vector<float> norm_bias;
    std::vector<int64_t> slots;

    [[nodiscard]] __nv_bfloat16* query_of(int row, int head) { return &iq[static_cast<size_t>((row * heads + head) * 128)]; }
    [[nodiscard]] __nv_bfloat16* key_of(int row) {
        return &projected[static_cast<size_t>(row * projected_columns + key_column)];
    }
    [[nodiscard]] __nv_bfloat16* weights_of(int row) {
        return &projected[static_cast<size_t>(row * projected_columns + weight_column)];
    }
};

struct Outputs {
    std::vector<uint8_t> query;
    std::vector<float> head_weights;
    std::vector<uint8_t> cache;
    StepStatus status;
};

/// Rows in random order of slots over all pages, weights of the norm that BF16 cannot hold, columns with gaps between them.
Inputs random_inputs(test::Random& random, CacheFormat format, int heads, int rows, int64_t pages) {
    Inputs in;
    in.format = format;
    in.heads = heads;
    in.rows = rows;
    in.max_rows = rows + 2;
    in.projected_columns = heads + 128 + 9;
    const bool key_first = random.one_in(2);
    in.key_column = key_first ? 3 : heads + 5;
    in.weight_column = key_first ? 133 : 2;
    in.pages = pages;
    in.page_stride = test::own_bytes(format) + 4 * random.integer(0, 40);
    for (int i = 0; i < in.max_rows * heads * 128; ++i) {
        in.iq.push_back(random.normal_bf16(std::ldexp(1.0F, random.integer32(-6, 6))));
    }
    for (int i = 0; i < in.max_rows * in.projected_columns; ++i) {
        in.projected.push_back(random.normal_bf16(3.0F));
    }
    for (int c = 0; c < 128; ++c) {
        in.norm_weight.push_back(1.0F + random.normal(0.3F));
        in.norm_bias.push_back(random.normal(0.2F));
    }
    in.slots.resize(static_cast<size_t>(pages * 64));
    std::iota(in.slots.begin(), in.slots.end(), 0);
    std::shuffle(in.slots.begin(), in.slots.end(), random.engine());
    in.slots.resize(static_cast<size_t>(in.max_rows), -1);
    return in;
}

Outputs untouched(const Inputs& in) {
    const auto head_weights = static_cast<size_t>(in.max_rows * in.heads);
    return {.query = std::vector<uint8_t>(static_cast<size_t>(query_bytes(in.format, in.heads, in.max_rows)), sentinel),
            .head_weights = std::vector<float>(head_weights, -123.0F),
            .cache = std::vector<uint8_t>(static_cast<size_t>(in.pages * in.page_stride), sentinel),
            .status = {}};
}

Outputs computed(const Inputs& in) {
    Outputs out = untouched(in);
    reference::index_inputs({.format = in.format,
                             .heads = in.heads,
                             .rows = in.rows,
                             .max_rows = in.max_rows,
                             .iq = in.iq.data(),
                             .projected = in.projected.data(),
                             .projected_columns = in.projected_columns,
                             .key_column = in.key_column,
                             .weight_column = in.weight_column,
                             .k_norm_weight = in.norm_weight.data(),
                             .k_norm_bias = in.norm_bias.data(),
                             .k_norm_eps = in.eps,
                             .slots = in.slots.data(),
                             .cache = out.cache.data(),
                             .pages = in.pages,
                             .page_stride_bytes = in.page_stride,
                             .query = out.query.data(),
                             .head_weights = out.head_weights.data(),
                             .status = &out.status});
    return out;
}

// ---- the oracle

/// 128 values quantised: one code a column and one scale a block, the scale of an FP8 block as its exponent.
struct Quantised {
    int codes[128];
    int scales[4];
};

Quantised quantised(CacheFormat format, const double* x) {
    Quantised q{};
    for (int block = 0; block < 4; ++block) {
        const double* columns = x + block * 32;
        if (test::four_bit(format)) {
            q.scales[block] = test::mxfp4_byte(test::largest_magnitude(columns, 32));
        } else {
            q.scales[block] = test::fp8_exponent(test::largest_magnitude(x, 128));
        }
        for (int c = 0; c < 32; ++c) {
            q.codes[block * 32 + c] = test::four_bit(format) ? test::e2m1_code(std::ldexp(columns[c], 127 - q.scales[block]))
                                                             : test::e4m3_code(std::ldexp(columns[c], -q.scales[block]));
        }
    }
    return q;
}

/// Puts the code of a column where it belongs; the even column of a four-bit pair comes first.
void put_code(CacheFormat format, uint8_t* byte, int column, int code) {
    if (test::four_bit(format)) {
        *byte = static_cast<uint8_t>(column % 2 == 0 ? code : *byte % 16 + code * 16);
    } else {
        *byte = static_cast<uint8_t>(code);
    }
}

/// The mean of 128 values in FP32 and the order of the contract: 16 lanes of 8, then a butterfly in which every lane takes
/// part.
float mean_in_order(const std::vector<float>& x) {
    std::vector<float> lanes;
    for (size_t lane = 0; lane < 16; ++lane) {
        const auto first = x.begin() + static_cast<int64_t>(lane * 8);
        lanes.push_back(std::accumulate(first, first + 8, 0.0F));
    }
    for (const size_t distance : {8U, 4U, 2U, 1U}) {
        std::vector<float> next;
        for (size_t lane = 0; lane < 16; ++lane) {
            next.push_back(lanes[lane] + lanes[lane ^ distance]);
        }
        lanes = next;
    }
    return lanes[0] / 128.0F;
}

/// The key after LayerNorm in FP32 and the order of the contract, rounded to BF16.
std::vector<double> key_in_order(const __nv_bfloat16* key, const std::vector<float>& weight, const std::vector<float>& bias,
                                 float eps) {
    std::vector<float> x;
    for (int c = 0; c < 128; ++c) {
        x.push_back(static_cast<float>(test::bf16_value(key[c])));
    }
    const float mean = mean_in_order(x);
    std::vector<float> squares;
    for (float& value : x) {
        value -= mean;
        squares.push_back(value * value);
    }
    const float rstd = 1.0F / std::sqrt(mean_in_order(squares) + eps);
    std::vector<double> out;
    for (size_t c = 0; c < 128; ++c) {
        const float scaled = x[c] * rstd;
        const float weighted = scaled * weight[c];
        out.push_back(test::rounded_to_bf16(static_cast<double>(weighted + bias[c])));
    }
    return out;
}

void put_query(Inputs& in, int row, Outputs* out) {
    for (int head = 0; head < in.heads; ++head) {
        double x[128];
        for (int c = 0; c < 128; ++c) {
            x[c] = test::bf16_value(in.query_of(row, head)[c]);
        }
        const Quantised q = quantised(in.format, x);
        for (int c = 0; c < 128; ++c) {
            put_code(in.format, &out->query[static_cast<size_t>(test::query_payload_at(in.format, in.heads, row, head, c))],
                     c, q.codes[c]);
        }
        for (int block = 0; block < 4 && test::four_bit(in.format); ++block) {
            out->query[static_cast<size_t>(test::query_scale_at(in.format, in.heads, in.max_rows, row, head, block))] =
                static_cast<uint8_t>(q.scales[block]);
        }
        // Two products of few bits each: double holds them exactly, the casts are the roundings of the contract.
        const auto factor = static_cast<float>(1.0L / std::sqrt(static_cast<long double>(in.heads * 128)));
        const double wv = test::bf16_value(in.weights_of(row)[head]);
        const double scaled =
            test::four_bit(in.format) ? wv : static_cast<double>(static_cast<float>(std::ldexp(wv, q.scales[0])));
        const auto weight = static_cast<float>(scaled * static_cast<double>(factor));
        out->head_weights[static_cast<size_t>(row * in.heads + head)] =
            in.format == CacheFormat::fp8 ? weight : static_cast<float>(test::rounded_to_bf16(weight));
    }
    if (in.format == CacheFormat::mxfp4_rowgroup) {
        for (int head = in.heads; head < 64; ++head) {
            for (int block = 0; block < 4; ++block) {
                out->query[static_cast<size_t>(test::query_scale_at(in.format, in.heads, in.max_rows, row, head, block))] =
                    0;
            }
        }
    }
}

void put_key(Inputs& in, int row, Outputs* out) {
    const int64_t slot = in.slots[static_cast<size_t>(row)];
    if (slot < 0) {
        return;
    }
    if (slot / 64 >= in.pages) {
        out->status.invalid_slots++;
        return;
    }
    const Quantised q = quantised(in.format, key_in_order(in.key_of(row), in.norm_weight, in.norm_bias, in.eps).data());
    uint8_t* page = &out->cache[static_cast<size_t>(slot / 64 * in.page_stride)];
    const int token = static_cast<int>(slot % 64);
    for (int c = 0; c < 128; ++c) {
        put_code(in.format, test::payload_byte(in.format, page, token, c), c, q.codes[c]);
    }
    const float fp32_scale = std::ldexp(1.0F, q.scales[0]);
    for (int block = 0; block < 4; ++block) {
        const int byte = in.format == CacheFormat::fp8_mx ? q.scales[0] + 127 : q.scales[block];
        *test::scale_byte(in.format, page, token, block) = static_cast<uint8_t>(byte);
    }
    if (in.format == CacheFormat::fp8) {
        std::memcpy(test::scale_byte(in.format, page, token, 0), &fp32_scale, 4);
    }
}

Outputs by_definition(Inputs in) {
    Outputs out = untouched(in);
    for (int row = 0; row < in.rows; ++row) {
        put_query(in, row, &out);
        put_key(in, row, &out);
    }
    return out;
}

/// Any NaN equals any NaN: its bits are no part of the contract.
bool same(float a, float b) {
    return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b));
}

template <typename Element, typename Equal>
void expect_same(const std::vector<Element>& got, const std::vector<Element>& want, const char* name, Equal equal) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_TRUE(equal(got[i], want[i])) << name << " differs at " << i << ": " << +got[i] << ", must be " << +want[i];
    }
}

void expect_by_definition(const Inputs& in) {
    const Outputs got = computed(in);
    const Outputs want = by_definition(in);
    expect_same(got.query, want.query, "query", std::equal_to<>());
    expect_same(got.head_weights, want.head_weights, "head_weights", same);
    expect_same(got.cache, want.cache, "cache", std::equal_to<>());
    EXPECT_EQ(got.status, want.status);
}

// ---- tests

class IndexInputs : public ::testing::TestWithParam<std::tuple<CacheFormat, int>> {
protected:
    [[nodiscard]] static CacheFormat format() { return std::get<0>(GetParam()); }
    [[nodiscard]] static int heads() { return std::get<1>(GetParam()); }

    test::Random random_;
    ::testing::ScopedTrace trace_{__FILE__, __LINE__, random_.trace()};
};

std::string name_of(const ::testing::TestParamInfo<IndexInputs::ParamType>& info) {
    return ::testing::PrintToString(std::get<0>(info.param)) + "_" + std::to_string(std::get<1>(info.param)) + "_heads";
}

TEST_P(IndexInputs, GiveEveryByteOfTheDefinitionAndTouchNothingElse) {
    for (const int rows : {1, 2, 7}) {
        expect_by_definition(random_inputs(random_, format(), heads(), rows, 2));
    }
}

TEST_P(IndexInputs, FillEveryOffsetOfEveryPageInAnyOrderWithItsOwnKeyAndScale) {
    Inputs in = random_inputs(random_, format(), heads(), 3 * 64, 3);
    for (int row = 0; row < in.rows; ++row) {  // keys whose scales differ: the norm's bias alone would make them alike
        in.key_of(row)[row % 128] = __float2bfloat16_rn(std::ldexp(100.0F, row % 11));
    }
    for (int c = 0; c < 128; ++c) {
        in.norm_weight[static_cast<size_t>(c)] = std::ldexp(random_.uniform(1.0F, 2.0F), random_.integer32(-8, 8));
    }
    expect_by_definition(in);
}

TEST_P(IndexInputs, LeaveTheNeighboursOfAMergedPageAlone) {
    Inputs in = random_inputs(random_, format(), heads(), 64, 4);
    in.page_stride = test::own_bytes(format()) + 4100;
    const Outputs strided = computed(in);
    for (int64_t page = 0; page < in.pages; ++page) {
        for (int64_t byte = test::own_bytes(format()); byte < in.page_stride; ++byte) {
            ASSERT_EQ(strided.cache[static_cast<size_t>(page * in.page_stride + byte)], sentinel) << page << " " << byte;
        }
    }
    const int64_t stride = in.page_stride;
    in.page_stride = test::own_bytes(format());
    const Outputs dense = computed(in);
    for (int64_t page = 0; page < in.pages; ++page) {
        const auto first = dense.cache.begin() + page * in.page_stride;
        ASSERT_TRUE(std::equal(first, first + in.page_stride, strided.cache.begin() + page * stride)) << "page " << page;
    }
}

TEST_P(IndexInputs, SkipAndCountSlotsOutsideTheCache) {
    Inputs in = random_inputs(random_, format(), heads(), 10, 2);
    constexpr int64_t longest = std::numeric_limits<int64_t>::max();
    const std::vector<int64_t> slots{-1,      -64, -longest - 1, 127, 128, 128 + 63, int64_t{1} << 31U, int64_t{1} << 40U,
                                     longest, 0};
    std::copy(slots.begin(), slots.end(), in.slots.begin());
    EXPECT_EQ(computed(in).status, (StepStatus{.invalid_slots = 5})) << "negative slots are padding and not counted";
    expect_by_definition(in);  // the rows still get their queries and weights
}

TEST_P(IndexInputs, LeavePaddingRowsAlone) {
    Inputs in = random_inputs(random_, format(), heads(), 3, 2);
    in.slots.assign(in.slots.size(), 5);  // stale slots stand behind the padding too
    in.slots[0] = 1;
    in.slots[1] = 2;
    in.rows = 2;
    const Outputs got = computed(in);
    expect_by_definition(in);
    const Outputs before = untouched(in);
    for (int row = 2; row < in.max_rows; ++row) {
        for (int head = 0; head < heads(); ++head) {
            ASSERT_EQ(got.head_weights[static_cast<size_t>(row * heads() + head)], before.head_weights[0]);
        }
    }
    in.rows = 0;
    const Outputs nothing = computed(in);
    EXPECT_EQ(nothing.query, before.query);
    EXPECT_EQ(nothing.cache, before.cache);
    EXPECT_EQ(nothing.status, StepStatus{});
}

TEST_P(IndexInputs, TakeNanAndInfinityAsTheContractSays) {
    const float inf = std::numeric_limits<float>::infinity();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    Inputs in = random_inputs(random_, format(), heads(), 8, 1);
    in.query_of(0, 0)[5] = __float2bfloat16_rn(nan);
    in.query_of(0, 1)[40] = __float2bfloat16_rn(inf);
    in.query_of(0, 2)[127] = __float2bfloat16_rn(-inf);
    std::fill_n(in.query_of(1, 0), 128, __float2bfloat16_rn(nan));
    std::fill_n(in.query_of(1, 1), 128, __float2bfloat16_rn(0.0F));
    std::fill_n(in.query_of(1, 2), 128, __float2bfloat16_rn(-inf));
    in.weights_of(1)[3] = __float2bfloat16_rn(nan);
    in.weights_of(1)[4] = __float2bfloat16_rn(-inf);
    in.key_of(2)[77] = __float2bfloat16_rn(nan);
    in.key_of(3)[0] = __float2bfloat16_rn(inf);
    std::fill_n(in.key_of(4), 128, __float2bfloat16_rn(nan));
    std::fill_n(in.key_of(5), 128, __float2bfloat16_rn(4.0F));  // no variance at all
    in.norm_bias[9] = inf;
    in.norm_weight[10] = nan;
    expect_by_definition(in);
}

TEST_P(IndexInputs, QuantiseEveryLargestMaximumAndItsNeighbours) {
    // One head a maximum: 448 * 2^k and 6 * 2^k, one BF16 step below and above, both signs.
    Inputs in = random_inputs(random_, format(), heads(), 48, 1);
    int exponent = -126;
    for (int row = 0; row < in.rows; ++row) {
        for (int head = 0; head + 3 <= heads(); head += 3) {
            const float largest = test::four_bit(format()) ? std::ldexp(1.5F, exponent) : std::ldexp(1.75F, exponent);
            const uint32_t bits = bits_of(largest) >> 16U;
            for (int step = -1; step <= 1; ++step) {
                for (int c = 0; c < 128; ++c) {
                    in.query_of(row, head + step + 1)[c] = __float2bfloat16_rn(largest * random_.uniform(-0.9F, 0.9F));
                }
                const float maximum = float_of((bits + static_cast<uint32_t>(step)) << 16U);
                in.query_of(row, head + step + 1)[random_.integer(0, 127)] =
                    __float2bfloat16_rn(random_.one_in(2) ? maximum : -maximum);
            }
            exponent = exponent == 127 ? -126 : exponent + 1;
        }
    }
    expect_by_definition(in);
}

INSTANTIATE_TEST_SUITE_P(FormatsAndHeads, IndexInputs,
                         ::testing::Combine(::testing::ValuesIn(test::all_formats), ::testing::ValuesIn(all_heads)),
                         name_of);

class KeyNorm : public ::testing::Test {
protected:
    test::Random random_;
    ::testing::ScopedTrace trace_{__FILE__, __LINE__, random_.trace()};
};

TEST_F(KeyNorm, IsLayerNormToOneStepOfBf16) {
    // Rounding to the 8 bits of BF16 costs up to 2^-8 of the value. FP32 sums of 128 terms add less than 2^-16 of the
    // largest magnitude, which is what is left of a value that the bias cancels.
    for (int trial = 0; trial < 200; ++trial) {
        Inputs in = random_inputs(random_, CacheFormat::fp8, 16, 1, 1);
        const float shift = random_.normal(2.0F);
        double x[128];
        for (int c = 0; c < 128; ++c) {
            in.key_of(0)[c] = __float2bfloat16_rn(random_.normal(2.0F) + shift);
            x[c] = test::bf16_value(in.key_of(0)[c]);
        }
        const double mean = std::accumulate(x, x + 128, 0.0) / 128;
        double variance = 0;
        for (const double value : x) {
            variance += (value - mean) * (value - mean) / 128;
        }
        float got[128];
        reference::normalised_key(in.key_of(0), in.norm_weight.data(), in.norm_bias.data(), in.eps, got);
        for (size_t c = 0; c < 128; ++c) {
            const double scaled = (x[c] - mean) / std::sqrt(variance + in.eps) * in.norm_weight[c];
            const double want = scaled + in.norm_bias[c];
            ASSERT_NEAR(got[c], want, 0x1p-8 * 1.001 * std::fabs(want) + 0x1p-16 * (1 + std::fabs(scaled)))
                << "column " << c;
        }
    }
}

TEST_F(KeyNorm, IsBitEqualToTheOrderOfTheContract) {
    for (int trial = 0; trial < 500; ++trial) {
        Inputs in = random_inputs(random_, CacheFormat::fp8, 16, 1, 1);
        in.eps = random_.one_in(4) ? 0.0F : std::ldexp(1.0F, random_.integer32(-40, 2));
        float got[128];
        reference::normalised_key(in.key_of(0), in.norm_weight.data(), in.norm_bias.data(), in.eps, got);
        const std::vector<double> want = key_in_order(in.key_of(0), in.norm_weight, in.norm_bias, in.eps);
        for (size_t c = 0; c < 128; ++c) {
            ASSERT_EQ(static_cast<double>(got[c]), want[c]) << "column " << c;
        }
    }
}

TEST_F(KeyNorm, KeepsWeightsAndBiasesThatBf16CannotHold) {
    // Half a step of BF16 in the weight or the bias is a whole step of some of the results.
    for (const bool of_bias : {false, true}) {
        Inputs in = random_inputs(random_, CacheFormat::fp8, 16, 1, 1);
        in.norm_weight.assign(128, of_bias ? 0x1p-12F : 1.0F + 0x1p-8F - 0x1p-23F);
        in.norm_bias.assign(128, of_bias ? 1.0F + 0x1p-8F - 0x1p-12F : 0.0F);
        float exact[128];
        reference::normalised_key(in.key_of(0), in.norm_weight.data(), in.norm_bias.data(), in.eps, exact);
        std::vector<float> rounded_weight;
        std::vector<float> rounded_bias;
        for (size_t c = 0; c < 128; ++c) {
            rounded_weight.push_back(static_cast<float>(test::rounded_to_bf16(in.norm_weight[c])));
            rounded_bias.push_back(static_cast<float>(test::rounded_to_bf16(in.norm_bias[c])));
        }
        const std::vector<double> want = key_in_order(in.key_of(0), in.norm_weight, in.norm_bias, in.eps);
        const std::vector<double> wrong = key_in_order(in.key_of(0), rounded_weight, rounded_bias, in.eps);
        EXPECT_NE(want, wrong) << "these inputs would not show a rounded weight";
        for (size_t c = 0; c < 128; ++c) {
            ASSERT_EQ(static_cast<double>(exact[c]), want[c]) << "column " << c;
        }
    }
}

TEST_F(KeyNorm, OfAConstantKeyIsTheBias) {
    Inputs in = random_inputs(random_, CacheFormat::fp8, 16, 1, 1);
    std::fill_n(in.key_of(0), 128, __float2bfloat16_rn(3.0F));
    float got[128];
    reference::normalised_key(in.key_of(0), in.norm_weight.data(), in.norm_bias.data(), in.eps, got);
    for (size_t c = 0; c < 128; ++c) {
        EXPECT_EQ(static_cast<double>(got[c]), test::rounded_to_bf16(in.norm_bias[c]));
    }
}

}  // namespace
}  // namespace stepgraph
