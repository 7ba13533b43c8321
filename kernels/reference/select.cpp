#include "select.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include <stepgraph/layouts/cache_page.h>

namespace stepgraph::reference {
namespace {

std::vector<int32_t> winners_of_row(const float* logits, int end, int top_k) {
    std::vector<int32_t> positions(static_cast<size_t>(end));
    std::iota(positions.begin(), positions.end(), 0);
    if (end <= top_k) {
        return positions;
    }
    const auto rank = [logits](int32_t j) {
        return std::isnan(logits[j]) ? -std::numeric_limits<float>::infinity() : logits[j];
    };
    const auto better = [&rank](int32_t a, int32_t b) { return rank(a) != rank(b) ? rank(a) > rank(b) : a < b; };
    std::nth_element(positions.begin(), positions.begin() + top_k - 1, positions.end(), better);
    positions.resize(static_cast<size_t>(top_k));
    std::sort(positions.begin(), positions.end());
    return positions;
}

/// Block table row of a row that belongs to a request.
const int32_t* blocks_of(const SelectArgs& args, int64_t row) {
    return args.block_table + args.row_request[row] * args.block_table_stride;
}

}  // namespace

void select(const SelectArgs& args) {
    for (int64_t row = 0; row < args.rows; ++row) {
        const float* logits = args.logits + row * args.logits_stride;
        const std::vector<int32_t> winners = winners_of_row(logits, args.ends[row], args.top_k);
        const auto won = static_cast<int>(winners.size());
        if (args.counts != nullptr) {
            args.counts[row] = won;
        }
        for (int i = 0; i < args.top_k; ++i) {
            const int64_t at = row * args.top_k + i;
            const int32_t position = i < won ? winners[static_cast<size_t>(i)] : -1;
            args.indices[at] = position;
            if (args.physical_slots != nullptr) {
                args.physical_slots[at] = position < 0 ? -1 : slot_of(blocks_of(args, row), position, args.pages);
            }
            if (args.winner_logits != nullptr) {
                args.winner_logits[at] = position < 0 ? -std::numeric_limits<float>::infinity() : logits[position];
            }
        }
    }
}

}  // namespace stepgraph::reference
