// A small continuous batch: what a serving engine keeps about its requests, and hands to the indexer each step.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include <stepgraph/pipeline/geometry.h>

#include "trace_slice.h"

namespace stepgraph::tools {

/// Requests come from a trace, take pages from a free list as they grow, and give them back when they end. Lengths and
/// tables are host arrays in the shapes of StepBuffers.
class ServingBatch {
public:
    /// Lengths of the trace are divided by `shrink`, so that a short run sees requests on both sides of top_k come and go.
    ServingBatch(const Geometry& geometry, std::span<const TraceRequest> trace, int shrink, uint64_t seed);

    /// A request that has just come in: the keys of its prompt are to be written to its pages.
    struct Arrival {
        int request;        // its place in the arrays
        int prompt_tokens;  // of which none is cached
    };

    /// Admits what fits, and lays out step number `step`: one row a request, now and then some verify rows for one of them,
    /// now and then only the first half of the requests.
    std::vector<Arrival> begin_step(int step);
    /// Accepts the step's tokens (of verify rows, some), ends what is complete and closes the gaps.
    void end_step();

    [[nodiscard]] int rows() const;
    [[nodiscard]] int live() const { return num_requests.front(); }
    [[nodiscard]] int64_t keys() const;  ///< positions that the step's rows see, each request once
    /// The slot of position `position` of a request.
    [[nodiscard]] int64_t slot(int request, int position) const;

    std::vector<int32_t> seq_lens, query_lens;  // [max_requests]
    std::vector<int32_t> num_requests;          // [1]
    std::vector<int32_t> block_table;           // [max_requests, block_table_columns]

private:
    struct Request {
        int context;    // tokens whose keys are final
        int remaining;  // tokens to generate
        std::vector<int32_t> pages;
    };
    bool admit();
    void lay_out(int step);

    Geometry geometry_;
    std::span<const TraceRequest> trace_;
    size_t next_ = 0;
    int shrink_;
    std::mt19937_64 random_;
    std::vector<int32_t> free_pages_;
    std::vector<Request> requests_;
};

}  // namespace stepgraph::tools
