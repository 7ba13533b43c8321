// The pages of the indexer's key cache: which byte holds which column of which token.
//
//   format           payload of token t, column c        scales                                      bytes
//   fp8              E4M3 at t*128 + c                   FP32 at 8192 + t*4                          8448
//   fp8_mx           E4M3 at t*128 + c                   four equal UE8M0 bytes at 8192 + t*4        8448
//   mxfp4            E2M1 at t*64 + c/2                  UE8M0 at 4096 + t*4 + c/32                  4352
//   mxfp4_rowgroup   E2M1 at (c/32)*1024 + t*16          UE8M0 at 4096 + (c/32)*64                   4352
//                            + (c%32)/2                           + (t%16)*4 + t/16
//
// E2M1: an even column stands in the low nibble, the odd one behind it in the high nibble. Offsets are bytes from the page's
// first byte and 64-bit wherever a page number takes part.
#pragma once

#include <cstdint>

#include "number_formats.h"

namespace stepgraph {

/// How a page of the key cache is laid out. The two MXFP4 pages have the same size and different bytes: the format is
/// stated by the engine and never inferred.
enum class CacheFormat : int32_t { fp8, fp8_mx, mxfp4, mxfp4_rowgroup };

inline constexpr int head_dim = 128;
inline constexpr int page_tokens = 64;
inline constexpr int mxfp4_block = 32;  // columns that share one UE8M0 scale

STEPGRAPH_HD constexpr bool is_mxfp4(CacheFormat format) {
    return format == CacheFormat::mxfp4 || format == CacheFormat::mxfp4_rowgroup;
}

/// Bytes of the index section of one page, without what an engine's merged page holds beside it.
STEPGRAPH_HD constexpr int page_bytes(CacheFormat format) {
    const int payload = is_mxfp4(format) ? page_tokens * head_dim / 2 : page_tokens * head_dim;
    return payload + page_tokens * 4;
}

/// Byte of column `column` of token `token` (for E2M1 the byte that the column shares with its neighbour).
STEPGRAPH_HD constexpr int payload_offset(CacheFormat format, int token, int column) {
    switch (format) {
    case CacheFormat::mxfp4:
        return token * (head_dim / 2) + column / 2;
    case CacheFormat::mxfp4_rowgroup:
        return (column / mxfp4_block) * 1024 + token * 16 + (column % mxfp4_block) / 2;
    default:
        return token * head_dim + column;
    }
}

/// Byte of the scale of 32-column block `block` (0..3) of token `token`. `fp8` has one FP32 a token, at block 0.
STEPGRAPH_HD constexpr int scale_offset(CacheFormat format, int token, int block) {
    switch (format) {
    case CacheFormat::mxfp4:
        return page_tokens * head_dim / 2 + token * 4 + block;
    case CacheFormat::mxfp4_rowgroup:
        return page_tokens * head_dim / 2 + block * 64 + (token % 16) * 4 + token / 16;
    default:
        return page_tokens * head_dim + token * 4 + block;
    }
}

static_assert(page_bytes(CacheFormat::fp8) == 8448 && page_bytes(CacheFormat::fp8_mx) == 8448);
static_assert(page_bytes(CacheFormat::mxfp4) == 4352 && page_bytes(CacheFormat::mxfp4_rowgroup) == 4352);
static_assert(payload_offset(CacheFormat::fp8, 63, 127) == 8191);
static_assert(scale_offset(CacheFormat::fp8, 0, 0) == 8192 && scale_offset(CacheFormat::fp8_mx, 63, 3) == 8447);
static_assert(payload_offset(CacheFormat::mxfp4, 63, 127) == 4095);
static_assert(scale_offset(CacheFormat::mxfp4, 0, 0) == 4096 && scale_offset(CacheFormat::mxfp4, 63, 3) == 4351);
static_assert(payload_offset(CacheFormat::mxfp4_rowgroup, 63, 127) == 4095);
static_assert(payload_offset(CacheFormat::mxfp4_rowgroup, 1, 32) == 1024 + 16);
static_assert(scale_offset(CacheFormat::mxfp4_rowgroup, 17, 1) == 4096 + 64 + 4 + 1);

/// First byte of page `page`. `page` must lie in [0, pages).
template <typename Byte>
STEPGRAPH_HD constexpr Byte* page_address(Byte* cache, int64_t page, int64_t page_stride_bytes) {
    return cache + page * page_stride_bytes;
}

/// Slot (page * 64 + offset) of local position `j` in `[0, width)` of a request whose block table row is `blocks`, or -1
/// where the table's block lies outside [0, pages).
STEPGRAPH_HD constexpr int64_t slot_of(const int32_t* blocks, int64_t j, int64_t pages) {
    const int64_t block = blocks[j / page_tokens];
    return block < 0 || block >= pages ? -1 : block * page_tokens + j % page_tokens;
}

/// Value of one key column without the scale of an FP8 token, with the scale of an MXFP4 block.
STEPGRAPH_HD inline float key_value(CacheFormat format, const uint8_t* page, int token, int column) {
    const uint8_t code = page[payload_offset(format, token, column)];
    if (!is_mxfp4(format)) {
        return float_from_e4m3(code);
    }
    const uint8_t scale = page[scale_offset(format, token, column / mxfp4_block)];
    return mul_rn(float_from_e2m1(column % 2 != 0 ? code >> 4U : code), ue8m0_scale(scale));
}

/// Factor s of a token's logit: the scale of an FP8 key, 1 for MXFP4, whose scales are inside the dot product.
STEPGRAPH_HD inline float key_scale(CacheFormat format, const uint8_t* page, int token) {
    if (is_mxfp4(format)) {
        return 1.0F;
    }
    const uint8_t* bytes = page + scale_offset(format, token, 0);
    if (format == CacheFormat::fp8_mx) {
        return ue8m0_scale(bytes[0]);
    }
    const uint32_t bits = static_cast<uint32_t>(bytes[0]) | static_cast<uint32_t>(bytes[1]) << 8U |
                          static_cast<uint32_t>(bytes[2]) << 16U | static_cast<uint32_t>(bytes[3]) << 24U;
    return float_of(bits);
}

}  // namespace stepgraph
