// A continuous batch: what a serving engine keeps about its requests, and hands to the indexer each step.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include <stepgraph/pipeline/geometry.h>

#include "trace_file.h"

namespace stepgraph::tools {

/// How requests come, guess and pause.
struct ServingPolicy {
    int shrink = 1;  // of the trace's lengths
    /// That a step takes on the trace's clock. 0: all requests have come, and behind the last one the trace begins anew.
    double step_ms = 0;
    int drafts = 3;           // most tokens that a request guesses ahead: verify rows beside its own row
    double acceptance = 0.5;  // that a guess is right, where those before it were
    int draft_every = 1;      // steps
    int pause_every = 0;      // steps: then only the first half of the requests is live; 0: never
};

/// Requests come from a trace, take pages from a free list as they grow, and give them back when they end. Lengths and
/// tables are host arrays in the shapes of StepBuffers. The pages of the geometry hold its longest sequence.
class ServingBatch {
public:
    ServingBatch(const Geometry& geometry, std::span<const TraceRequest> trace, const ServingPolicy& policy, uint64_t seed);

    /// A request that has just come in: the keys of its prompt are to be written to its pages.
    struct Arrival {
        int request;        // its place in the arrays
        int prompt_tokens;  // of which none is cached
    };

    /// Whether nothing is left to decode.
    [[nodiscard]] bool done() const;
    /// Admits what has come and fits, and lays out step number `step`, with at least one live request unless done().
    std::vector<Arrival> begin_step(int step);
    /// Accepts the step's tokens (of verify rows, some), ends what is complete and closes the gaps. Returns the tokens.
    int end_step();

    [[nodiscard]] int rows() const;
    [[nodiscard]] int live() const { return num_requests.front(); }
    [[nodiscard]] int64_t keys() const;                 ///< positions that the step's rows see, each request once
    [[nodiscard]] int64_t cut() const { return cut_; }  ///< requests that were too long for max_model_len
    /// The pages of a request, in the order of its positions, and the slot of one of these.
    [[nodiscard]] std::span<const int32_t> pages(int request) const { return requests_[static_cast<size_t>(request)].pages; }
    [[nodiscard]] int64_t slot(int request, int position) const;

    std::vector<int32_t> seq_lens, query_lens;  // [max_requests]
    std::vector<int32_t> num_requests;          // [1]
    std::vector<int32_t> block_table;           // [max_requests, block_table_columns]

private:
    struct Request {
        int context;      // tokens whose keys are final
        int remaining;    // tokens to generate
        size_t promised;  // pages that it can come to need
        std::vector<int32_t> pages;
    };
    [[nodiscard]] bool next_has_come() const;
    bool admit();
    void grow(Request& request, int tokens);
    void lay_out(int step);
    int accepted(int rows);

    Geometry geometry_;
    std::span<const TraceRequest> trace_;
    ServingPolicy policy_;
    size_t next_ = 0;
    double now_ms_ = 0;  // on the trace's clock
    int64_t cut_ = 0;
    std::mt19937_64 random_;
    std::vector<int32_t> free_pages_;
    size_t promised_ = 0;  // of the free pages, to requests that will grow
    std::vector<Request> requests_;
};

/// Pages that `tokens` tokens take.
constexpr int pages_for(int64_t tokens) {
    return static_cast<int>((tokens + page_tokens - 1) / page_tokens);
}

/// Buckets of a serving loop, ascending: powers of two, and max_rows.
std::vector<int> serving_buckets(int max_rows);

}  // namespace stepgraph::tools
