// How the benchmarks check what they time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

namespace stepgraph::bench {

struct Difference {
    double largest_error = 0;  // of a logit, relative to its row's largest
    int64_t mismatches = 0;    // elements that are wrong
};

/// Adds what the logits of one row, up to its bound `end`, are off; `tolerance`: of its largest.
inline void compare_logits(Difference& difference, const float* actual, const float* expected, int end, double tolerance) {
    double largest = 0;
    for (int j = 0; j < end; ++j) {
        largest = std::max(largest, std::abs(double{expected[j]}));
    }
    for (int j = 0; j < end; ++j) {
        const double error = std::abs(double{actual[j]} - double{expected[j]}) / largest;
        difference.mismatches += error <= tolerance ? 0 : 1;  // NaN is wrong
        difference.largest_error = std::max(difference.largest_error, error);
    }
}

/// The positions that selection must give for a row without NaN: [top_k], ascending, -1 behind them.
inline std::vector<int32_t> exact_winners(const float* logits, int end, int top_k) {
    const auto k = static_cast<size_t>(top_k);
    std::vector<int32_t> winners;
    if (end <= top_k) {
        for (int j = 0; j < top_k; ++j) {
            winners.push_back(j < end ? j : -1);
        }
        return winners;
    }
    std::vector<float> sorted(logits, logits + end);
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<int64_t>(k) - 1, sorted.end(), std::greater<>());
    const float last = sorted[k - 1];
    auto equal_left =
        static_cast<int64_t>(k) - std::count_if(logits, logits + end, [last](float logit) { return logit > last; });
    for (int j = 0; j < end; ++j) {
        if (logits[j] > last || (logits[j] == last && equal_left-- > 0)) {
            winners.push_back(j);
        }
    }
    return winners;
}

/// How many of `winners` differ from `indices`.
inline int64_t wrong_winners(const std::vector<int32_t>& winners, const int32_t* indices) {
    int64_t wrong = 0;
    for (size_t i = 0; i < winners.size(); ++i) {
        wrong += indices[i] == winners[i] ? 0 : 1;
    }
    return wrong;
}

}  // namespace stepgraph::bench
