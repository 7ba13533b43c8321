// The MXFP4 query as Hopper's scorer reads it, on the host.
#pragma once

#include <cstdint>

#include <stepgraph/layouts/cache_page.h>

namespace stepgraph::reference {

/// Widens the query of rows [0, rows), see widened_mxfp4.h. `query`: query_bytes() of max_rows, see query_row.h.
/// `widened_query`: [rows, heads, 128]; `widened_weights`: [rows, heads], NaN where a head cannot be widened.
void widen_query(CacheFormat format, int heads, int64_t rows, int64_t max_rows, const uint8_t* query,
                 const float* head_weights, uint8_t* widened_query, float* widened_weights);

}  // namespace stepgraph::reference
