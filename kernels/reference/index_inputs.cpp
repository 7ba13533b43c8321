#include "index_inputs.h"

#include <cstring>

#include <stepgraph/layouts/query_row.h>

namespace stepgraph::reference {
namespace {

constexpr int lanes = 16;  // of a half-warp: the order of the sums is that of the device
constexpr int lane_columns = head_dim / lanes;

/// Sum over 128 values in the fixed order: each lane left to right, then pairs of lanes 8, 4, 2 and 1 apart.
float lane_ordered_sum(const float* values) {
    float sums[lanes];
    for (int lane = 0; lane < lanes; ++lane) {
        sums[lane] = 0.0F;
        for (int i = 0; i < lane_columns; ++i) {
            sums[lane] += values[lane * lane_columns + i];
        }
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
        for (int lane = 0; lane < distance; ++lane) {
            sums[lane] += sums[lane + distance];
        }
    }
    return sums[0];
}

float largest_magnitude(const float* values, int n) {
    float amax = 0.0F;
    for (int i = 0; i < n; ++i) {
        amax = max_magnitude(amax, values[i]);
    }
    return amax;
}

/// Quantises 128 columns: `payload(c)` and `scale(block)` give the bytes that they go to. Returns the FP8 scale's exponent.
template <typename Payload>
int quantise_fp8(const float* values, Payload payload) {
    const int exponent = fp8_scale_exponent(largest_magnitude(values, head_dim));
    for (int c = 0; c < head_dim; ++c) {
        *payload(c) = e4m3_from_float(values[c] * power_of_two(-exponent));
    }
    return exponent;
}

template <typename Payload, typename Scale>
void quantise_mxfp4(const float* values, Payload payload, Scale scale) {
    for (int block = 0; block < head_dim / mxfp4_block; ++block) {
        const float* columns = values + block * mxfp4_block;
        const uint8_t byte = mxfp4_scale_byte(largest_magnitude(columns, mxfp4_block));
        for (int i = 0; i < mxfp4_block; i += 2) {
            const unsigned low = e2m1_from_float(columns[i] * ue8m0_inverse(byte));
            const unsigned high = e2m1_from_float(columns[i + 1] * ue8m0_inverse(byte));
            *payload(block * mxfp4_block + i) = static_cast<uint8_t>(low | high << 4U);
        }
        *scale(block) = byte;
    }
}

void query_of_row(const IndexInputsArgs& args, int64_t row) {
    const CacheFormat format = args.format;
    for (int head = 0; head < args.heads; ++head) {
        float values[head_dim];
        for (int c = 0; c < head_dim; ++c) {
            values[c] = float_from_bf16(args.iq[(row * args.heads + head) * head_dim + c]);
        }
        const auto payload = [&](int c) { return args.query + query_payload_offset(format, args.heads, row, head, c); };
        const auto scale = [&](int block) {
            return args.query + query_scale_offset(format, args.heads, args.max_rows, row, head, block);
        };
        const float factor = head_weight_factor(args.heads);
        float weight = float_from_bf16(args.projected[row * args.projected_columns + args.weight_column + head]);
        if (is_mxfp4(format)) {
            quantise_mxfp4(values, payload, scale);
            weight = round_to_bf16(weight * factor);
        } else {
            weight = weight * power_of_two(quantise_fp8(values, payload)) * factor;
            weight = format == CacheFormat::fp8_mx ? round_to_bf16(weight) : weight;
        }
        args.head_weights[row * args.heads + head] = weight;
    }
    if (format == CacheFormat::mxfp4_rowgroup) {
        for (int head = args.heads; head < 64; ++head) {
            for (int block = 0; block < 4; ++block) {
                args.query[query_scale_offset(format, args.heads, args.max_rows, row, head, block)] = 0;
            }
        }
    }
}

void key_of_row(const IndexInputsArgs& args, int64_t row) {
    const int64_t slot = args.slots[row];
    if (slot >= args.pages * page_tokens) {
        count(&args.status->invalid_slots);
    }
    if (slot < 0 || slot >= args.pages * page_tokens) {
        return;
    }
    float key[head_dim];
    normalised_key(args.projected + row * args.projected_columns + args.key_column, args.k_norm_weight, args.k_norm_bias,
                   args.k_norm_eps, key);

    store_key(args.format, key, page_address(args.cache, slot / page_tokens, args.page_stride_bytes),
              static_cast<int>(slot % page_tokens));
}

}  // namespace

void normalised_key(const __nv_bfloat16* key, const float* weight, const float* bias, float eps, float* out) {
    float x[head_dim];
    float squares[head_dim];
    for (int c = 0; c < head_dim; ++c) {
        x[c] = float_from_bf16(key[c]);
    }
    const float mean = lane_ordered_sum(x) / head_dim;
    for (int c = 0; c < head_dim; ++c) {
        squares[c] = (x[c] - mean) * (x[c] - mean);
    }
    const float variance = lane_ordered_sum(squares) / head_dim;
    const float rstd = 1.0F / std::sqrt(variance + eps);
    for (int c = 0; c < head_dim; ++c) {
        out[c] = round_to_bf16((x[c] - mean) * rstd * weight[c] + bias[c]);
    }
}

void store_key(CacheFormat format, const float* key, uint8_t* page, int token) {
    const auto payload = [&](int c) { return page + payload_offset(format, token, c); };
    const auto scale = [&](int block) { return page + scale_offset(format, token, block); };
    if (is_mxfp4(format)) {
        quantise_mxfp4(key, payload, scale);
        return;
    }
    const int exponent = quantise_fp8(key, payload);
    if (format == CacheFormat::fp8_mx) {
        std::memset(scale(0), ue8m0_byte(exponent), 4);
    } else {
        const float value = power_of_two(exponent);
        std::memcpy(scale(0), &value, sizeof value);
    }
}

void index_inputs(const IndexInputsArgs& args) {
    for (int64_t row = 0; row < args.rows; ++row) {
        query_of_row(args, row);
        key_of_row(args, row);
    }
}

}  // namespace stepgraph::reference
