#include "decode_layout.h"

#include <algorithm>
#include <stdexcept>

#include <thrust/execution_policy.h>
#include <thrust/for_each.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <thrust/scan.h>

namespace stepgraph {
namespace {

/// Requests whose entries are read.
STEPGRAPH_HD int32_t live_requests(const DecodeLayoutArgs& args) {
    const int32_t live = args.num_requests != nullptr ? *args.num_requests : args.max_requests;
    return live < 0 ? 0 : live < args.max_requests ? live : args.max_requests;
}

/// Rows that live request `q` takes, clamped so that no input can make their sum leave int32.
STEPGRAPH_HD int32_t rows_of_live_request(const DecodeLayoutArgs& args, int32_t q) {
    const int32_t length = args.query_lens[q];
    return length < 0 ? 0 : length < args.rows ? length : args.rows;
}

STEPGRAPH_HD int32_t bound_of(const DecodeLayoutArgs& args, int64_t position) {
    const int64_t width = static_cast<int64_t>(args.columns) * page_tokens;
    const int64_t bound = local_bound(position < 0 ? 0 : position + 1, args.dcp);
    if (bound > width) {
        count(&args.status->clamped_bounds);
        return static_cast<int32_t>(width);
    }
    return static_cast<int32_t>(bound);
}

STEPGRAPH_HD int64_t slot_at(const DecodeLayoutArgs& args, int32_t request, int64_t position) {
    const int64_t local = position < 0 ? -1 : local_position(position, args.dcp);
    if (local < 0) {
        return -1;
    }
    const bool inside = local < static_cast<int64_t>(args.columns) * page_tokens;
    const int64_t slot = inside ? slot_of(args.block_table + request * args.block_table_stride, local, args.pages) : -1;
    if (slot < 0) {
        count(&args.status->invalid_slots);
    }
    return slot;
}

/// A row, the request that it belongs to and that request's first row; `total`: rows of all requests.
STEPGRAPH_HD void lay_out_row(const DecodeLayoutArgs& args, int32_t row, int32_t request, int32_t start, int32_t total) {
    if (row == 0 && total > args.rows) {
        count(&args.status->dropped_rows, static_cast<uint32_t>(total - args.rows));
    }
    if (row >= total) {
        args.row_request[row] = -1;
        args.ends[row] = 0;
        if (args.slots != nullptr) {
            args.slots[row] = -1;
        }
        return;
    }
    // The position uses the length as handed over: where rows were dropped, those that remain keep their place.
    const int64_t position = static_cast<int64_t>(args.seq_lens[request]) - args.query_lens[request] + (row - start);
    args.row_request[row] = request;
    args.ends[row] = bound_of(args, position);
    if (args.slots != nullptr) {
        args.slots[row] = slot_at(args, request, position);
    }
}

/// Element i of the starts, and row i.
struct Count {
    DecodeLayoutArgs args;

    STEPGRAPH_HD void operator()(int32_t i) const {
        const int32_t live = live_requests(args);
        int32_t total = 0;  // rows of the requests up to here
        int32_t start_of_i = 0;
        int32_t request = 0;
        int32_t start = 0;
        for (int32_t q = 0; q < live; ++q) {
            start_of_i = q == i ? total : start_of_i;
            const bool begins_before = total <= i;
            const int32_t end = total + rows_of_live_request(args, q);
            request = begins_before && i < end ? q : request;
            start = begins_before && i < end ? total : start;
            total = end;
        }
        if (i <= args.max_requests) {
            args.starts[i] = i < live ? start_of_i : total;
        }
        if (i < args.rows) {
            lay_out_row(args, i, request, start, total);
        }
    }
};

/// Rows that request `q` takes.
struct RowsOfRequest {
    DecodeLayoutArgs args;

    STEPGRAPH_HD int32_t operator()(int32_t q) const { return q < live_requests(args) ? rows_of_live_request(args, q) : 0; }
};

/// A row, by the starts.
struct LookUp {
    DecodeLayoutArgs args;

    STEPGRAPH_HD void operator()(int32_t row) const {
        const int32_t total = args.starts[args.max_requests];
        const int32_t request = row < total ? request_of(row) : 0;
        lay_out_row(args, row, request, args.starts[request], total);
    }

    /// The q with starts[q] <= row < starts[q + 1]; requests without rows are stepped over.
    STEPGRAPH_HD int32_t request_of(int32_t row) const {
        int32_t first = 0;
        int32_t last = args.max_requests;  // starts[first] <= row < starts[last]
        while (last - first > 1) {
            const int32_t middle = first + (last - first) / 2;
            (args.starts[middle] <= row ? first : last) = middle;
        }
        return first;
    }
};

template <typename Policy>
void decode_layout(const Policy& policy, const DecodeLayoutArgs& args) {
    const auto numbers = thrust::make_counting_iterator<int32_t>(0);
    if (args.max_requests <= most_counted_requests) {
        thrust::for_each(policy, numbers, numbers + std::max(args.max_requests + 1, args.rows), Count{args});
        return;
    }
    // One element more than there are requests: the last one receives the total.
    const auto lengths = thrust::make_transform_iterator(numbers, RowsOfRequest{args});
    thrust::exclusive_scan(policy, lengths, lengths + args.max_requests + 1, args.starts, int32_t{0});
    thrust::for_each(policy, numbers, numbers + args.rows, LookUp{args});
}

/// Hands out a slice of the workspace and takes nothing back: one step needs one temporary.
class SliceAllocator {
public:
    using value_type = char;

    SliceAllocator(void* base, size_t bytes) : next_(static_cast<char*>(base)), left_(bytes) {}

    char* allocate(std::ptrdiff_t bytes) {
        const size_t taken = (static_cast<size_t>(bytes) + 255) / 256 * 256;
        if (taken > left_) {
            throw std::runtime_error("the scan asks for more temporary memory than the workspace has for it");
        }
        char* slice = next_;
        next_ += taken;
        left_ -= taken;
        return slice;
    }

    void deallocate(char* /*slice*/, size_t /*bytes*/) {}

private:
    char* next_;
    size_t left_;
};

}  // namespace

void decode_layout_host(const DecodeLayoutArgs& args) {
    decode_layout(thrust::host, args);
}

void decode_layout_device(const DecodeLayoutArgs& args, void* temporaries, size_t temporary_bytes, cudaStream_t stream) {
    SliceAllocator allocator(temporaries, temporary_bytes);
    decode_layout(thrust::cuda::par_nosync(allocator).on(stream), args);
}

size_t decode_layout_temporary_bytes(int max_requests) {
    // The scan keeps a few words for each of its blocks of some hundred elements; a word an element is far above that.
    return 8192 + (static_cast<size_t>(max_requests) * 4 + 255) / 256 * 256;
}

}  // namespace stepgraph
