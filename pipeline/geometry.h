// The numbers of a pipeline, fixed from construction on.
#pragma once

#include <cstdint>

#include <stepgraph/kernels/error.h>
#include <stepgraph/layouts/cache_page.h>
#include <stepgraph/layouts/decode_layout.h>

namespace stepgraph {

/// What a step computes and how large it can get. Plain data: validate() says whether it makes sense.
struct Geometry {
    int heads = 32;    ///< indexer heads H: 16, 32 or 64, of 128 columns each
    int top_k = 2048;  ///< positions selected per row: 1..4096

    int max_rows = 0;                ///< query rows of the largest bucket: decode tokens, verify rows and padding
    int max_requests = 0;            ///< requests of a step; max_requests * max_rows fits 31 bits
    int64_t max_model_len = 0;       ///< tokens of the longest sequence, over all ranks
    int block_table_columns = 0;     ///< pages of the longest local sequence; width = 64 * columns
    int64_t block_table_stride = 0;  ///< entries from one request's row to the next; 0: block_table_columns

    CacheFormat cache_format = CacheFormat::fp8;
    int64_t pages = 0;              ///< pages of each layer's cache
    int64_t page_stride_bytes = 0;  ///< from one page to the next, a multiple of 4; 0: the format's own bytes

    int q_lora_rank = 0;  ///< columns of q_c, a multiple of 8; 0 together with hidden_size: the engine projects
    int hidden_size = 0;  ///< columns of hidden, a multiple of 8

    int projected_columns = 0;     ///< columns of the packed row; 0: key and weights alone, 128 + heads
    int key_column = 0;            ///< first of the 128 key columns in the packed row
    int weight_column = head_dim;  ///< first of the `heads` head weights in the packed row
    float k_norm_eps = 1e-5F;      ///< of the key's LayerNorm

    ContextParallel dcp{};  ///< decode context parallelism; one rank unless set

    /// Local positions that a request can have.
    [[nodiscard]] int64_t width() const noexcept { return static_cast<int64_t>(block_table_columns) * page_tokens; }
    [[nodiscard]] bool projects() const noexcept { return q_lora_rank > 0 || hidden_size > 0; }
};

/// How a pipeline is enqueued; fixed from construction on.
struct Options {
    /// Whether kernels may start before their predecessors have ended (programmatic dependent launch). The results are the
    /// same bits; off, a step is slower and easier to profile.
    bool programmatic_edges = true;
    /// Score with the kernel that runs everywhere, also where a faster one could be used: on Hopper, where the caches of all
    /// layers and the page stride are multiples of 16 bytes (one that is not, and all layers are scored by the portable
    /// one). It is bit-equal to the reference, and a second opinion; the faster one's logits lie within 2e-3 (FP8) or 4e-3
    /// (MXFP4) of a row's largest of it.
    bool portable_scorer = false;
    /// Select with the kernel that runs everywhere, one block a row that reads its logits up to five times, also on Hopper,
    /// where clusters of blocks read each logit once. The results are the same bits.
    bool portable_select = false;
    /// Query rows for which a tile of logits has room, whatever their lengths; 0: default_tile_rows() of the geometry. Of a
    /// step of shorter rows a tile takes more. Bounds the workspace, not the result.
    int tile_rows = 0;
};

/// Fills in what was left at 0 and checks every number. Needs no GPU. Throws Error(invalid_geometry) with a sentence that
/// names the number, what it was and what it must be.
STEPGRAPH_API Geometry validate(const Geometry& geometry);

/// The rows of a tile: Options::tile_rows or the default, at most max_rows. `geometry` is validated. Throws as validate().
STEPGRAPH_API int resolve_tile_rows(const Geometry& geometry, const Options& options);

}  // namespace stepgraph
