// Requests, their blocks, and the loop that serves them.
#pragma once

#include <functional>
#include <vector>

inline constexpr int max_requests = 4;  // that are served at a time
inline constexpr int max_rows = 32;     // query rows of a step
inline constexpr int max_blocks = 5;    // of one request, 64 tokens each
inline constexpr int cache_blocks = 12;

/// Hands out the pages of the caches. All layers use the same block of a request, each in its own cache.
class BlockManager {
public:
    BlockManager();
    [[nodiscard]] int free_blocks() const { return static_cast<int>(free_.size()); }
    /// Gives `blocks` enough for `tokens` tokens; false where there are too few, and nothing is given.
    bool grow(std::vector<int>& blocks, int tokens);
    void release(std::vector<int>& blocks);

private:
    std::vector<int> free_;
};

struct Request {
    std::vector<int> tokens;  // prompt, and what was generated behind it
    int generate = 0;         // tokens still to come
    int computed = 0;         // tokens whose keys are in the caches
    std::vector<int> blocks;
};

/// A request's part of a step: rows for the tokens behind `computed`, drafts among them.
struct Scheduled {
    std::vector<int> tokens;  // the request's, and the drafts behind them
    int computed = 0;
    int rows = 0;
    std::vector<int> blocks;
};

/// Runs a step; returns the prediction of each row, request after request.
using RunStep = std::function<std::vector<int>(const std::vector<Scheduled>&)>;

struct Served {
    std::vector<std::vector<int>> tokens;  // of each request, in the order they came
    int steps = 0;
    int drafts_accepted = 0;
};

/// Serves `requests` until each has generated what it wants. Long prompts are computed in pieces; behind a prompt, each step
/// has up to `drafts` verify rows a request. Throws std::runtime_error where the requests do not fit the cache.
Served serve(std::vector<Request> requests, int drafts, const RunStep& run_step);
