#include "score.h"

#include <algorithm>
#include <limits>
#include <vector>

#include <stepgraph/layouts/query_row.h>

namespace stepgraph::reference {
namespace {

/// The query of one row, column-major: [128][heads], so that the loop over heads is the innermost and vectorises without
/// changing the order in which the columns of a dot product are added.
std::vector<float> query_of_row(const ScoreArgs& args, int row) {
    std::vector<float> query(static_cast<size_t>(head_dim) * static_cast<size_t>(args.heads));
    const auto heads = static_cast<size_t>(args.heads);
    for (int head = 0; head < args.heads; ++head) {
        for (int c = 0; c < head_dim; ++c) {
            query[static_cast<size_t>(c) * heads + static_cast<size_t>(head)] =
                query_value(args.format, args.query, args.heads, args.max_rows, row, head, c);
        }
    }
    return query;
}

float logit(const ScoreArgs& args, const std::vector<float>& query, const float* weights, const uint8_t* page, int token) {
    float dots[64] = {};
    for (int c = 0; c < head_dim; ++c) {
        const float key = key_value(args.format, page, token, c);
        const float* column = query.data() + c * args.heads;
        for (int head = 0; head < args.heads; ++head) {
            dots[head] += column[head] * key;
        }
    }
    float sum = 0.0F;
    for (int head = 0; head < args.heads; ++head) {
        sum += weights[head] * relu_keep_nan(dots[head]);
    }
    return sum * key_scale(args.format, page, token);
}

}  // namespace

void score(const ScoreArgs& args) {
    for (int row = 0; row < args.rows; ++row) {
        const int end = args.ends[row];
        const int request = args.row_request[row];
        if (request < 0 || end <= args.unscored_bound) {
            continue;
        }
        // The last row of a request has its largest bound, so it meets every block that the others do.
        const bool last_of_request = row + 1 == std::min(args.starts[request + 1], args.rows);
        const int32_t* blocks = args.block_table + request * args.block_table_stride;
        const std::vector<float> query = query_of_row(args, row);
        float* logits = args.logits + row * args.logits_stride;
        for (int j = 0; j < end; ++j) {
            const int64_t slot = slot_of(blocks, j, args.pages);
            if (slot < 0) {
                logits[j] = -std::numeric_limits<float>::infinity();
                if (last_of_request && j % page_tokens == 0) {
                    count(&args.status->invalid_blocks);
                }
                continue;
            }
            const uint8_t* page = page_address(args.cache, slot / page_tokens, args.page_stride_bytes);
            logits[j] =
                logit(args, query, args.head_weights + static_cast<int64_t>(row) * args.heads, page, j % page_tokens);
        }
    }
}

}  // namespace stepgraph::reference
