#include "index_inputs.h"

#include <stepgraph/layouts/query_row.h>
#include <stepgraph/layouts/widened_mxfp4.h>

namespace stepgraph {
namespace {

constexpr int block_heads = 16;                          // that a block quantises, a half-warp each
constexpr int threads = block_heads * 16 + 32;           // and a warp that inserts the key, in one block of a row
constexpr int lane_columns = 8;                          // of the 128, a lane of a half-warp
constexpr int block_lanes = mxfp4_block / lane_columns;  // lanes that share an MXFP4 scale

/// Largest magnitude over aligned groups of `lanes` lanes, in every one of them.
template <int lanes>
__device__ float group_max(const float (&x)[lane_columns]) {
    float amax = 0.0F;
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) {
        amax = max_magnitude(amax, x[i]);
    }
#pragma unroll
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
#pragma unroll
    for (int i = 0; i < lane_columns; i += 2) {
        const uint32_t pair = e4m3_pair_from_floats(mul_rn(x[i], inverse), mul_rn(x[i + 1], inverse));
        words[i / 4] |= pair << (i % 4 * 8);
    }
    return make_uint2(words[0], words[1]);
}

/// The lane's eight columns as E2M1, and the UE8M0 byte of the scale that four lanes share.
__device__ uint32_t mxfp4_of_lane(const float (&x)[lane_columns], uint8_t* scale) {
    *scale = mxfp4_scale_byte(group_max<block_lanes>(x));
    const float inverse = ue8m0_inverse(*scale);
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) {
        word |= static_cast<uint32_t>(e2m1_from_float(mul_rn(x[i], inverse))) << (i * 4);
    }
    return word;
}

/// Writes the widened numbers of one head, `codes` a lane's eight E2M1 codes and `scale` their UE8M0 byte, and its weight.
__device__ void widen_head(const IndexInputsArgs& args, int64_t head, uint32_t codes, uint8_t scale, float weight,
                           bool is_live) {
    const int lane = static_cast<int>(threadIdx.x) % 16;
    // Any scale fits zeros.
    const int nonzero_scale = (codes & e2m1_magnitudes) != 0 ? scale : 0;
    int largest = nonzero_scale;
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, distance));
    }
    largest = largest == 0 ? widened_scale_of_zeros : largest;
    int difference = nonzero_scale == 0 ? 0 : largest - scale;
    const unsigned lost_lanes = __ballot_sync(0xFFFFFFFFU, can_widen(largest, difference) ? 0 : 1);
    const bool lost = (lost_lanes & (threadIdx.x % 32 < 16 ? 0x0000FFFFU : 0xFFFF0000U)) != 0;
    difference = lost ? 0 : difference;
    uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) {
        const uint32_t code = widened(static_cast<uint8_t>(codes >> (i * 4)), static_cast<uint32_t>(difference));
        words[i / 4] |= code << (i % 4 * 8);
    }
    if (is_live) {
        auto* to = reinterpret_cast<uint2*>(args.widened_query + head * head_dim + lane * lane_columns);
        *to = make_uint2(words[0], words[1]);
    }
    if (is_live && lane == 0) {
        args.widened_weights[head] = lost ? NAN : mul_rn(weight, widened_scale(largest));
    }
}

/// What quantising a lane's part of a head starts from.
struct HeadInputs {
    uint4 columns;  // eight of the head's projection
    __nv_bfloat16 weight;
};

__device__ HeadInputs load_head(const IndexInputsArgs& args, int64_t row, int head, int lane) {
    const __nv_bfloat16* columns = args.iq + (row * args.heads + head) * head_dim + lane * lane_columns;
    return {*reinterpret_cast<const uint4*>(columns),
            args.projected[row * args.projected_columns + args.weight_column + head]};
}

