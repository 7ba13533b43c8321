#include "case_checks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <numeric>
#include <sstream>

namespace stepgraph::test {
namespace {

using tools::Case;
using tools::StepResults;

constexpr size_t most_differences = 4;  // of one tensor: more of them say no more

bool projected_here(const LoadedCase& loaded) {
    return loaded.step.iq.empty();
}

/// Of the largest logit of a row. Projections made here round once more, in another order.
float logit_tolerance(const LoadedCase& loaded) {
    if (projected_here(loaded)) {
        return 2e-2F;
    }
    return is_mxfp4(loaded.step.geometry.cache_format) ? 4e-3F : 2e-3F;
}

int64_t live_rows(const LoadedCase& loaded, const StepResults& results) {
    return std::clamp<int64_t>(results.starts.back(), 0, loaded.step.geometry.max_rows);
}

class Collector {
public:
    explicit Collector(Differences& out) : out_(out) {}

    template <typename Value>
    void add(const char* tensor, int64_t at, Value was, Value must) {
        if (++seen_ <= most_differences) {
            std::ostringstream text;
            text << tensor << "[" << at << "] is " << +was << ", must be " << +must;
            out_.push_back(text.str());
        }
    }

private:
    Differences& out_;
    size_t seen_ = 0;
};

template <typename Element>
std::vector<Element> expected_tensor(const LoadedCase& loaded, const std::string& name, Differences& out) {
    const auto found = loaded.file.tensors.find("expected." + name);
    if (found == loaded.file.tensors.end() || found->second.dtype != tools::dtype_of<Element>()) {
        out.push_back("expected." + name + " is missing or of another dtype");
        return {};
    }
    return tools::elements_of<Element>(found->second);
}

template <typename Element>
bool same_size(const char* tensor, const std::vector<Element>& a, const std::vector<Element>& b, Differences& out) {
    if (a.size() != b.size()) {
        out.push_back(std::string(tensor) + " has " + std::to_string(a.size()) + " elements, must have " +
                      std::to_string(b.size()));
    }
    return a.size() == b.size();
}

/// The first `elements` of them, bit for bit: floats by value, for these tensors hold no NaN and no -0 that counts.
template <typename Element>
void compare_exactly(const char* tensor, const std::vector<Element>& was, const std::vector<Element>& must, int64_t elements,
                     Differences& out) {
    if (!same_size(tensor, was, must, out)) {
        return;
    }
    Collector collector(out);
    for (int64_t i = 0; i < elements; ++i) {
        const auto at = static_cast<size_t>(i);
        if (was[at] != must[at]) {
            collector.add(tensor, i, was[at], must[at]);
        }
    }
}

template <typename Element>
void compare_exactly(const char* tensor, const std::vector<Element>& was, const std::vector<Element>& must,
                     Differences& out) {
    compare_exactly(tensor, was, must, static_cast<int64_t>(must.size()), out);
}

/// How far two sign-magnitude codes lie apart on the number line.
int code_distance(unsigned a, unsigned b, unsigned sign_bit) {
    const auto place = [sign_bit](unsigned code) {
        const auto magnitude = static_cast<int>(code & (sign_bit - 1));
        return (code & sign_bit) != 0 ? -magnitude : magnitude;
    };
    return std::abs(place(a) - place(b));
}

bool one_code_apart(CacheFormat format, uint8_t a, uint8_t b) {
    if (is_mxfp4(format)) {
        return code_distance(a & 15U, b & 15U, 8) <= 1 && code_distance(a >> 4U, b >> 4U, 8) <= 1;
    }
    return code_distance(a, b, 128) <= 1;
}

/// Which bytes of the cache hold the payload of a key of this step.
std::vector<bool> written_payload(const LoadedCase& loaded, const StepResults& results) {
    const Geometry& g = loaded.step.geometry;
    std::vector<bool> written(loaded.step.cache.size(), false);
    for (int64_t row = 0; row < live_rows(loaded, results); ++row) {
        const int64_t slot = results.slots[static_cast<size_t>(row)];
        if (slot < 0 || slot >= g.pages * page_tokens) {
            continue;
        }
        for (int column = 0; column < head_dim; ++column) {
            const int offset = payload_offset(g.cache_format, static_cast<int>(slot % page_tokens), column);
            written[static_cast<size_t>(slot / page_tokens * g.page_stride_bytes + offset)] = true;
        }
    }
    return written;
}

/// Payload bytes of this step's keys may be one code apart, as few as the tolerance says; scales and all else are exact.
void compare_cache(const LoadedCase& loaded, const StepResults& results, const std::vector<uint8_t>& was,
                   const std::vector<uint8_t>& must, Differences& out) {
    if (!same_size("cache", was, must, out)) {
        return;
    }
    const std::vector<bool> written = written_payload(loaded, results);
    const auto bytes_written = std::count(written.begin(), written.end(), true);
    int64_t apart = 0;
    Collector collector(out);
    for (size_t i = 0; i < must.size(); ++i) {
        if (was[i] == must[i]) {
            continue;
        }
        if (written[i] && one_code_apart(loaded.step.geometry.cache_format, was[i], must[i])) {
            ++apart;
        } else {
            collector.add("cache", static_cast<int64_t>(i), was[i], must[i]);
        }
    }
    const int64_t percent = projected_here(loaded) ? 5 : 1;
    if (apart * 100 > bytes_written * percent) {
        out.push_back("cache: " + std::to_string(apart) + " of " + std::to_string(bytes_written) +
                      " bytes written are one code apart, must be at most " + std::to_string(percent) + " %");
    }
}

float largest_magnitude(const float* values, int64_t n) {
    float largest = 0.0F;
    for (int64_t i = 0; i < n; ++i) {
        largest = std::isfinite(values[i]) ? std::max(largest, std::fabs(values[i])) : largest;
    }
    return largest;
}

/// Rows of `columns`, within `tolerance` of the row's largest; what is not finite must be the same.
void compare_rows(const char* tensor, const std::vector<float>& was, const std::vector<float>& must, int64_t rows,
                  int64_t columns, float tolerance, Differences& out) {
    if (!same_size(tensor, was, must, out)) {
        return;
    }
    Collector collector(out);
    for (int64_t row = 0; row < rows; ++row) {
        const float allowed = tolerance * largest_magnitude(must.data() + row * columns, columns);
        for (int64_t i = row * columns; i < (row + 1) * columns; ++i) {
            const float a = was[static_cast<size_t>(i)];
            const float b = must[static_cast<size_t>(i)];
            const bool same = a == b || (std::isnan(a) && std::isnan(b));
            if (!same && !(std::isfinite(a) && std::isfinite(b) && std::fabs(a - b) <= allowed)) {
                collector.add(tensor, i, a, b);
            }
        }
    }
}

/// Positions of a row by (logit descending, position ascending), by a full sort.
std::vector<int32_t> ranking(const float* logits, int32_t end) {
    std::vector<int32_t> order(static_cast<size_t>(end));
    std::iota(order.begin(), order.end(), 0);
    const auto key = [logits](int32_t j) {
        return std::isnan(logits[j]) ? -std::numeric_limits<float>::infinity() : logits[j];
    };
    std::stable_sort(order.begin(), order.end(), [&key](int32_t a, int32_t b) { return key(a) > key(b); });
    return order;
}

/// Whether the choice between the K-th and the next is clearer than the tolerance.
bool clear_choice(const float* logits, int32_t end, int top_k, float allowed) {
    if (end <= top_k) {
        return true;
    }
    const std::vector<int32_t> order = ranking(logits, end);
    const float last = logits[order[static_cast<size_t>(top_k) - 1]];
    const float next = logits[order[static_cast<size_t>(top_k)]];
    return last - next > allowed;
}

/// Rows whose choice the expected logits leave open are not compared, for the results' own logits decide there.
void compare_indices(const LoadedCase& loaded, const std::vector<int32_t>& was, const std::vector<int32_t>& must,
                     const std::vector<int32_t>& ends, const std::vector<float>& logits, Differences& out) {
    const Geometry& g = loaded.step.geometry;
    if (!same_size("indices", was, must, out)) {
        return;
    }
    Collector collector(out);
    for (int64_t row = 0; row < g.max_rows; ++row) {
        const float* row_logits = logits.data() + row * g.width();
        const float allowed = logit_tolerance(loaded) * largest_magnitude(row_logits, g.width());
        if (!clear_choice(row_logits, ends[static_cast<size_t>(row)], g.top_k, allowed)) {
            continue;
        }
        for (int64_t i = row * g.top_k; i < (row + 1) * g.top_k; ++i) {
            const auto at = static_cast<size_t>(i);
            if (was[at] != must[at]) {
                collector.add("indices", i, was[at], must[at]);
            }
        }
    }
}

}  // namespace

std::vector<std::string> case_names() {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(STEPGRAPH_TEST_DATA)) {
        if (entry.path().extension() == ".safetensors") {
            names.push_back(entry.path().stem().string());
        }
    }
    std::sort(names.begin(), names.end());
    return names;
}

