#include "score.h"

#include <cuda_runtime.h>

#include <stepgraph/layouts/cache_page.h>
#include <stepgraph/layouts/query_row.h>

#include "block_instructions.h"

namespace stepgraph {
namespace {

constexpr int threads = 256;
constexpr int head_groups = threads / page_tokens;  // a thread owns one key and every fourth group of heads
constexpr int group_heads = 4;                      // heads that a thread sums at a time
constexpr int key_pitch = head_dim + 4;             // floats: eight lanes that read 16 bytes each meet different banks

/// Shared memory of a block, in floats.
struct SharedMap {
    float* keys;   // [64][key_pitch]
    float* query;  // [heads][128]
    float* terms;  // [heads][64] weight * relu(dot)

    __device__ SharedMap(float* base, int heads)
        : keys(base), query(keys + page_tokens * key_pitch), terms(query + heads * head_dim) {}

    static size_t bytes(int heads) {
        return sizeof(float) * static_cast<size_t>(page_tokens * key_pitch + heads * (head_dim + page_tokens));
    }
};

/// One page of one request, and the rows of the tile that it is scored for.
struct Piece {
    int request;
    int column;     // of the block table
    int first_row;  // inclusive
    int last_row;   // inclusive; has the request's largest bound in this tile
};

/// Piece `index` of the tile: the row whose prefix first exceeds it is the last one of its request.
__device__ Piece find_piece(const ScoreArgs& args, const TileRows& rows, int index) {
    int first = rows.begin;
    int last = rows.end - 1;
    while (first < last) {
        const int middle = first + (last - first) / 2;
        if (args.page_prefix[middle] > index) {
            last = middle;
        } else {
            first = middle + 1;
        }
    }
    const int before = first == rows.begin ? 0 : args.page_prefix[first - 1];
    const int request = args.row_request[first];
    return {request, index - before, max(rows.begin, args.starts[request]), first};
}

__device__ void load_keys(const ScoreArgs& args, const uint8_t* page, float* keys) {
    for (int i = static_cast<int>(threadIdx.x); i < page_tokens * head_dim; i += threads) {
        const int token = i / head_dim;
        const int column = i % head_dim;
        keys[token * key_pitch + column] = key_value(args.format, page, token, column);
    }
}

__device__ void load_query(const ScoreArgs& args, int row, float* query) {
    for (int i = static_cast<int>(threadIdx.x); i < args.heads * head_dim; i += threads) {
        query[i] = query_value(args.format, args.query, args.heads, args.max_rows, row, i / head_dim, i % head_dim);
    }
}

/// Weighted terms of the heads that this thread owns, for its key.
__device__ void compute_terms(const ScoreArgs& args, int row, const SharedMap& shared) {
    const int token = static_cast<int>(threadIdx.x) % page_tokens;
    const float* weights = args.head_weights + static_cast<int64_t>(row) * args.heads;
    const float* key = shared.keys + token * key_pitch;
    for (int head = static_cast<int>(threadIdx.x) / page_tokens * group_heads; head < args.heads;
         head += head_groups * group_heads) {
        float dots[group_heads] = {};
        for (int c = 0; c < head_dim; c += 4) {
            const float4 k = *reinterpret_cast<const float4*>(key + c);
            for (int h = 0; h < group_heads; ++h) {
                const float4 q = *reinterpret_cast<const float4*>(shared.query + (head + h) * head_dim + c);
                // Two roundings, as in the reference: a fused one differs where an MXFP4 product leaves FP32's normal range.
                dots[h] = add_rn(dots[h], mul_rn(q.x, k.x));
                dots[h] = add_rn(dots[h], mul_rn(q.y, k.y));
                dots[h] = add_rn(dots[h], mul_rn(q.z, k.z));
                dots[h] = add_rn(dots[h], mul_rn(q.w, k.w));
            }
        }
        for (int h = 0; h < group_heads; ++h) {
            shared.terms[(head + h) * page_tokens + token] = mul_rn(weights[head + h], relu_keep_nan(dots[h]));
        }
    }
}

/// Adds the terms of all heads for the key of this thread (the first 64 have one) and writes its logit.
__device__ void write_logit(const ScoreArgs& args, int row, int position, const uint8_t* page, const float* terms,
                            const TileShape& shape) {
    const int token = static_cast<int>(threadIdx.x);
    float sum = 0.0F;
    for (int head = 0; head < args.heads; ++head) {
        sum = add_rn(sum, terms[head * page_tokens + token]);
    }
    logits_of_row(args, shape, row)[position] = mul_rn(sum, key_scale(args.format, page, token));
}

__device__ void score_invalid_block(const ScoreArgs& args, const Piece& piece, const TileShape& shape) {
    // Every tile of a straddling request meets the block; the one with the request's last row counts it.
    const bool holds_last_row = piece.last_row + 1 == min(args.starts[piece.request + 1], args.tile.rows);
    if (threadIdx.x == 0 && holds_last_row) {
        count(&args.status->invalid_blocks);
    }
    const int position = piece.column * page_tokens + static_cast<int>(threadIdx.x);
    for (int row = piece.first_row; row <= piece.last_row; ++row) {
        const int end = args.ends[row];
        if (threadIdx.x < page_tokens && end > args.unscored_bound && position < end) {
            logits_of_row(args, shape, row)[position] = -INFINITY;
        }
    }
}

__device__ void score_piece(const ScoreArgs& args, const Piece& piece, const SharedMap& shared, const TileShape& shape) {
    const int64_t block = args.block_table[piece.request * args.block_table_stride + piece.column];
    if (block < 0 || block >= args.pages) {
        score_invalid_block(args, piece, shape);
        return;
    }
    const uint8_t* page = page_address(args.cache, block, args.page_stride_bytes);
    __syncthreads();  // the last piece's readers of the keys are done
    load_keys(args, page, shared.keys);
    const int position = piece.column * page_tokens + static_cast<int>(threadIdx.x);
    for (int row = piece.first_row; row <= piece.last_row; ++row) {
        const int end = args.ends[row];
        if (end <= args.unscored_bound || end <= piece.column * page_tokens) {
            continue;  // the same for every thread
        }
        load_query(args, row, shared.query);
        __syncthreads();  // keys and query are there
        compute_terms(args, row, shared);
        __syncthreads();  // the terms are there, the query may be replaced
        if (threadIdx.x < page_tokens && position < end) {
            write_logit(args, row, position, page, shared.terms, shape);
        }
    }
}

__global__ void __launch_bounds__(threads) score_kernel(ScoreArgs args) {
    const SharedMap shared(reinterpret_cast<float*>(device::dynamic_shared_memory()), args.heads);

    wait_for_producers();  // for keys, query, weights, layout and schedule, and for select's reading of the logits
    let_consumers_start();

    const TileShape shape = args.tile.shape_of_step();
    const TileRows rows(args.tile, shape);
    const int pieces = rows.count() == 0 ? 0 : args.page_prefix[rows.end - 1];
    for (int index = static_cast<int>(blockIdx.x); index < pieces; index += static_cast<int>(gridDim.x)) {
        score_piece(args, find_piece(args, rows, index), shared, shape);
    }
}

}  // namespace

void score(const ScoreArgs& args, int blocks, LaunchContext context) {
    launch(score_kernel, "score", context, static_cast<unsigned>(blocks), threads, SharedMap::bytes(args.heads), args);
}

void prepare_score() {
    prepare_kernel(score_kernel, "score", SharedMap::bytes(64));
}

int score_blocks(int heads) {
    int device = 0;
    int processors = 0;
    int blocks = 0;
    prepare_score();
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, score_kernel, threads, SharedMap::bytes(heads)),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return blocks * processors;
}

}  // namespace stepgraph
