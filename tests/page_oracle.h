// The cache page and the query row said once more as the arrays they are: index arithmetic that shares nothing with the
// library's offset formulas.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <stepgraph/layouts/cache_page.h>

namespace stepgraph {

/// How a format is printed in the name and the failure of a test.
inline void PrintTo(CacheFormat format, std::ostream* out) {
    constexpr const char* names[] = {"fp8", "fp8_mx", "mxfp4", "mxfp4_rowgroup"};
    *out << names[static_cast<int>(format)];
}

namespace test {

inline constexpr CacheFormat all_formats[] = {CacheFormat::fp8, CacheFormat::fp8_mx, CacheFormat::mxfp4,
                                              CacheFormat::mxfp4_rowgroup};

inline std::string format_name(const ::testing::TestParamInfo<CacheFormat>& info) {
    return ::testing::PrintToString(info.param);
}

inline bool four_bit(CacheFormat format) {
    return format == CacheFormat::mxfp4 || format == CacheFormat::mxfp4_rowgroup;
}

/// The arrays of which a page is made, as they lie in memory.
union Page {
    struct {
        uint8_t payload[64][128];  // [token][column]
        uint8_t scales[64][4];     // [token], an FP32 or four equal UE8M0
    } fp8;
    struct {
        uint8_t payload[64][4][16];  // [token][block][pair of columns]
        uint8_t scales[64][4];       // [token][block]
    } mxfp4;
    struct {
        uint8_t payload[4][64][16];  // [block][token][pair of columns]
        uint8_t scales[4][16][4];    // [block][token % 16][token / 16]
    } rowgroup;
    uint8_t bytes[8448];
};

inline int64_t own_bytes(CacheFormat format) {
    return four_bit(format) ? static_cast<int64_t>(sizeof(Page::mxfp4)) : static_cast<int64_t>(sizeof(Page::fp8));
}

/// The byte that holds column `column` of token `token`.
inline uint8_t* payload_byte(CacheFormat format, uint8_t* page, int token, int column) {
    auto* arrays = reinterpret_cast<Page*>(page);
    switch (format) {
    case CacheFormat::mxfp4:
        return &arrays->mxfp4.payload[token][column / 32][column % 32 / 2];
    case CacheFormat::mxfp4_rowgroup:
        return &arrays->rowgroup.payload[column / 32][token][column % 32 / 2];
    default:
        return &arrays->fp8.payload[token][column];
    }
}

/// The byte that holds the scale of block `block` of token `token`; of an FP32 scale, its byte `block`.
inline uint8_t* scale_byte(CacheFormat format, uint8_t* page, int token, int block) {
    auto* arrays = reinterpret_cast<Page*>(page);
    switch (format) {
    case CacheFormat::mxfp4:
        return &arrays->mxfp4.scales[token][block];
    case CacheFormat::mxfp4_rowgroup:
        return &arrays->rowgroup.scales[block][token % 16][token / 16];
    default:
        return &arrays->fp8.scales[token][block];
    }
}

/// Byte of (row, head, column) in the query buffer, counted in whole rows and heads.
inline int64_t query_payload_at(CacheFormat format, int heads, int64_t row, int head, int column) {
    if (format == CacheFormat::mxfp4_rowgroup) {
        return (row * heads + head) * 64 + column / 2;
    }
    if (format == CacheFormat::mxfp4) {
        return row * heads * 128 + head * 64 + column / 2;
    }
    return (row * heads + head) * 128 + column;
}

/// Byte of the scale of (row, head, block) in the query buffer.
inline int64_t query_scale_at(CacheFormat format, int heads, int64_t max_rows, int64_t row, int head, int block) {
    if (format == CacheFormat::mxfp4_rowgroup) {
        // behind the payload of every row: [row][block][head % 16][head / 16]
        return max_rows * heads * 64 + ((row * 4 + block) * 16 + head % 16) * 4 + head / 16;
    }
    return row * heads * 128 + heads * 64 + head * 4 + block;
}

}  // namespace test
}  // namespace stepgraph
