#include "project_sm90.h"

#include <algorithm>

#include <cooperative_groups.h>

#include "copy_engine.h"
#include "project_tile.h"

namespace stepgraph {
namespace {

using namespace projecting;
namespace cg = cooperative_groups;

constexpr int cluster_blocks = 8;
// A product of up to this depth is a block's own; of a deeper one, each block of a cluster takes an eighth.
constexpr int most_block_depth = 3072;
static_assert(cluster_blocks * most_block_depth == most_project_sm90_depth);

/// What a block does: a tile of outputs over [chunk_begin, chunk_end) of a product's depth.
struct Work {
    ProjectProduct product;
    bool split;  // over the depth, among the blocks of the cluster
    int tile;
    int chunk_begin;
    int chunk_end;
};

__host__ __device__ bool is_split(const ProjectProduct& product) {
    return product.depth > most_block_depth;
}
/// Blocks of one product, in whole clusters.
__host__ __device__ int blocks_of(const ProjectProduct& product, int outputs) {
    const int tiles = (product.columns + outputs - 1) / outputs;
    return is_split(product) ? tiles * cluster_blocks : (tiles + cluster_blocks - 1) / cluster_blocks * cluster_blocks;
}
/// Chunks of a product's depth that a block takes at most.
__host__ __device__ int most_chunks(const ProjectProduct& product) {
    const int chunks = product.depth / chunk_depth;
    return is_split(product) ? (chunks + cluster_blocks - 1) / cluster_blocks : chunks;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ Work work_of(const ProjectArgs& args, int outputs) {
    int block = static_cast<int>(blockIdx.x);
    const int blocks_before = blocks_of(args.products[0], outputs);
    const ProjectProduct& product = args.products[block < blocks_before ? 0 : 1];
    block -= block < blocks_before ? 0 : blocks_before;
    const int chunks = product.depth / chunk_depth;
    if (!is_split(product)) {
        return {product, false, block, 0, chunks};
    }
    const int rank = block % cluster_blocks;
    return {product, true, block / cluster_blocks, chunks * rank / cluster_blocks, chunks * (rank + 1) / cluster_blocks};
}

/// Adds the partial sums of the cluster's blocks, in the order of their ranks, and writes them.
template <int outputs>
__device__ void add_up_cluster(const Work& work, const float4* partial, int first_row, int rows) {
    const cg::cluster_group cluster = cg::this_cluster();
    const auto rank = static_cast<int>(cluster.block_rank());
    cluster.sync();  // every block's sums are there
    const int count = rows * outputs / 4;
    for (int i = count * rank / cluster_blocks + static_cast<int>(threadIdx.x); i < count * (rank + 1) / cluster_blocks;
         i += threads) {
        float4 sum{};
#pragma unroll
        for (int other = 0; other < cluster_blocks; ++other) {
            const float4 addend = cluster.map_shared_rank(const_cast<float4*>(partial), other)[i];
            sum.x += addend.x;
            sum.y += addend.y;
            sum.z += addend.z;
            sum.w += addend.w;
        }
        store_outputs(work.product, first_row + i / (outputs / 4), work.tile * outputs + i % (outputs / 4) * 4, sum);
    }
    cluster.sync();  // nobody reads them any more
}
#endif

template <int output_tiles, int row_tiles>
__global__ void __launch_bounds__(threads) project_sm90_kernel(const __grid_constant__ ProjectArgs args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    constexpr int outputs = output_tiles * 16;
    constexpr int rows_a_pass = row_tiles * 8;
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ uint64_t weights_there;
    __shared__ Partials<outputs> partials;

    const Work work = work_of(args, outputs);
    Tile<output_tiles, row_tiles> tile(work.product, memory, work.tile * outputs, work.chunk_begin, work.chunk_end);
    // A cluster's sums stand behind the most weights that a block may have: at the same place in each of its blocks.
    auto* const partial = reinterpret_cast<float4*>(memory + outputs * weight_stride(most_chunks(work.product)));
    if (threadIdx.x == 0) {
        barrier_init(&weights_there, 1);
        barrier_init_fence();
        barrier_arrive_expect(&weights_there, tile.bytes_to_copy());
    }
    __syncthreads();  // the barrier is there
    tile.copy_weights(&weights_there);

    wait_for_producers();  // for the activations, and for the readers of what is written here
    bool triggered = false;
    for (int first_row = 0; first_row < args.rows; first_row += rows_a_pass) {
        const int rows = min(rows_a_pass, args.rows - first_row);
        tile.multiply(first_row, rows, &weights_there);
        if (!triggered) {
            let_consumers_start();  // its prologue may stream too: the weights here come first
            triggered = true;
        }
        tile.add_up(partials, [&](int row, int output, float4 sum) {
            if (work.split) {
                partial[(row * outputs + output) / 4] = sum;
            } else if (row < rows) {
                store_outputs(work.product, first_row + row, work.tile * outputs + output, sum);
            }
        });
        if (work.split) {
            add_up_cluster<outputs>(work, partial, first_row, rows);
        }
    }
#else
    __trap();  // never launched: see can_project_sm90()
#endif
}

using Kernel = void (*)(ProjectArgs);

struct Form {
    Kernel kernel;
    int outputs;
    int rows_a_pass;
};

template <int output_tiles, int row_tiles>
constexpr Form form = {project_sm90_kernel<output_tiles, row_tiles>, output_tiles * 16, row_tiles * 8};

/// Few rows: small tiles, so that every multiprocessor has several to wait for. More: larger ones, because each tile reads
/// all activations.
Form form_for(int rows) {
    return rows <= 8 ? form<1, 1> : rows <= 16 ? form<1, 2> : rows <= 32 ? form<1, 4> : form<2, 8>;
}

size_t shared_bytes(const ProjectArgs& args, const Form& chosen) {
    size_t bytes = 0;
    for (const ProjectProduct& product : args.products) {
        const size_t weights = static_cast<size_t>(chosen.outputs) * weight_stride(most_chunks(product));
        const size_t partial =
            is_split(product) ? static_cast<size_t>(chosen.outputs) * chosen.rows_a_pass * sizeof(float) : 0;
        bytes = std::max(bytes, weights + partial);
    }
    return bytes;
}

}  // namespace

bool can_project_sm90(int depth, int other_depth) {
    const auto fits = [](int d) { return d % chunk_depth == 0 && d <= most_project_sm90_depth; };
    return fits(depth) && fits(other_depth) && attribute_of_device(cudaDevAttrComputeCapabilityMajor) == 9 &&
           compiled_for_clusters(form<1, 1>.kernel, "project_sm90");
}

void prepare_project_sm90(const ProjectArgs& args) {
    for (const int rows : {8, 16, 32, 64}) {
        const Form chosen = form_for(rows);
        prepare_kernel(chosen.kernel, "project_sm90", shared_bytes(args, chosen));
    }
}

void project_sm90(const ProjectArgs& args, LaunchContext context) {
    const Form chosen = form_for(args.rows);
    const int blocks = blocks_of(args.products[0], chosen.outputs) + blocks_of(args.products[1], chosen.outputs);
    launch_clusters(chosen.kernel, "project_sm90", context, static_cast<unsigned>(blocks), cluster_blocks, threads,
                    shared_bytes(args, chosen), args);
}

}  // namespace stepgraph
