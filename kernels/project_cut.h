// How Hopper's projections are cut into blocks, and what stands where in a block's shared memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "copy_engine.h"
#include "project_sm90.h"

namespace stepgraph::projecting {

using sm90::TensorMap;

inline constexpr int consumer_threads = 128;
inline constexpr int threads = consumer_threads + 32;
inline constexpr int box_columns = 64;
inline constexpr int box_row_bytes = box_columns * 2;
inline constexpr int product_rows = 64;  // of the matrix units
inline constexpr int cluster_size = 8;
inline constexpr int most_boxes = 48;       // of weights, that a block has room for
inline constexpr int batches = 3;           // of them, multiplied as they arrive
inline constexpr int most_stages = 16;      // of activations
inline constexpr int box_alignment = 1024;  // in shared memory, for the swizzle
inline constexpr int most_shallow_depth = 3072;
// Of two blocks that share a multiprocessor.
inline constexpr int shared_budget = 112 * 1024;

/// What the kernel is launched with.
struct ProjectLaunch {
    ProjectArgs args;
    TensorMap activations[2];  // of the products
};

/// How a product is cut. A product of up to most_shallow_depth columns: in tiles of 96 outputs, each over four blocks; a
/// deeper one in tiles of 32, over all eight blocks of a cluster. Both products of Kimi K3.1 take 27 clusters. An H200 has
/// room for some 30 at two blocks a multiprocessor, and a cluster that finds none begins with its weights microseconds
/// later.
template <bool deep>
struct Cut {
    static constexpr int outputs = deep ? 32 : 96;
    static constexpr int parts = deep ? cluster_size : 4;
};
static_assert(cluster_size * most_boxes * box_columns == most_project_sm90_depth);

__host__ __device__ constexpr bool is_deep(const ProjectProduct& product) {
    return product.depth > most_shallow_depth;
}
__host__ __device__ constexpr int outputs_of(const ProjectProduct& product) {
    return is_deep(product) ? Cut<true>::outputs : Cut<false>::outputs;
}
__host__ __device__ constexpr int parts_of(const ProjectProduct& product) {
    return is_deep(product) ? Cut<true>::parts : Cut<false>::parts;
}
__host__ __device__ constexpr int boxes_of(const ProjectProduct& product) {
    return (product.depth + box_columns - 1) / box_columns;
}
/// Blocks of one product for one group of rows, in whole clusters.
__host__ __device__ constexpr int blocks_of(const ProjectProduct& product) {
    const int blocks = (product.columns + outputs_of(product) - 1) / outputs_of(product) * parts_of(product);
    return (blocks + cluster_size - 1) / cluster_size * cluster_size;
}
__host__ __device__ constexpr int blocks_of_rows(const ProjectArgs& args) {
    return blocks_of(args.products[0]) + blocks_of(args.products[1]);
}

/// Rows of a box of activations.
__host__ __device__ constexpr int box_rows(int rows) {
    return rows >= product_rows ? product_rows : (rows + 7) / 8 * 8;
}

/// Floats from one row's sums to the next's: rows that are written together meet different banks.
__host__ __device__ constexpr int sums_stride(int outputs) {
    return outputs + 8;
}

/// Of a block's shared memory, whose start is aligned as a box.
struct SharedMap {
    int weights;  // bytes into it
    int activations;
    int stage_bytes;
    int stages;
    int bytes;  // of all

    __host__ __device__ SharedMap(const ProjectProduct& product, int rows, int row_blocks) {
        const int most = (boxes_of(product) + parts_of(product) - 1) / parts_of(product);
        weights = box_alignment;  // the barriers stand before them
        activations = weights + most * outputs_of(product) * box_row_bytes;
        stage_bytes = box_rows(rows) * box_row_bytes;
        // The matrix units read whole products, beyond the rows that there are.
        const int beyond = product_rows * box_row_bytes - stage_bytes;
        const int fit = (shared_budget - box_alignment - activations - beyond) / stage_bytes;
        const int wanted = most * row_blocks;
        stages = fit < wanted ? fit : wanted;
        stages = stages < 2 ? 2 : stages < most_stages ? stages : most_stages;
        const int operands = activations + stages * stage_bytes + beyond;
        // The sums take their place.
        const int most_rows = product_rows * row_blocks;
        const int sums = weights + (rows < most_rows ? rows : most_rows) * sums_stride(outputs_of(product)) * 4;
        bytes = operands > sums ? operands : sums;
    }
};

struct Barriers {
    uint64_t there[most_stages];
    uint64_t taken[most_stages];
};
static_assert(sizeof(Barriers) <= box_alignment);

/// A tile of outputs, over part `part` of the depth, of some rows.
struct Work {
    int product;
    int tile;
    int part;
    int box_begin;
    int box_end;
    int first_row;
    int rows;
};

__device__ inline Work work_of(const ProjectArgs& args, int group_rows) {
    const int blocks = blocks_of_rows(args);
    const int group = static_cast<int>(blockIdx.x) / blocks;
    int block = static_cast<int>(blockIdx.x) - group * blocks;
    const int blocks_before = blocks_of(args.products[0]);
    const int number = block < blocks_before ? 0 : 1;
    block -= number * blocks_before;
    const ProjectProduct& product = args.products[number];
    const int parts = parts_of(product);
    const int part = block % parts;
    const int boxes = boxes_of(product);
    const int first_row = group * group_rows;
    return {number,
            block / parts,
            part,
            boxes * part / parts,
            boxes * (part + 1) / parts,
            first_row,
            min(group_rows, args.rows - first_row)};
}

/// Bytes of shared memory that a block wants, with room to align them.
template <int row_blocks>
size_t shared_bytes(const ProjectArgs& args) {
    int bytes = 0;
    for (const ProjectProduct& product : args.products) {
        bytes = std::max(bytes, SharedMap(product, args.rows, row_blocks).bytes);
    }
    return static_cast<size_t>(bytes) + box_alignment;
}

}  // namespace stepgraph::projecting