std::string case_path(const std::string& name) {
    return std::string(STEPGRAPH_TEST_DATA) + "/" + name + ".safetensors";
}

LoadedCase load(const std::string& name) {
    tools::Safetensors file = tools::read_safetensors(case_path(name));
    Case step = tools::case_of(file);
    return {name, std::move(file), std::move(step)};
}

Differences differences_from_expected(const LoadedCase& loaded, const StepResults& results) {
    const Geometry& g = loaded.step.geometry;
    Differences out;
    const auto starts = expected_tensor<int32_t>(loaded, "starts", out);
    const auto ends = expected_tensor<int32_t>(loaded, "ends", out);
    const auto slots = expected_tensor<int64_t>(loaded, "slots", out);
    const auto head_weights = expected_tensor<float>(loaded, "head_weights", out);
    const auto cache = expected_tensor<uint8_t>(loaded, "cache", out);
    const auto logits = expected_tensor<float>(loaded, "logits", out);
    const auto indices = expected_tensor<int32_t>(loaded, "indices", out);
    if (!out.empty()) {
        return out;
    }
    compare_exactly("starts", results.starts, starts, out);
    if (!out.empty()) {
        return out;  // they say which rows count
    }
    // Of padding only the indices count.
    const int64_t live = live_rows(loaded, results);
    compare_exactly("ends", results.ends, ends, live, out);
    compare_exactly("slots", results.slots, slots, live, out);
    if (!out.empty()) {
        return out;  // they say which bytes and positions count
    }
    // The weights are rounded in one stated order: exact, unless the projections before them were rounded in another.
    const float weight_tolerance = projected_here(loaded) ? logit_tolerance(loaded) : 0.0F;
    compare_rows("head_weights", results.head_weights, head_weights, live, g.heads, weight_tolerance, out);
    compare_cache(loaded, results, results.cache, cache, out);
    compare_rows("logits", results.logits, logits, live, g.width(), logit_tolerance(loaded), out);
    compare_indices(loaded, results.indices, indices, results.ends, logits, out);
    return out;
}

