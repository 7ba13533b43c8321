// The quantised query of one layer: which byte holds which column of which head of which row.
//
//   format            payload of (row, head, column c)                  scales                                   row pitch
//   fp8, fp8_mx       E4M3 at row*H*128 + head*128 + c                  folded into the head weights             H*128
//   mxfp4             E2M1 at row*H*128 + head*64 + c/2                 UE8M0 at row*H*128 + H*64 + head*4 + c/32  H*128
//   mxfp4_rowgroup    E2M1 at row*H*64 + head*64 + c/2                  UE8M0 at max_rows*H*64 + row*256           H*64
//                                                                         + (c/32)*64 + (head%16)*4 + head/16
//
// The row-group query is two tensors, payload [max_rows, H, 64] and scales [max_rows, 1, 4, 16, 4], one behind the other;
// scale bytes of heads that a model lacks are 0.
#pragma once

#include <cstdint>

#include "cache_page.h"

namespace stepgraph {

STEPGRAPH_HD constexpr bool valid_heads(int heads) {
    return heads == 16 || heads == 32 || heads == 64;
}

inline constexpr int rowgroup_heads = 64;                        // that a row of scales has room for
inline constexpr int rowgroup_scale_bytes = 4 * rowgroup_heads;  // of one row: [4 blocks][16][4]

/// Bytes of the query of `max_rows` rows.
STEPGRAPH_HD constexpr int64_t query_bytes(CacheFormat format, int heads, int64_t max_rows) {
    if (format == CacheFormat::mxfp4_rowgroup) {
        return max_rows * (static_cast<int64_t>(heads) * (head_dim / 2) + rowgroup_scale_bytes);
    }
    return max_rows * heads * head_dim;
}

/// Byte of (row, head, column) in the query buffer; E2M1 columns share a byte, the even one in the low nibble.
STEPGRAPH_HD constexpr int64_t query_payload_offset(CacheFormat format, int heads, int64_t row, int head, int column) {
    const int64_t pitch = static_cast<int64_t>(heads) * (format == CacheFormat::mxfp4_rowgroup ? head_dim / 2 : head_dim);
    return row * pitch + (is_mxfp4(format) ? head * (head_dim / 2) + column / 2 : head * head_dim + column);
}

/// Byte of the UE8M0 scale of (row, head, 32-column block) in the query buffer. MXFP4 formats only.
STEPGRAPH_HD constexpr int64_t query_scale_offset(CacheFormat format, int heads, int64_t max_rows, int64_t row, int head,
                                                  int block) {
    if (format == CacheFormat::mxfp4_rowgroup) {
        return max_rows * heads * (head_dim / 2) + row * rowgroup_scale_bytes + block * 64 + (head % 16) * 4 + head / 16;
    }
    return row * heads * head_dim + static_cast<int64_t>(heads) * (head_dim / 2) + head * 4 + block;
}

static_assert(query_payload_offset(CacheFormat::fp8, 32, 1, 1, 5) == 4096 + 128 + 5);
static_assert(query_payload_offset(CacheFormat::mxfp4, 32, 1, 1, 5) == 4096 + 64 + 2);
static_assert(query_scale_offset(CacheFormat::mxfp4, 32, 8, 1, 2, 3) == 4096 + 2048 + 8 + 3);
static_assert(query_payload_offset(CacheFormat::mxfp4_rowgroup, 32, 1, 1, 5) == 2048 + 64 + 2);
static_assert(query_scale_offset(CacheFormat::mxfp4_rowgroup, 64, 2, 1, 17, 3) == 2 * 4096 + 256 + 192 + 4 + 1);

/// Value of one query column, with the scale of an MXFP4 block, without the (folded) scale of an FP8 head.
STEPGRAPH_HD inline float query_value(CacheFormat format, const uint8_t* query, int heads, int64_t max_rows, int64_t row,
                                      int head, int column) {
    const uint8_t code = query[query_payload_offset(format, heads, row, head, column)];
    if (!is_mxfp4(format)) {
        return float_from_e4m3(code);
    }
    const uint8_t scale = query[query_scale_offset(format, heads, max_rows, row, head, column / mxfp4_block)];
    return mul_rn(float_from_e2m1(column % 2 != 0 ? code >> 4U : code), ue8m0_scale(scale));
}

/// (H * 128)^-1/2 rounded to FP32: the model's factor on the head weights.
STEPGRAPH_HD constexpr float head_weight_factor(int heads) {
    return float_of(heads == 16 ? 0x3CB504F3U : heads == 32 ? 0x3C800000U : 0x3C3504F3U);
}

}  // namespace stepgraph
