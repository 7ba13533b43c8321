// Steps of random queries and keys to score, and what the host scores them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include <stepgraph/kernels/reference/score.h>
#include <stepgraph/layouts/query_row.h>

#include "page_oracle.h"
#include "random.h"

namespace stepgraph::test {

constexpr float unwritten_logit = -12345.0F;

/// Requests of `query_lens` rows each whose last row sees `lengths` keys, over pages in random order; the last two rows are
/// padding.
struct ScoreCase {
    CacheFormat format = CacheFormat::fp8;
    int heads = 32;
    std::vector<int> query_lens;
    std::vector<int> lengths;
    int columns = 0;
    int64_t pages = 0;
    int64_t page_stride = 0;
    std::vector<int32_t> starts;
    std::vector<int32_t> row_request;
    std::vector<int32_t> ends;
    std::vector<uint8_t> query;
    std::vector<float> head_weights;
    std::vector<uint8_t> cache;
    std::vector<std::vector<int32_t>> table;
    int unscored_bound = 0;

    [[nodiscard]] int rows() const { return static_cast<int>(ends.size()); }
    [[nodiscard]] int64_t width() const { return int64_t{64} * columns; }
    [[nodiscard]] uint8_t* page(int64_t number) { return &cache[static_cast<size_t>(number * page_stride)]; }
};

/// An E4M3 code without NaN, or two E2M1 codes.
inline uint8_t random_codes(Random& random, CacheFormat format) {
    const uint8_t codes = random.byte();
    return !four_bit(format) && codes % 128 == 127 ? 0x38 : codes;
}

/// UE8M0 bytes and FP32 scales of the size that keys and queries of a model have.
inline uint8_t random_scale(Random& random) {
    return static_cast<uint8_t>(random.integer(117, 131));
}

inline void fill_query(Random& random, ScoreCase* c) {
    c->query.resize(static_cast<size_t>(query_bytes(c->format, c->heads, c->rows())));
    for (uint8_t& byte : c->query) {
        byte = random_codes(random, c->format);
    }
    for (int row = 0; row < c->rows() && four_bit(c->format); ++row) {
        for (int i = 0; i < c->heads * 4; ++i) {
            c->query[static_cast<size_t>(query_scale_at(c->format, c->heads, c->rows(), row, i / 4, i % 4))] =
                random_scale(random);
        }
    }
    for (int i = 0; i < c->rows() * c->heads; ++i) {
        c->head_weights.push_back(random.normal(0.02F));
    }
}

inline void fill_cache(Random& random, ScoreCase* c) {
    c->cache.resize(static_cast<size_t>(c->pages * c->page_stride));
    for (uint8_t& byte : c->cache) {
        byte = random_codes(random, c->format);
    }
    for (int64_t page = 0; page < c->pages; ++page) {
        for (int token = 0; token < 64; ++token) {
            const uint8_t token_scale = random_scale(random);
            for (int block = 0; block < 4; ++block) {
                *scale_byte(c->format, c->page(page), token, block) =
                    four_bit(c->format) ? random_scale(random) : token_scale;
            }
            if (c->format == CacheFormat::fp8) {
                const float scale = random.uniform(0.001F, 16.0F);  // any FP32 is a scale, not only powers of two
                std::memcpy(scale_byte(c->format, c->page(page), token, 0), &scale, 4);
            }
        }
    }
}

inline ScoreCase random_case(Random& random, CacheFormat format, int heads, std::vector<int> query_lens,
                             std::vector<int> lengths, int stride_unit = 4) {
    ScoreCase c;
    c.format = format;
    c.heads = heads;
    c.query_lens = std::move(query_lens);
    c.lengths = std::move(lengths);
    c.columns = *std::max_element(c.lengths.begin(), c.lengths.end()) / 64 + 1;
    c.pages = static_cast<int64_t>(c.lengths.size()) * c.columns + 3;
    c.page_stride = own_bytes(format) + stride_unit * random.integer(0, 30);
    std::vector<int32_t> order(static_cast<size_t>(c.pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random.engine());
    c.starts.push_back(0);
    for (size_t q = 0; q < c.lengths.size(); ++q) {
        for (int i = 0; i < c.query_lens[q]; ++i) {
            c.row_request.push_back(static_cast<int32_t>(q));
            c.ends.push_back(std::max(0, c.lengths[q] - c.query_lens[q] + i + 1));
        }
        c.starts.push_back(static_cast<int32_t>(c.ends.size()));
        c.table.emplace_back(order.begin() + static_cast<int64_t>(q) * c.columns,
                             order.begin() + static_cast<int64_t>(q + 1) * c.columns);
    }
    for (int padding = 0; padding < 2; ++padding) {
        c.row_request.push_back(-1);
        c.ends.push_back(0);
    }
    fill_query(random, &c);
    fill_cache(random, &c);
    return c;
}

inline std::vector<float> scored(const ScoreCase& c, const int32_t* table, int64_t table_stride, StepStatus* status) {
    std::vector<float> logits(static_cast<size_t>(c.rows() * c.width()), unwritten_logit);
    reference::score({.format = c.format,
                      .heads = c.heads,
                      .rows = c.rows(),
                      .max_rows = c.rows(),
                      .query = c.query.data(),
                      .head_weights = c.head_weights.data(),
                      .cache = c.cache.data(),
                      .pages = c.pages,
                      .page_stride_bytes = c.page_stride,
                      .block_table = table,
                      .block_table_stride = table_stride,
                      .starts = c.starts.data(),
                      .row_request = c.row_request.data(),
                      .ends = c.ends.data(),
                      .unscored_bound = c.unscored_bound,
                      .logits = logits.data(),
                      .logits_stride = c.width(),
                      .status = status});
    return logits;
}

inline std::vector<float> scored(const ScoreCase& c, StepStatus* status) {
    std::vector<int32_t> table;
    for (const std::vector<int32_t>& row : c.table) {
        table.insert(table.end(), row.begin(), row.end());
        table.push_back(-77);  // rows of the table are further apart than they are long
    }
    return scored(c, table.data(), c.columns + 1, status);
}

}  // namespace stepgraph::test
