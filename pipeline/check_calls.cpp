#include "check_calls.h"

#include <algorithm>
#include <string>

#include <stepgraph/kernels/error.h>

namespace stepgraph {

void check_bound(bool bound, const char* call) {
    if (!bound) {
        throw Error(ErrorCode::wrong_order, std::string(call) + " was called before bind, must follow it");
    }
}

void check_outside_callback(bool in_callback, const char* call) {
    if (in_callback) {
        throw Error(ErrorCode::wrong_order, std::string(call) + " was called from after_layer, must not be");
    }
}

void check_rows(int rows, int max_rows) {
    if (rows < 1 || rows > max_rows) {
        throw Error(ErrorCode::invalid_rows,
                    "rows is " + std::to_string(rows) + ", must be 1 to max_rows (" + std::to_string(max_rows) + ")");
    }
}

void check_layer(int layer, size_t layers) {
    if (layer < 0 || static_cast<size_t>(layer) >= layers) {
        throw Error(ErrorCode::invalid_layer, "layer is " + std::to_string(layer) + ", must be 0 to " +
                                                  std::to_string(layers - 1) + ", for " + std::to_string(layers) +
                                                  " were bound");
    }
}

void check_layout(int layout_rows, int rows) {
    if (layout_rows == 0) {
        throw Error(ErrorCode::wrong_order, "enqueue_layer was called before enqueue_layout, must follow it");
    }
    if (layout_rows != rows) {
        throw Error(ErrorCode::invalid_rows, "rows is " + std::to_string(rows) + ", must be " + std::to_string(layout_rows) +
                                                 ", for which the layout was enqueued");
    }
}

void check_replay(int rows, int largest_bucket) {
    if (largest_bucket == 0) {
        throw Error(ErrorCode::wrong_order, "replay was called before capture, must follow it");
    }
    if (rows < 1 || rows > largest_bucket) {
        throw Error(ErrorCode::invalid_rows, "rows is " + std::to_string(rows) +
                                                 ", must be 1 to the largest captured bucket (" +
                                                 std::to_string(largest_bucket) + ")");
    }
}

std::vector<int> checked_buckets(std::vector<int> buckets, int max_rows) {
    if (buckets.empty()) {
        throw Error(ErrorCode::invalid_rows, "buckets is empty, must hold at least one row count");
    }
    for (const int rows : buckets) {
        if (rows < 1 || rows > max_rows) {
            throw Error(ErrorCode::invalid_rows, "a bucket is " + std::to_string(rows) + " rows, must be 1 to max_rows (" +
                                                     std::to_string(max_rows) + ")");
        }
    }
    std::sort(buckets.begin(), buckets.end());
    buckets.erase(std::unique(buckets.begin(), buckets.end()), buckets.end());
    return buckets;
}

}  // namespace stepgraph