Differences differences_from_own_logits(const LoadedCase& loaded, const StepResults& results) {
    const Geometry& g = loaded.step.geometry;
    std::vector<int32_t> indices(results.indices.size(), -1);
    std::vector<int64_t> physical_slots(results.indices.size(), -1);
    for (int q = 0; q < g.max_requests; ++q) {
        const int32_t* blocks = loaded.step.block_table.data() + q * g.block_table_stride;
        const auto first = results.starts[static_cast<size_t>(q)];
        const auto behind = std::min(results.starts[static_cast<size_t>(q) + 1], g.max_rows);
        for (int row = first; row < behind; ++row) {
            std::vector<int32_t> winners =
                ranking(results.logits.data() + row * g.width(), results.ends[static_cast<size_t>(row)]);
            winners.resize(std::min(winners.size(), static_cast<size_t>(g.top_k)));
            std::sort(winners.begin(), winners.end());
            for (size_t i = 0; i < winners.size(); ++i) {
                const size_t at = static_cast<size_t>(row) * static_cast<size_t>(g.top_k) + i;
                indices[at] = winners[i];
                const int64_t block = blocks[winners[i] / page_tokens];
                const bool valid = block >= 0 && block < g.pages;
                physical_slots[at] = valid ? block * page_tokens + winners[i] % page_tokens : -1;
            }
        }
    }
    Differences out;
    compare_exactly("indices", results.indices, indices, out);
    compare_exactly("physical_slots", results.physical_slots, physical_slots, out);
    return out;
}

Differences differences_between(const LoadedCase& loaded, const StepResults& a, const StepResults& b) {
    const Geometry& g = loaded.step.geometry;
    Differences out;
    compare_exactly("starts", a.starts, b.starts, out);
    compare_exactly("ends", a.ends, b.ends, out);
    compare_exactly("slots", a.slots, b.slots, out);
    if (!out.empty()) {
        return out;
    }
    if (projected_here(loaded)) {
        compare_rows("head_weights", a.head_weights, b.head_weights, g.max_rows, g.heads, logit_tolerance(loaded), out);
        compare_cache(loaded, a, a.cache, b.cache, out);
    } else {
        compare_exactly("head_weights", a.head_weights, b.head_weights, out);
        compare_exactly("cache", a.cache, b.cache, out);
    }
    compare_rows("logits", a.logits, b.logits, g.max_rows, g.width(), logit_tolerance(loaded), out);
    compare_indices(loaded, a.indices, b.indices, b.ends, b.logits, out);
    if (!(a.status == b.status)) {
        out.push_back("the status counters differ");
    }
    return out;
}

std::string joined(const Differences& differences) {
    std::string text;
    for (const std::string& difference : differences) {
        text += difference + "\n";
    }
    return text;
}

}  // namespace stepgraph::test
