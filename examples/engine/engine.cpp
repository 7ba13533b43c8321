#include "engine.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "model.h"

namespace {

constexpr int block_tokens = 64;
constexpr int rows_of_request = max_rows / max_requests;

/// Stands in for a draft model: right two times out of three.
std::vector<int> draft(std::vector<int> tokens, int count) {
    std::vector<int> drafts;
    for (int i = 0; i < count; ++i) {
        const int right = model::predict(tokens, static_cast<int>(tokens.size()));
        drafts.push_back(tokens.size() % 3 == 0 ? (right + 1) % model::words : right);
        tokens.push_back(drafts.back());
    }
    return drafts;
}

/// The rows of a request in the next step: a piece of its prompt, or its last token and drafts behind it.
Scheduled schedule(const Request& request, int drafts) {
    const int known = static_cast<int>(request.tokens.size()) - request.computed;
    Scheduled scheduled{request.tokens, request.computed, std::min(known, rows_of_request), request.blocks};
    if (scheduled.rows == known) {
        const int count = std::min({drafts, rows_of_request - known, request.generate - 1});
        const std::vector<int> guesses = draft(request.tokens, count);
        scheduled.tokens.insert(scheduled.tokens.end(), guesses.begin(), guesses.end());
        scheduled.rows += count;
    }
    return scheduled;
}

/// Takes what a step said of a request; returns the drafts that were right. The keys of those that were not stay in the
/// cache behind `computed`: no row sees them, and the next step's keys take their place.
int accept(Request& request, const Scheduled& scheduled, const int* predictions) {
    int end = request.computed + scheduled.rows;  // of the rows that count, the last one's prediction not among them
    const int known = static_cast<int>(request.tokens.size());
    int accepted = 0;
    for (int position = request.computed; position < end; ++position) {
        const int prediction = predictions[position - request.computed];
        if (position + 1 < known) {
            continue;  // the prompt says what follows
        }
        request.tokens.push_back(prediction);
        --request.generate;
        if (position + 1 == end || scheduled.tokens[static_cast<size_t>(position) + 1] != prediction) {
            end = position + 1;
        } else {
            ++accepted;
        }
    }
    request.computed = end;
    return accepted;
}

}  // namespace

BlockManager::BlockManager() : free_(cache_blocks) {
    std::iota(free_.begin(), free_.end(), 0);
}

bool BlockManager::grow(std::vector<int>& blocks, int tokens) {
    const int missing = (tokens + block_tokens - 1) / block_tokens - static_cast<int>(blocks.size());
    if (missing > free_blocks()) {
        return false;
    }
    for (int i = 0; i < missing; ++i) {
        blocks.push_back(free_.back());
        free_.pop_back();
    }
    return true;
}

void BlockManager::release(std::vector<int>& blocks) {
    free_.insert(free_.begin(), blocks.begin(), blocks.end());
    blocks.clear();
}

Served serve(std::vector<Request> requests, int drafts, const RunStep& run_step) {
    BlockManager manager;
    Served served;
    std::vector<Request*> running;
    size_t arrived = 0;
    while (arrived < requests.size() || !running.empty()) {
        // A request is let in when its blocks are there to the end, so that none has to be put back.
        while (arrived < requests.size() && running.size() < max_requests) {
            Request& next = requests[arrived];
            if (!manager.grow(next.blocks, static_cast<int>(next.tokens.size()) + next.generate)) {
                break;
            }
            running.push_back(&next);
            ++arrived;
        }
        if (running.empty()) {
            throw std::runtime_error("a request needs more blocks than the cache has");
        }
        std::vector<Scheduled> step;
        for (const Request* request : running) {
            step.push_back(schedule(*request, drafts));
        }
        const std::vector<int> predictions = run_step(step);
        ++served.steps;
        const int* at = predictions.data();
        for (size_t i = 0; i < step.size(); ++i) {
            served.drafts_accepted += accept(*running[i], step[i], at);
            at += step[i].rows;
            if (running[i]->generate == 0) {
                manager.release(running[i]->blocks);
            }
        }
        std::erase_if(running, [](const Request* request) { return request->generate == 0; });
    }
    if (manager.free_blocks() != cache_blocks) {
        throw std::runtime_error("blocks were lost");
    }
    for (Request& request : requests) {
        served.tokens.push_back(std::move(request.tokens));
    }
    return served;
}
