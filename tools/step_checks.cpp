#include "step_checks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace stepgraph::tools {
namespace {

size_t at(int64_t row, int64_t pitch, int64_t column = 0) {
    return static_cast<size_t>(row * pitch + column);
}

std::vector<int32_t> sorted_winners(const float* logits, int32_t end, int32_t top_k) {
    std::vector<int32_t> order(static_cast<size_t>(end));
    std::iota(order.begin(), order.end(), 0);
    const auto value = [logits](int32_t j) {
        return std::isnan(logits[j]) ? -std::numeric_limits<double>::infinity() : double{logits[j]};
    };
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return value(a) > value(b); });
    order.resize(static_cast<size_t>(std::min(end, top_k)));
    std::sort(order.begin(), order.end());
    order.resize(static_cast<size_t>(top_k), -1);
    return order;
}

/// Half the distance between neighbouring codes around `magnitude`, in units of the block's scale.
double half_step(CacheFormat format, double magnitude) {
    if (is_mxfp4(format)) {
        return magnitude <= 2 ? 0.25 : magnitude <= 4 ? 0.5 : 1.0;
    }
    return std::max(std::exp2(std::floor(std::log2(std::max(magnitude, 1e-30))) - 4), std::exp2(-10));
}

}  // namespace

std::string check_selection(const Geometry& geometry, const std::vector<int32_t>& ends, const std::vector<float>& logits,
                            const std::vector<int32_t>& indices) {
    for (size_t row = 0; row < ends.size(); ++row) {
        const auto r = static_cast<int64_t>(row);
        const std::vector<int32_t> expected =
            sorted_winners(logits.data() + at(r, geometry.width()), ends[row], geometry.top_k);
        const auto* actual = indices.data() + at(r, geometry.top_k);
        const auto differ = std::mismatch(expected.begin(), expected.end(), actual);
        if (differ.first != expected.end()) {
            return "row " + std::to_string(row) + ": index " + std::to_string(differ.second - actual) + " is " +
                   std::to_string(*differ.second) + ", a full sort gives " + std::to_string(*differ.first);
        }
    }
    return {};
}

std::vector<double> exact_key(const std::vector<double>& key, const std::vector<float>& weight,
                              const std::vector<float>& bias, double eps) {
    const auto n = static_cast<double>(key.size());
    const double mean = std::accumulate(key.begin(), key.end(), 0.0) / n;
    double variance = 0;
    for (const double x : key) {
        variance += (x - mean) * (x - mean) / n;
    }
    std::vector<double> normed(key.size());
    for (size_t c = 0; c < key.size(); ++c) {
        normed[c] = (key[c] - mean) / std::sqrt(variance + eps) * double{weight[c]} + double{bias[c]};
    }
    return normed;
}

std::string check_key(const Geometry& geometry, const std::vector<uint8_t>& cache, int64_t slot,
                      const std::vector<double>& key) {
    const CacheFormat format = geometry.cache_format;
    const uint8_t* page = page_address(cache.data(), slot / page_tokens, geometry.page_stride_bytes);
    const auto token = static_cast<int>(slot % page_tokens);
    for (int c = 0; c < head_dim; ++c) {
        const double scale = is_mxfp4(format) ? double{ue8m0_scale(page[scale_offset(format, token, c / mxfp4_block)])}
                                              : double{key_scale(format, page, token)};
        const double decoded = double{key_value(format, page, token, c)} * (is_mxfp4(format) ? 1.0 : scale);
        const double want = key[static_cast<size_t>(c)];
        const double rounding = std::abs(want) * std::exp2(-8) + 1e-6;  // of BF16, and of LayerNorm in FP32
        const double allowed = half_step(format, (std::abs(want) + rounding) / scale) * scale + rounding;
        if (!(std::abs(decoded - want) <= allowed)) {
            return "slot " + std::to_string(slot) + ", column " + std::to_string(c) + " decodes to " +
                   std::to_string(decoded) + ", the key is " + std::to_string(want) + " and the format allows " +
                   std::to_string(allowed);
        }
    }
    return {};
}

std::string check_logits(const Geometry& geometry, const std::vector<int32_t>& ends, const std::vector<float>& expected,
                         const std::vector<float>& actual, double tolerance) {
    for (size_t row = 0; row < ends.size(); ++row) {
        const auto first = at(static_cast<int64_t>(row), geometry.width());
        double largest = 0;
        for (size_t j = 0; j < static_cast<size_t>(ends[row]); ++j) {
            const double magnitude = std::abs(double{expected[first + j]});
            largest = std::isfinite(magnitude) ? std::max(largest, magnitude) : largest;
        }
        for (size_t j = 0; j < static_cast<size_t>(ends[row]); ++j) {
            const double want = expected[first + j];
            const double got = actual[first + j];
            const bool same = got == want || (std::isnan(got) && std::isnan(want));  // infinities and NaN only so
            if (!same && !(std::abs(got - want) <= tolerance * largest)) {
                return "row " + std::to_string(row) + ", key " + std::to_string(j) + ": the logit is " +
                       std::to_string(actual[first + j]) + ", the reference's " + std::to_string(expected[first + j]) +
                       ", the row's largest " + std::to_string(largest);
            }
        }
    }
    return {};
}

double logit_tolerance(CacheFormat format) {
    return is_mxfp4(format) ? 4e-3 : 2e-3;
}

}  // namespace stepgraph::tools
