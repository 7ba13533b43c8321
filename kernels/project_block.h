// What a block of Hopper's projections does.
#pragma once

#include <algorithm>

#include "block_instructions.h"
#include "copy_engine.h"
#include "project_tile.h"

namespace stepgraph::projecting {

using namespace device;

inline constexpr int cluster_size = 8;
// A product of up to this depth is a block's own; of a deeper one, each block of a cluster takes an eighth.
inline constexpr int most_block_depth = 3072;
static_assert(cluster_size * most_block_depth == most_project_sm90_depth);

/// What a block does: a tile of outputs over [chunk_begin, chunk_end) of a product's depth.
struct Work {
    ProjectProduct product;
    bool split;  // over the depth, among the blocks of the cluster
    int tile;
    int chunk_begin;
    int chunk_end;
};

__host__ __device__ inline bool is_split(const ProjectProduct& product) {
    return product.depth > most_block_depth;
}
/// Blocks of one product, in whole clusters.
__host__ __device__ inline int blocks_of(const ProjectProduct& product, int outputs) {
    const int tiles = (product.columns + outputs - 1) / outputs;
    return is_split(product) ? tiles * cluster_size : (tiles + cluster_size - 1) / cluster_size * cluster_size;
}
/// Chunks of a product's depth that a block takes at most.
__host__ __device__ inline int most_chunks(const ProjectProduct& product) {
    const int chunks = product.depth / chunk_depth;
    return is_split(product) ? (chunks + cluster_size - 1) / cluster_size : chunks;
}

__device__ inline Work work_of(const ProjectArgs& args, int outputs) {
    int block = static_cast<int>(blockIdx.x);
    const int blocks_before = blocks_of(args.products[0], outputs);
    const ProjectProduct& product = args.products[block < blocks_before ? 0 : 1];
    block -= block < blocks_before ? 0 : blocks_before;
    const int chunks = product.depth / chunk_depth;
    if (!is_split(product)) {
        return {product, false, block, 0, chunks};
    }
    const int rank = block % cluster_size;
    return {product, true, block / cluster_size, chunks * rank / cluster_size, chunks * (rank + 1) / cluster_size};
}

/// Adds the partial sums of the cluster's blocks, in the order of their ranks, and writes them.
template <int outputs, int rows_a_pass>
__device__ void add_up_cluster(const Work& work, const float4* partial, int first_row, int rows) {
    static_assert(rows_a_pass * outputs / 4 / cluster_size <= threads, "a thread adds up four outputs of a row, or none");
    const int rank = cluster_rank();
    const uint32_t sums = device::shared_address(partial);
    __syncwarp();
    cluster_arrive();
    cluster_wait();  // every block's sums are there
    const int count = rows * outputs / 4;
    const int mine = count * rank / cluster_size + static_cast<int>(threadIdx.x);
    const bool is_there = mine < count * (rank + 1) / cluster_size;
    float4 sum{};
    if (is_there) {
#pragma unroll
        for (int other = 0; other < cluster_size; ++other) {
            const float4 addend =
                load_four_from_block(address_in_block(sums + static_cast<uint32_t>(mine) * sizeof(float4), other));
            sum.x += addend.x;
            sum.y += addend.y;
            sum.z += addend.z;
            sum.w += addend.w;
        }
    }
    __syncwarp();
    cluster_arrive();  // before the outputs are stored: an arrival waits for what was written before
    if (is_there) {
        store_outputs(work.product, first_row + mine / (outputs / 4), work.tile * outputs + mine % (outputs / 4) * 4, sum);
    }
    __syncwarp();
    cluster_wait();  // nobody reads them any more
}

/// Of a block, in front of the weights.
template <int outputs>
struct alignas(128) Shared {
    Partials<outputs> partials;
    uint64_t weights_there;
};

template <int output_tiles, int row_tiles>
__device__ void project_block(const ProjectArgs& args) {
    constexpr int outputs = output_tiles * 16;
    constexpr int rows_a_pass = row_tiles * 8;
    auto& shared = *reinterpret_cast<Shared<outputs>*>(dynamic_shared_memory());
    uint8_t* const weights = dynamic_shared_memory() + sizeof(Shared<outputs>);

    const Work work = work_of(args, outputs);
    Tile<output_tiles, row_tiles> tile(work.product, weights, work.tile * outputs, work.chunk_begin, work.chunk_end);
    // A cluster's sums stand behind the most weights that a block may have: at the same place in each of its blocks.
    auto* const partial = reinterpret_cast<float4*>(weights + outputs * weight_stride(most_chunks(work.product)));
    if (threadIdx.x == 0) {
        barrier_init(&shared.weights_there, 1);
        barrier_init_fence();
        barrier_arrive_expect(&shared.weights_there, tile.bytes_to_copy());
    }
    __syncthreads();  // the barrier is there
    tile.copy_weights(&shared.weights_there);

    wait_for_producers();  // for the activations, and for the readers of what is written here
    bool triggered = false;
    for (int first_row = 0; first_row < args.rows; first_row += rows_a_pass) {
        const int rows = min(rows_a_pass, args.rows - first_row);
        tile.multiply(first_row, rows, &shared.weights_there);
        if (!triggered) {
            let_consumers_start();  // its prologue may stream too: the weights here come first
            triggered = true;
        }
        tile.add_up(shared.partials, [&](int row, int output, float4 sum) {
            if (work.split) {
                partial[(row * outputs + output) / 4] = sum;
            } else if (row < rows) {
                store_outputs(work.product, first_row + row, work.tile * outputs + output, sum);
            }
        });
        if (work.split) {
            add_up_cluster<outputs, rows_a_pass>(work, partial, first_row, rows);
        }
    }
}

/// Bytes of shared memory that a block wants.
template <int outputs, int rows_a_pass>
size_t shared_bytes(const ProjectArgs& args) {
    size_t bytes = 0;
    for (const ProjectProduct& product : args.products) {
        const size_t weights = static_cast<size_t>(outputs) * weight_stride(most_chunks(product));
        const size_t partial = is_split(product) ? static_cast<size_t>(outputs) * rows_a_pass * sizeof(float) : 0;
        bytes = std::max(bytes, weights + partial);
    }
    return sizeof(Shared<outputs>) + bytes;
}

}  // namespace stepgraph::projecting
