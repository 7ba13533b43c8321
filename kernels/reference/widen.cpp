#include "widen.h"

#include <algorithm>
#include <limits>

#include <stepgraph/layouts/query_row.h>
#include <stepgraph/layouts/widened_mxfp4.h>

namespace stepgraph::reference {
namespace {

struct Code {
    uint8_t e2m1;
    int scale;  // of its block
};

Code code_at(CacheFormat format, int heads, int64_t max_rows, const uint8_t* query, int64_t row, int head, int column) {
    const uint8_t pair = query[query_payload_offset(format, heads, row, head, column)];
    const int64_t scale = query_scale_offset(format, heads, max_rows, row, head, column / mxfp4_block);
    return {static_cast<uint8_t>(column % 2 == 0 ? pair & 15U : pair >> 4U), query[scale]};
}

}  // namespace

void widen_query(CacheFormat format, int heads, int64_t rows, int64_t max_rows, const uint8_t* query,
                 const float* head_weights, uint8_t* widened_query, float* widened_weights) {
    for (int64_t row = 0; row < rows; ++row) {
        for (int head = 0; head < heads; ++head) {
            const auto code = [&](int column) { return code_at(format, heads, max_rows, query, row, head, column); };
            const auto is_zero = [](const Code& c) { return (c.e2m1 & 7U) == 0; };
            int largest = 0;
            int least = 255;
            for (int column = 0; column < head_dim; ++column) {
                if (!is_zero(code(column))) {
                    largest = std::max(largest, code(column).scale);
                    least = std::min(least, code(column).scale);
                }
            }
            if (largest == 0) {  // any scale fits zeros
                largest = least = widened_scale_of_zeros;
            }
            const bool lost = !can_widen(largest, largest - least);
            const int64_t at = row * heads + head;
            for (int column = 0; column < head_dim; ++column) {
                const Code c = code(column);
                const int difference = lost || is_zero(c) ? 0 : largest - c.scale;
                widened_query[at * head_dim + column] = widened(c.e2m1, static_cast<uint32_t>(difference));
            }
            widened_weights[at] =
                lost ? std::numeric_limits<float>::quiet_NaN() : mul_rn(head_weights[at], widened_scale(largest));
        }
    }
}

}  // namespace stepgraph::reference
