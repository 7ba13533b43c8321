#include "index_inputs.h"

#include <stepgraph/layouts/query_row.h>
#include <stepgraph/layouts/widened_mxfp4.h>

namespace stepgraph {
namespace {

constexpr int threads = 256;
constexpr int half_warps = threads / 16;
constexpr int lane_columns = 8;                          // of the 128, a lane of a half-warp
constexpr int block_lanes = mxfp4_block / lane_columns;  // lanes that share an MXFP4 scale

/// Largest magnitude over aligned groups of `lanes` lanes, in every one of them.
template <int lanes>
__device__ float group_max(const float (&x)[lane_columns]) {
    float amax = 0.0F;
    for (int i = 0; i < lane_columns; ++i) {
        amax = max_magnitude(amax, x[i]);
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFU, amax, distance));
    }
    return amax;
}

/// Sum over the 128 columns of a half-warp in the order that the reference states, in every lane.
__device__ float half_warp_sum(const float (&x)[lane_columns]) {
    float sum = 0.0F;
    for (int i = 0; i < lane_columns; ++i) {
        sum = add_rn(sum, x[i]);
    }
    for (int distance = 8; distance > 0; distance /= 2) {
        sum = add_rn(sum, __shfl_xor_sync(0xFFFFFFFFU, sum, distance));
    }
    return sum;
}

/// The lane's eight columns as E4M3, and the exponent of the scale that the 128 share.
__device__ uint2 fp8_of_lane(const float (&x)[lane_columns], int* exponent) {
    *exponent = fp8_scale_exponent(group_max<16>(x));
    const float inverse = power_of_two(-*exponent);
    uint32_t words[2] = {};
    for (int i = 0; i < lane_columns; ++i) {
        words[i / 4] |= static_cast<uint32_t>(e4m3_from_float(mul_rn(x[i], inverse))) << (i % 4 * 8);
    }
    return make_uint2(words[0], words[1]);
}

/// The lane's eight columns as E2M1, and the UE8M0 byte of the scale that four lanes share.
__device__ uint32_t mxfp4_of_lane(const float (&x)[lane_columns], uint8_t* scale) {
    *scale = mxfp4_scale_byte(group_max<block_lanes>(x));
    const float inverse = ue8m0_inverse(*scale);
    uint32_t word = 0;
    for (int i = 0; i < lane_columns; ++i) {
        word |= static_cast<uint32_t>(e2m1_from_float(mul_rn(x[i], inverse))) << (i * 4);
    }
    return word;
}

/// Writes the widened numbers of one head, `codes` a lane's eight E2M1 codes and `scale` their UE8M0 byte, and its weight.
__device__ void widen_head(const IndexInputsArgs& args, int64_t head, int lane, uint32_t codes, uint8_t scale,
                           float weight) {
    // Any scale fits zeros.
    const int nonzero_scale = (codes & e2m1_magnitudes) != 0 ? scale : 0;
    int largest = nonzero_scale;
    for (int distance = 8; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, distance));
    }
    largest = largest == 0 ? widened_scale_of_zeros : largest;
    int difference = nonzero_scale == 0 ? 0 : largest - scale;
    int lost = can_widen(largest, difference) ? 0 : 1;
    for (int distance = 8; distance > 0; distance /= 2) {
        lost |= __shfl_xor_sync(0xFFFFFFFFU, lost, distance);
    }
    difference = lost != 0 ? 0 : difference;
    uint32_t words[2] = {};
    for (int i = 0; i < lane_columns; ++i) {
        const uint32_t code = widened(static_cast<uint8_t>(codes >> (i * 4)), static_cast<uint32_t>(difference));
        words[i / 4] |= code << (i % 4 * 8);
    }
    *reinterpret_cast<uint2*>(args.widened_query + head * head_dim + lane * lane_columns) = make_uint2(words[0], words[1]);
    if (lane == 0) {
        args.widened_weights[head] = lost != 0 ? NAN : mul_rn(weight, widened_scale(largest));
    }
}

__device__ void quantise_query(const IndexInputsArgs& args, int64_t row, int head, int lane) {
    const int column = lane * lane_columns;
    const uint4 packed = *reinterpret_cast<const uint4*>(args.iq + (row * args.heads + head) * head_dim + column);
    const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
    float x[lane_columns];
    for (int i = 0; i < lane_columns; ++i) {
        x[i] = float_of(i % 2 == 0 ? pairs[i / 2] << 16U : pairs[i / 2] & 0xFFFF0000U);
    }

    const float factor = head_weight_factor(args.heads);
    float weight = float_from_bf16(args.projected[row * args.projected_columns + args.weight_column + head]);
    uint8_t* payload = args.query + query_payload_offset(args.format, args.heads, row, head, column);
    if (is_mxfp4(args.format)) {
        uint8_t scale;
        const uint32_t codes = mxfp4_of_lane(x, &scale);
        *reinterpret_cast<uint32_t*>(payload) = codes;
        if (lane % block_lanes == 0) {
            args.query[query_scale_offset(args.format, args.heads, args.max_rows, row, head, lane / block_lanes)] = scale;
        }
        weight = round_to_bf16(mul_rn(weight, factor));
        if (args.widened_query != nullptr) {
            widen_head(args, row * args.heads + head, lane, codes, scale, weight);
        }
    } else {
        int exponent;
        *reinterpret_cast<uint2*>(payload) = fp8_of_lane(x, &exponent);
        weight = mul_rn(mul_rn(weight, power_of_two(exponent)), factor);
        weight = args.format == CacheFormat::fp8_mx ? round_to_bf16(weight) : weight;
    }
    if (lane == 0) {
        args.head_weights[row * args.heads + head] = weight;
    }
}

