#include "serving_batch.h"

#include <algorithm>
#include <numeric>

namespace stepgraph::tools {
namespace {

constexpr int most_verify_rows = 4;

int pages_for(int tokens) {
    return (tokens + page_tokens - 1) / page_tokens;
}

}  // namespace

ServingBatch::ServingBatch(const Geometry& geometry, std::span<const TraceRequest> trace, int shrink, uint64_t seed)
    : seq_lens(static_cast<size_t>(geometry.max_requests)),
      query_lens(static_cast<size_t>(geometry.max_requests)),
      num_requests(1),
      block_table(static_cast<size_t>(geometry.max_requests * geometry.block_table_stride), -1),
      geometry_(geometry),
      trace_(trace),
      shrink_(shrink),
      random_(seed),
      free_pages_(static_cast<size_t>(geometry.pages)) {
    std::iota(free_pages_.begin(), free_pages_.end(), 0);
    std::shuffle(free_pages_.begin(), free_pages_.end(), random_);  // no test of ours should lean on pages in order
}

bool ServingBatch::admit() {
    const TraceRequest& next = trace_[next_ % trace_.size()];
    const int most = static_cast<int>(geometry_.max_model_len) - most_verify_rows;
    const int prompt = std::clamp(next.prompt_tokens / shrink_, 1, most - 1);
    const int generated = std::clamp(next.generated_tokens / shrink_, 1, most - prompt);
    // All pages that it can come to need are put aside at once: a request that was let in is never thrown out again.
    const auto needed = static_cast<size_t>(pages_for(prompt + generated + most_verify_rows));
    if (requests_.size() == seq_lens.size() || free_pages_.size() < needed) {
        return false;
    }
    Request request{prompt, generated, {free_pages_.end() - static_cast<int64_t>(needed), free_pages_.end()}};
    free_pages_.resize(free_pages_.size() - needed);
    requests_.push_back(std::move(request));
    ++next_;
    return true;
}

std::vector<ServingBatch::Arrival> ServingBatch::begin_step(int step) {
    std::vector<Arrival> arrivals;
    while (admit()) {
        arrivals.push_back({static_cast<int>(requests_.size()) - 1, requests_.back().context});
    }
    lay_out(step);
    return arrivals;
}

void ServingBatch::lay_out(int step) {
    const auto present = static_cast<int>(requests_.size());
    num_requests.front() = step % 7 == 6 ? (present + 1) / 2 : present;
    const int verified = step % 5 == 3 ? static_cast<int>(random_() % static_cast<uint64_t>(live())) : -1;
    const int spare_rows = geometry_.max_rows - live();
    for (int q = 0; q < live(); ++q) {
        const auto i = static_cast<size_t>(q);
        const Request& request = requests_[i];
        const int verify = q == verified ? std::min({most_verify_rows - 1, spare_rows, request.remaining - 1}) : 0;
        query_lens[i] = 1 + std::max(0, verify);
        seq_lens[i] = request.context + query_lens[i];
        for (int column = 0; column < geometry_.block_table_columns; ++column) {
            const bool used = column < pages_for(seq_lens[i]);
            block_table[static_cast<size_t>(q * geometry_.block_table_stride + column)] =
                used ? request.pages[static_cast<size_t>(column)] : -1;
        }
    }
    // Entries behind the live requests keep what an earlier step left there.
}

void ServingBatch::end_step() {
    for (int q = 0; q < live(); ++q) {
        const auto i = static_cast<size_t>(q);
        const int accepted = 1 + static_cast<int>(random_() % static_cast<uint64_t>(query_lens[i]));
        requests_[i].context += accepted;
        requests_[i].remaining -= accepted;
    }
    const auto complete = [this](Request& request) {
        if (request.remaining <= 0) {
            free_pages_.insert(free_pages_.begin(), request.pages.begin(), request.pages.end());
        }
        return request.remaining <= 0;
    };
    requests_.erase(std::remove_if(requests_.begin(), requests_.end(), complete), requests_.end());
}

int ServingBatch::rows() const {
    return std::accumulate(query_lens.begin(), query_lens.begin() + live(), 0);
}

int64_t ServingBatch::keys() const {
    return std::accumulate(seq_lens.begin(), seq_lens.begin() + live(), int64_t{0});
}

int64_t ServingBatch::slot(int request, int position) const {
    const auto& pages = requests_[static_cast<size_t>(request)].pages;
    return int64_t{pages[static_cast<size_t>(position / page_tokens)]} * page_tokens + position % page_tokens;
}

}  // namespace stepgraph::tools