/// Only a live row's head is written.
__device__ void quantise_head(const IndexInputsArgs& args, int64_t row, int head, bool is_live) {
    const int lane = static_cast<int>(threadIdx.x) % 16;
    const int column = lane * lane_columns;
    const HeadInputs inputs = load_head(args, row, head, lane);
    const uint32_t pairs[4] = {inputs.columns.x, inputs.columns.y, inputs.columns.z, inputs.columns.w};
    float x[lane_columns];
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) {
        x[i] = float_of(i % 2 == 0 ? pairs[i / 2] << 16U : pairs[i / 2] & 0xFFFF0000U);
    }

    const float factor = head_weight_factor(args.heads);
    float weight = float_from_bf16(inputs.weight);
    uint8_t* payload = args.query + query_payload_offset(args.format, args.heads, row, head, column);
    if (is_mxfp4(args.format)) {
        uint8_t scale;
        const uint32_t codes = mxfp4_of_lane(x, &scale);
        if (is_live) {
            *reinterpret_cast<uint32_t*>(payload) = codes;
        }
        if (is_live && lane % block_lanes == 0) {
            args.query[query_scale_offset(args.format, args.heads, args.max_rows, row, head, lane / block_lanes)] = scale;
        }
        weight = round_to_bf16(mul_rn(weight, factor));
        if (args.widened_query != nullptr) {
            widen_head(args, row * args.heads + head, codes, scale, weight, is_live);
        }
    } else {
        int exponent;
        const uint2 codes = fp8_of_lane(x, &exponent);
        if (is_live) {
            *reinterpret_cast<uint2*>(payload) = codes;
        }
        weight = mul_rn(mul_rn(weight, power_of_two(exponent)), factor);
        weight = args.format == CacheFormat::fp8_mx ? round_to_bf16(weight) : weight;
    }
    if (is_live && lane == 0) {
        args.head_weights[row * args.heads + head] = weight;
    }
}

/// Scale bytes of heads that the model lacks are 0.
__device__ void clear_rowgroup_scales(const IndexInputsArgs& args, int64_t row) {
    const int head = args.heads + static_cast<int>(threadIdx.x) / 4;
    if (head < rowgroup_heads) {
        const int block = static_cast<int>(threadIdx.x) % 4;
        args.query[query_scale_offset(args.format, args.heads, args.max_rows, row, head, block)] = 0;
    }
}

/// What a lane's part of a key starts from.
struct KeyInputs {
    float columns[lane_columns];
    float weight[lane_columns];
    float bias[lane_columns];
    int64_t slot;
};

/// Eight floats, aligned to 16 bytes.
__device__ void load_eight(float (&to)[lane_columns], const float* from) {
#pragma unroll
    for (int i = 0; i < lane_columns; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        to[i] = four.x;
        to[i + 1] = four.y;
        to[i + 2] = four.z;
        to[i + 3] = four.w;
    }
}

__device__ KeyInputs load_key(const IndexInputsArgs& args, int64_t row, int lane) {
    KeyInputs inputs;
    const int column = lane * lane_columns;
    inputs.slot = args.slots[row];
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) {  // one by one: the packed row is aligned to 2 bytes only
        inputs.columns[i] = float_from_bf16(args.projected[row * args.projected_columns + args.key_column + column + i]);
    }
    load_eight(inputs.weight, args.k_norm_weight + column);
    load_eight(inputs.bias, args.k_norm_bias + column);
    return inputs;
}

/// The lane's eight columns of the key after LayerNorm, rounded to BF16.
__device__ void normalise_key(const KeyInputs& inputs, float eps, float (&x)[lane_columns]) {
    float squares[lane_columns];
    const float mean = mul_rn(half_warp_sum(inputs.columns), 1.0F / head_dim);
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) {
        x[i] = sub_rn(inputs.columns[i], mean);
        squares[i] = mul_rn(x[i], x[i]);
    }
    const float variance = mul_rn(half_warp_sum(squares), 1.0F / head_dim);
    const float rstd = div_rn(1.0F, sqrt_rn(add_rn(variance, eps)));
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) {
        x[i] = round_to_bf16(add_rn(mul_rn(mul_rn(x[i], rstd), inputs.weight[i]), inputs.bias[i]));
    }
}