/// Scale bytes of heads that the model lacks are 0.
__device__ void clear_rowgroup_scales(const IndexInputsArgs& args, int64_t row) {
    const int head = args.heads + static_cast<int>(threadIdx.x) / 4;
    if (head < 64) {
        const int block = static_cast<int>(threadIdx.x) % 4;
        args.query[query_scale_offset(args.format, args.heads, args.max_rows, row, head, block)] = 0;
    }
}

/// The lane's eight columns of the key after LayerNorm, rounded to BF16.
__device__ void normalise_key(const IndexInputsArgs& args, int64_t row, int column, float (&x)[lane_columns]) {
    float squares[lane_columns];
    for (int i = 0; i < lane_columns; ++i) {
        x[i] = float_from_bf16(args.projected[row * args.projected_columns + args.key_column + column + i]);
    }
    const float mean = div_rn(half_warp_sum(x), head_dim);
    for (int i = 0; i < lane_columns; ++i) {
        x[i] = sub_rn(x[i], mean);
        squares[i] = mul_rn(x[i], x[i]);
    }
    const float variance = div_rn(half_warp_sum(squares), head_dim);
    const float rstd = div_rn(1.0F, sqrt_rn(add_rn(variance, args.k_norm_eps)));
    for (int i = 0; i < lane_columns; ++i) {
        const float scaled = mul_rn(mul_rn(x[i], rstd), args.k_norm_weight[column + i]);
        x[i] = round_to_bf16(add_rn(scaled, args.k_norm_bias[column + i]));
    }
}

/// One warp; both halves compute, the low one writes.
__device__ void insert_key(const IndexInputsArgs& args, int64_t row, int thread) {
    const int64_t slot = args.slots[row];
    if (slot >= args.pages * page_tokens && thread == 0) {
        count(&args.status->invalid_slots);
    }
    if (slot < 0 || slot >= args.pages * page_tokens) {
        return;
    }
    const int lane = thread % 16;
    const bool writes = thread < 16;
    const int column = lane * lane_columns;
    float x[lane_columns];
    normalise_key(args, row, column, x);

    uint8_t* page = page_address(args.cache, slot / page_tokens, args.page_stride_bytes);
    const int token = static_cast<int>(slot % page_tokens);
    uint32_t* payload = reinterpret_cast<uint32_t*>(page + payload_offset(args.format, token, column));
    if (is_mxfp4(args.format)) {
        uint8_t scale;
        const uint32_t word = mxfp4_of_lane(x, &scale);
        if (writes) {
            *payload = word;
        }
        if (writes && lane % block_lanes == 0) {
            page[scale_offset(args.format, token, lane / block_lanes)] = scale;
        }
        return;
    }
    int exponent;
    const uint2 words = fp8_of_lane(x, &exponent);
    if (writes) {  // two stores: the cache is aligned to 4 bytes only
        payload[0] = words.x;
        payload[1] = words.y;
    }
    if (thread == 0) {
        const bool mx = args.format == CacheFormat::fp8_mx;
        *reinterpret_cast<uint32_t*>(page + scale_offset(args.format, token, 0)) =
            mx ? ue8m0_byte(exponent) * 0x01010101U : bits_of(power_of_two(exponent));
    }
}

__global__ void __launch_bounds__(threads) index_inputs_kernel(IndexInputsArgs args) {
    wait_for_producers();  // for the projections and the layout, and for the last layer's readers of query and weights
    let_consumers_start();

    const int64_t row = blockIdx.x;
    if (row >= args.starts[args.max_requests]) {
        return;
    }
    const int thread = static_cast<int>(threadIdx.x);
    for (int head = thread / 16; head < args.heads; head += half_warps) {
        quantise_query(args, row, head, thread % 16);
    }
    if (args.format == CacheFormat::mxfp4_rowgroup) {
        clear_rowgroup_scales(args, row);
    }
    if (thread < 32) {
        insert_key(args, row, thread);
    }
}

}  // namespace

void index_inputs(const IndexInputsArgs& args, LaunchContext context) {
    launch(index_inputs_kernel, "index inputs", context, static_cast<unsigned>(args.rows), threads, 0, args);
}

void prepare_index_inputs() {
    prepare_kernel(index_inputs_kernel, "index inputs");
}

}  // namespace stepgraph
