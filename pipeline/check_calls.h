// Checks of what calls bring, for whatever runs a step: the pipeline, and the host's in Python.
#pragma once

#include <cstddef>
#include <vector>

namespace stepgraph {

// Each throws Error(wrong_order), (invalid_rows) or (invalid_layer) with a sentence that names the call or the number.
void check_bound(bool bound, const char* call);
void check_outside_callback(bool in_callback, const char* call);
void check_rows(int rows, int max_rows);
void check_layer(int layer, size_t layers);
/// A layer of `rows` rows behind the layout of `layout_rows`; 0: none was enqueued.
void check_layout(int layout_rows, int rows);
/// A replay of `rows` rows; 0 as the largest bucket: none was captured.
void check_replay(int rows, int largest_bucket);

/// The buckets in ascending order, each once.
std::vector<int> checked_buckets(std::vector<int> buckets, int max_rows);

}  // namespace stepgraph
