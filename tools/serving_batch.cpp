#include "serving_batch.h"

#include <algorithm>
#include <numeric>

namespace stepgraph::tools {

ServingBatch::ServingBatch(const Geometry& geometry, std::span<const TraceRequest> trace, const ServingPolicy& policy,
                           uint64_t seed)
    : seq_lens(static_cast<size_t>(geometry.max_requests)),
      query_lens(static_cast<size_t>(geometry.max_requests)),
      num_requests(1),
      block_table(static_cast<size_t>(geometry.max_requests * geometry.block_table_stride), -1),
      geometry_(geometry),
      trace_(trace),
      policy_(policy),
      random_(seed),
      free_pages_(static_cast<size_t>(geometry.pages)) {
    std::iota(free_pages_.begin(), free_pages_.end(), 0);
    std::shuffle(free_pages_.begin(), free_pages_.end(), random_);  // no test of ours should lean on pages in order
}

bool ServingBatch::done() const {
    return requests_.empty() && policy_.step_ms > 0 && next_ == trace_.size();
}

bool ServingBatch::next_has_come() const {
    return policy_.step_ms == 0 || (next_ < trace_.size() && trace_[next_].arrival_ms <= now_ms_);
}

bool ServingBatch::admit() {
    if (!next_has_come() || requests_.size() == seq_lens.size()) {
        return false;
    }
    const TraceRequest& next = trace_[next_ % trace_.size()];
    const int most = static_cast<int>(geometry_.max_model_len);
    const int prompt = std::clamp(next.prompt_tokens / policy_.shrink, 1, most - 1);
    const int generated = std::clamp(next.generated_tokens / policy_.shrink, 1, most - prompt);
    // All pages that it can come to need are promised at once: a request that was let in is never thrown out again.
    const auto needed = static_cast<size_t>(pages_for(prompt + generated));
    if (free_pages_.size() - promised_ < needed) {
        return false;
    }
    promised_ += needed;
    cut_ += (next.prompt_tokens + int64_t{next.generated_tokens}) / policy_.shrink > most ? 1 : 0;
    requests_.push_back({.context = prompt, .remaining = generated, .promised = needed, .pages = {}});
    grow(requests_.back(), prompt);
    ++next_;
    return true;
}

void ServingBatch::grow(Request& request, int tokens) {
    while (static_cast<int>(request.pages.size()) < pages_for(tokens)) {
        request.pages.push_back(free_pages_.back());
        free_pages_.pop_back();
        --promised_;
    }
}

std::vector<ServingBatch::Arrival> ServingBatch::begin_step(int step) {
    if (requests_.empty() && policy_.step_ms > 0 && next_ < trace_.size()) {
        now_ms_ = std::max<double>(now_ms_, trace_[next_].arrival_ms);  // nothing happens until then
    }
    std::vector<Arrival> arrivals;
    while (admit()) {
        arrivals.push_back({static_cast<int>(requests_.size()) - 1, requests_.back().context});
    }
    lay_out(step);
    return arrivals;
}

void ServingBatch::lay_out(int step) {
    const auto present = static_cast<int>(requests_.size());
    const bool pause = policy_.pause_every > 0 && step % policy_.pause_every == policy_.pause_every - 1;
    num_requests.front() = pause ? (present + 1) / 2 : present;
    const bool draft = step % policy_.draft_every == policy_.draft_every - 1;
    int spare_rows = geometry_.max_rows - live();
    for (int q = 0; q < live(); ++q) {
        const auto i = static_cast<size_t>(q);
        Request& request = requests_[i];
        const int most = std::min({policy_.drafts, spare_rows, request.remaining - 1});
        const int drafts = draft ? static_cast<int>(random_() % static_cast<uint64_t>(most + 1)) : 0;
        spare_rows -= drafts;
        query_lens[i] = 1 + drafts;
        seq_lens[i] = request.context + query_lens[i];
        grow(request, seq_lens[i]);
        int32_t* row = block_table.data() + q * geometry_.block_table_stride;
        std::fill(std::copy(request.pages.begin(), request.pages.end(), row), row + geometry_.block_table_columns, -1);
    }
    // Entries behind the live requests keep what an earlier step left there.
}

int ServingBatch::accepted(int rows) {
    std::bernoulli_distribution right(policy_.acceptance);
    int tokens = 1;
    while (tokens < rows && right(random_)) {
        ++tokens;
    }
    return tokens;
}

int ServingBatch::end_step() {
    int tokens = 0;
    for (int q = 0; q < live(); ++q) {
        const auto i = static_cast<size_t>(q);
        const int of_request = accepted(query_lens[i]);
        requests_[i].context += of_request;
        requests_[i].remaining -= of_request;
        tokens += of_request;
    }
    const auto complete = [this](Request& request) {
        if (request.remaining <= 0) {
            promised_ -= request.promised - request.pages.size();
            free_pages_.insert(free_pages_.begin(), request.pages.begin(), request.pages.end());
        }
        return request.remaining <= 0;
    };
    requests_.erase(std::remove_if(requests_.begin(), requests_.end(), complete), requests_.end());
    now_ms_ += policy_.step_ms;
    return tokens;
}

int ServingBatch::rows() const {
    return std::accumulate(query_lens.begin(), query_lens.begin() + live(), 0);
}

int64_t ServingBatch::keys() const {
    return std::accumulate(seq_lens.begin(), seq_lens.begin() + live(), int64_t{0});
}

int64_t ServingBatch::slot(int request, int position) const {
    return int64_t{pages(request)[static_cast<size_t>(position / page_tokens)]} * page_tokens + position % page_tokens;
}

std::vector<int> serving_buckets(int max_rows) {
    std::vector<int> buckets;
    for (int bucket = 1; bucket < max_rows; bucket *= 2) {
        buckets.push_back(bucket);
    }
    buckets.push_back(max_rows);
    return buckets;
}

}  // namespace stepgraph::tools
