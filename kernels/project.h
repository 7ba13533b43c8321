// Project: the BF16 products that make the indexer's query, key and head weights, by cuBLASLt. project_sm90.h has Hopper's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "error.h"

namespace stepgraph {

/// One product out[rows, columns] = bf16(x[rows, depth] . w[columns, depth]^T), FP32 accumulation.
struct ProductShape {
    int columns;
    int depth;
};

/// Bytes of workspace that a product is given, 256-byte aligned.
inline constexpr size_t product_workspace_bytes = size_t{32} << 20U;

/// Products of one shape for every row count up to `max_rows`, all by one algorithm: a row's bits do not depend on how many
/// others there are.
///
/// Construction asks cuBLASLt for its algorithms for `max_rows` and tries them in captures that are thrown away: that loads
/// the kernels and shows that a product is one kernel and nothing else. Row counts are served by the next power of two (at
/// most max_rows), so x and out hold max_rows rows; what stands in rows behind the wanted ones is overwritten. Movable, not
/// copyable. Throws Error(cublas) or Error(cuda).
class Product {
public:
    Product(ProductShape shape, int max_rows);
    ~Product();
    Product(Product&&) noexcept;
    Product& operator=(Product&&) noexcept;

    /// Enqueues one kernel on `stream`; no synchronisation, no allocation, legal in capture. 1 <= rows <= max_rows. Pointers
    /// are 16-byte aligned. The workspace must outlive a captured graph.
    void enqueue(const __nv_bfloat16* x, const __nv_bfloat16* w, __nv_bfloat16* out, int rows, void* workspace,
                 cudaStream_t stream) const;

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace stepgraph
