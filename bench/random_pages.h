// Keys that benchmarks read: random pages, and a cache full of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include <stepgraph/layouts/query_row.h>
#include <stepgraph/tools/device_buffer.h>

namespace stepgraph::bench {

inline std::mt19937_64& random_bits() {
    static std::mt19937_64 random{std::random_device{}()};
    return random;
}

/// E4M3 codes of normal values such as index inputs make: the largest of 128 lies near 448.
inline std::vector<uint8_t> random_e4m3(size_t n) {
    std::normal_distribution<float> normal(0.0F, 120.0F);
    std::vector<uint8_t> codes(n);
    std::generate(codes.begin(), codes.end(), [&] { return e4m3_from_float(normal(random_bits())); });
    return codes;
}

/// A UE8M0 scale near 1.
inline uint8_t random_scale_byte() {
    return static_cast<uint8_t>(126 + random_bits()() % 3);
}

/// A query of `rows` rows in the format's layout, see query_row.h: normal codes of FP8, any of MXFP4.
inline std::vector<uint8_t> random_query(CacheFormat format, int heads, int rows) {
    if (!is_mxfp4(format)) {
        return random_e4m3(static_cast<size_t>(query_bytes(format, heads, rows)));
    }
    std::vector<uint8_t> query(static_cast<size_t>(query_bytes(format, heads, rows)));
    std::generate(query.begin(), query.end(), [] { return static_cast<uint8_t>(random_bits()()); });
    for (int row = 0; row < rows; ++row) {
        for (int head = 0; head < heads; ++head) {
            for (int block = 0; block < 4; ++block) {
                query[static_cast<size_t>(query_scale_offset(format, heads, rows, row, head, block))] = random_scale_byte();
            }
        }
    }
    return query;
}

/// [requests, columns]: each request has `used` pages of its own, scattered over a cache that holds no others; -1 behind
/// them.
inline std::vector<int32_t> random_block_table(int requests, int used, int columns) {
    std::vector<int32_t> pages(static_cast<size_t>(requests) * static_cast<size_t>(used));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random_bits());
    std::vector<int32_t> table(static_cast<size_t>(requests) * static_cast<size_t>(columns), -1);
    for (int64_t q = 0; q < requests; ++q) {
        std::copy_n(pages.begin() + q * used, used, table.begin() + q * columns);
    }
    return table;
}

/// Pages of `fp8` with normal keys, or of an MXFP4 format with any codes; scales a few powers of two.
inline std::vector<uint8_t> random_pages(CacheFormat format, int64_t pages) {
    const int bytes = page_bytes(format);
    std::vector<uint8_t> all(static_cast<size_t>(pages * bytes));
    if (is_mxfp4(format)) {
        std::generate(all.begin(), all.end(), [] { return static_cast<uint8_t>(random_bits()()); });
    } else {
        all = random_e4m3(all.size());
    }
    for (int64_t page = 0; page < pages; ++page) {
        for (int token = 0; token < page_tokens; ++token) {
            for (int block = 0; block < 4 && is_mxfp4(format); ++block) {
                all[static_cast<size_t>(page * bytes + scale_offset(format, token, block))] = random_scale_byte();
            }
            if (!is_mxfp4(format)) {
                const float scale = std::ldexp(1.0F, -6 - static_cast<int>(random_bits()() % 3));
                std::memcpy(all.data() + page * bytes + scale_offset(format, token, 0), &scale, sizeof scale);
            }
        }
    }
    return all;
}

/// A cache of `bytes` bytes, filled with up to a thousand random pages again and again.
inline tools::DeviceBuffer<uint8_t> random_cache(CacheFormat format, size_t bytes) {
    tools::DeviceBuffer<uint8_t> cache(bytes);
    const auto pages = static_cast<int64_t>(bytes) / page_bytes(format);
    cache.upload(random_pages(format, std::min<int64_t>(pages, 1024)));
    const size_t pool = static_cast<size_t>(std::min<int64_t>(pages, 1024) * page_bytes(format));
    for (size_t filled = pool; filled < bytes; filled *= 2) {
        check_cuda(
            cudaMemcpy(cache.data() + filled, cache.data(), std::min(filled, bytes - filled), cudaMemcpyDeviceToDevice),
            "cudaMemcpy");
    }
    return cache;
}

}  // namespace stepgraph::bench