/// Whether the row's key is stored, counted where its slot lies behind the cache. `thread` of a warp.
__device__ bool has_slot(const IndexInputsArgs& args, int64_t slot, int thread) {
    const bool is_behind = slot >= args.pages * page_tokens;
    if (is_behind && thread == 0) {
        count(&args.status->invalid_slots);
    }
    return slot >= 0 && !is_behind;
}

/// One warp; both halves compute, the low one writes.
__device__ void insert_key(const IndexInputsArgs& args, int64_t row, bool is_live) {
    const int thread = static_cast<int>(threadIdx.x) % 32;
    const int lane = thread % 16;
    const KeyInputs inputs = load_key(args, row, lane);
    float x[lane_columns];
    normalise_key(inputs, args.k_norm_eps, x);
    uint8_t block_scale = 0;
    int exponent = 0;
    const uint2 words = is_mxfp4(args.format) ? make_uint2(mxfp4_of_lane(x, &block_scale), 0) : fp8_of_lane(x, &exponent);
    if (!is_live || !has_slot(args, inputs.slot, thread) || thread >= 16) {
        return;
    }

    uint8_t* page = page_address(args.cache, inputs.slot / page_tokens, args.page_stride_bytes);
    const int token = static_cast<int>(inputs.slot % page_tokens);
    uint32_t* payload = reinterpret_cast<uint32_t*>(page + payload_offset(args.format, token, lane * lane_columns));
    payload[0] = words.x;
    if (!is_mxfp4(args.format)) {
        payload[1] = words.y;  // two stores: the cache is aligned to 4 bytes only
    } else if (lane % block_lanes == 0) {
        page[scale_offset(args.format, token, lane / block_lanes)] = block_scale;
    }
    if (!is_mxfp4(args.format) && lane == 0) {
        const bool mx = args.format == CacheFormat::fp8_mx;
        *reinterpret_cast<uint32_t*>(page + scale_offset(args.format, token, 0)) =
            mx ? ue8m0_byte(exponent) * 0x01010101U : bits_of(power_of_two(exponent));
    }
}

/// Blocks of a row: each a group of its heads, the first also its key.
__host__ __device__ int blocks_a_row(int heads) {
    return heads / block_heads;
}

// Padding rows are loaded and computed like others, and not written: whether a row is one is known only a memory latency
// after the wait, and its inputs are on their way by then. Buffers hold all rows of the bucket.
__global__ void __launch_bounds__(threads) index_inputs_kernel(IndexInputsArgs args) {
    const int blocks = blocks_a_row(args.heads);
    const int64_t row = blockIdx.x / static_cast<unsigned>(blocks);
    const int part = static_cast<int>(blockIdx.x) % blocks;
    const int half_warp = static_cast<int>(threadIdx.x) / 16;

    wait_for_producers();  // for the projections and the layout, and for the last layer's readers of query and weights
    let_consumers_start();

    const bool is_live = row < args.starts[args.max_requests];
    if (half_warp < block_heads) {
        quantise_head(args, row, part * block_heads + half_warp, is_live);
        if (is_live && args.format == CacheFormat::mxfp4_rowgroup && part == 0) {
            clear_rowgroup_scales(args, row);
        }
    } else if (part == 0) {
        insert_key(args, row, is_live);
    }
}

}  // namespace

void index_inputs(const IndexInputsArgs& args, LaunchContext context) {
    launch(index_inputs_kernel, "index inputs", context, static_cast<unsigned>(args.rows * blocks_a_row(args.heads)),
           threads, 0, args);
}

void prepare_index_inputs() {
    prepare_kernel(index_inputs_kernel, "index inputs");
}

}  // namespace stepgraph
