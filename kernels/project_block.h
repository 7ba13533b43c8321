// What a block of Hopper's projections does: a tile of outputs over a part of the depth, and with the blocks of its cluster
// their sum.
//
// Weights and activations come as boxes of 64 columns, whose rows of 128 bytes stand in shared memory as the matrix units
// want them. A warpgroup asks for all weights before the wait, and multiplies; a warp asks the copy engine for the
// activations, behind the wait, through a ring. The weights come by the ordinary way: the engine would first have to fetch
// the map of the matrix, a microsecond in which nothing comes. Rows of activations and outputs that do not exist are
// whatever memory holds: a sum depends on its own row and output alone.
#pragma once

#include "block_instructions.h"
#include "matrix_units.h"
#include "project_cut.h"

namespace stepgraph::projecting {

using namespace device;
using namespace sm90;

/// Rounds four outputs of a row and writes those that exist.
__device__ __forceinline__ void store_outputs(const ProjectProduct& product, int row, int output, float4 sums) {
    __nv_bfloat16* to = product.out + int64_t{row} * product.columns + output;
    const __nv_bfloat162 low = __floats2bfloat162_rn(sums.x, sums.y);
    const __nv_bfloat162 high = __floats2bfloat162_rn(sums.z, sums.w);
    if (product.columns % 4 == 0) {  // then all four exist or none
        if (output < product.columns) {
            *reinterpret_cast<uint2*>(to) = {reinterpret_cast<const uint32_t&>(low),
                                             reinterpret_cast<const uint32_t&>(high)};
        }
        return;
    }
    const __nv_bfloat16 values[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (output + i < product.columns) {
            to[i] = values[i];
        }
    }
}

/// `row_blocks`: blocks of 64 rows that share a reading of the weights.
template <bool deep, int row_blocks>
class Block {
public:
    __device__ Block(const ProjectLaunch& launch, const Work& work, uint8_t* shared)
        : product_(launch.args.products[work.product]),
          activations_map_(launch.activations[work.product]),
          work_(work),
          map_(product_, launch.args.rows, row_blocks),
          shared_(shared),
          barriers_(*reinterpret_cast<Barriers*>(shared)),
          boxes_(work.box_end - work.box_begin) {}

    /// By the thread that asks for activations.
    __device__ void prepare() {
        prefetch(activations_map_);
        for (int stage = 0; stage < map_.stages; ++stage) {
            barrier_init(&barriers_.there[stage], 1);
            barrier_init(&barriers_.taken[stage], consumer_threads / 32);
        }
        barrier_init_fence();
    }

    /// By the warpgroup: eight threads bring a row of a box.
    __device__ void ask_for_weights() const {
        constexpr int rows_at_once = consumer_threads / 8;
        static_assert(rows_at_once % 8 == 0);  // so that a thread's place in the swizzle stays
        const int row = static_cast<int>(threadIdx.x) / 8;
        const int eight = static_cast<int>(threadIdx.x) % 8;  // columns
        uint8_t* to = weights(0) + row * box_row_bytes + (eight ^ row % 8) * 16;
        const int column = work_.box_begin * box_columns + eight * 8;
        const __nv_bfloat16* from = product_.w + int64_t{work_.tile * outputs + row} * product_.depth + column;
        const int rows = product_.columns - work_.tile * outputs - row;
        const uint64_t policy = evict_first();
        for (int batch = 0; batch < batches; ++batch) {
            for (int box = batch_begin(batch); box < batch_begin(batch + 1); ++box) {
                const bool is_there = column + box * box_columns < product_.depth;
#pragma unroll
                for (int i = 0; i < outputs / rows_at_once; ++i) {
                    if (i * rows_at_once < rows) {
                        start_copy(to + box * outputs * box_row_bytes + i * rows_at_once * box_row_bytes,
                                   from + box * box_columns + int64_t{i * rows_at_once} * product_.depth, is_there, policy);
                    }
                }
            }
            commit_copies();
        }
    }

    /// By one thread, behind the wait.
    __device__ void ask_for_activations() {
        async_proxy_fence_global();  // what kernels stored the ordinary way is read by the copy engine
        int stage = 0;
        uint32_t parity = 1;  // the first round finds every stage free
        for (int box = 0; box < boxes_; ++box) {
            for (int block = 0; block < row_blocks; ++block) {
                barrier_wait(&barriers_.taken[stage], parity);
                barrier_arrive_expect(&barriers_.there[stage], static_cast<uint32_t>(map_.stage_bytes));
                copy_box(activations(stage), activations_map_, (work_.box_begin + box) * box_columns,
                         work_.first_row + block * product_rows, &barriers_.there[stage], evict_last());
                advance(stage, parity);
            }
        }
    }

    /// By the warpgroup.
    __device__ void multiply() {
#pragma unroll
        for (auto& of_block : sums_) {
#pragma unroll
            for (float& sum : of_block) {
                sum = 0;
            }
        }
        int stage = 0;
        uint32_t parity = 0;
        int before = -1;  // stage whose products may still be computed
#pragma unroll 1
        for (int batch = 0; batch < batches; ++batch) {
            wait_for_weights(batch);
#pragma unroll 1
            for (int box = batch_begin(batch); box < batch_begin(batch + 1); ++box) {
#pragma unroll
                for (int block = 0; block < row_blocks; ++block) {
                    barrier_wait(&barriers_.there[stage], parity);
                    __syncwarp();
                    start_products(sums_[block], swizzled_rows_low(shared_address(activations(stage))),
                                   swizzled_rows_low(shared_address(weights(box))));
                    wgmma_wait<1>();
                    release(before);
                    before = stage;
                    advance(stage, parity);
                }
            }
        }
        wgmma_wait<0>();
#pragma unroll
        for (auto& of_block : sums_) {
#pragma unroll
            for (float& sum : of_block) {
                pin(sum);
            }
        }
    }

    /// Adds the sums of the blocks that share the tile, in the order of the depth, and writes them. By the warpgroup, when
    /// all of it has multiplied.
    __device__ void add_up() {
        write_sums();
        cluster_arrive();
        cluster_wait();  // every block's sums are there
        constexpr int parts = Cut<deep>::parts;
        constexpr int fours = outputs / 4;
        constexpr int most = (row_blocks * product_rows * fours / parts + consumer_threads - 1) / consumer_threads;
        const int count = work_.rows * fours;
        const int begin = count * work_.part / parts;
        const int end = count * (work_.part + 1) / parts;
        const uint32_t own = shared_address(sums());
        const int first_rank = cluster_rank() - work_.part;
        float4 totals[most];
#pragma unroll
        for (int i = 0; i < most; ++i) {
            const int four = begin + i * consumer_threads + static_cast<int>(threadIdx.x);
            totals[i] = float4{};
            if (four < end) {
                const uint32_t address = own + static_cast<uint32_t>(four / fours * stride + four % fours * 4) * 4;
#pragma unroll
                for (int part = 0; part < parts; ++part) {
                    const float4 addend = load_four_from_block(address_in_block(address, first_rank + part));
                    totals[i].x += addend.x;
                    totals[i].y += addend.y;
                    totals[i].z += addend.z;
                    totals[i].w += addend.w;
                }
            }
        }
        __syncwarp();
        cluster_arrive();  // before the outputs are stored: an arrival waits for what was written before
#pragma unroll
        for (int i = 0; i < most; ++i) {
            const int four = begin + i * consumer_threads + static_cast<int>(threadIdx.x);
            if (four < end) {
                store_outputs(product_, work_.first_row + four / fours, work_.tile * outputs + four % fours * 4, totals[i]);
            }
        }
        __syncwarp();
        cluster_wait();  // nobody reads this block's sums any more
    }

private:
    static constexpr int outputs = Cut<deep>::outputs;
    static constexpr int stride = sums_stride(outputs);

    [[nodiscard]] __device__ uint8_t* weights(int box) const {
        return shared_ + map_.weights + box * outputs * box_row_bytes;
    }
    [[nodiscard]] __device__ uint8_t* activations(int stage) const {
        return shared_ + map_.activations + stage * map_.stage_bytes;
    }
    [[nodiscard]] __device__ float* sums() const {
        return reinterpret_cast<float*>(shared_ + map_.weights);
    }
    [[nodiscard]] __device__ int batch_begin(int batch) const {
        return boxes_ * batch / batches;
    }

    /// Until every thread's copies of a batch are there.
    __device__ static void wait_for_weights(int batch) {
        batch == 0 ? wait_for_copies<2>() : batch == 1 ? wait_for_copies<1>() : wait_for_copies<0>();
        async_proxy_fence_shared();
        partial_barrier<consumer_threads>();
    }

    __device__ void advance(int& stage, uint32_t& parity) const {
        if (++stage == map_.stages) {
            stage = 0;
            parity ^= 1U;
        }
    }

    __device__ static void start_products(float (&sums)[outputs / 2], uint32_t rows, uint32_t weights) {
#pragma unroll
        for (float& sum : sums) {
            pin(sum);
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < box_columns / 16; ++step) {
            wgmma_bf16<outputs>(sums, rows + step * 2, weights + step * 2);
        }
        wgmma_commit();
    }

    __device__ void release(int stage) {
        if (stage >= 0 && threadIdx.x % 32 == 0) {
            barrier_arrive(&barriers_.taken[stage]);
        }
    }

    /// Over the weights: every warp's products are complete.
    __device__ void write_sums() const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        partial_barrier<consumer_threads>();
#pragma unroll
        for (int block = 0; block < row_blocks; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = block * product_rows + static_cast<int>(threadIdx.x) / 32 * 16 + half * 8 + lane / 4;
                if (row < work_.rows) {
#pragma unroll
                    for (int j = 0; j < outputs / 8; ++j) {
                        *reinterpret_cast<float2*>(sums() + row * stride + j * 8 + lane % 4 * 2) = {
                            sums_[block][j * 4 + half * 2], sums_[block][j * 4 + half * 2 + 1]};
                    }
                }
            }
        }
        __syncwarp();
    }

    const ProjectProduct& product_;
    const TensorMap& activations_map_;
    Work work_;
    SharedMap map_;
    uint8_t* shared_;
    Barriers& barriers_;
    int boxes_;
    float sums_[row_blocks][outputs / 2];
};

template <bool deep, int row_blocks>
__device__ __forceinline__ void project_part(const ProjectLaunch& launch, const Work& work, uint8_t* shared) {
    Block<deep, row_blocks> block(launch, work, shared);
    const bool asks = threadIdx.x == consumer_threads;
    if (asks) {
        block.prepare();
    } else if (threadIdx.x < consumer_threads) {
        block.ask_for_weights();
    }
    __syncthreads();       // the barriers are there
    wait_for_producers();  // for the activations, and for the readers of what is written here
    if (threadIdx.x >= consumer_threads) {
        if (asks) {
            block.ask_for_activations();
        }
        __syncwarp();
        let_consumers_start();
        for (int i = 0; i < 2; ++i) {  // as in add_up()
            cluster_arrive();
            cluster_wait();
        }
        return;
    }
    block.multiply();
    let_consumers_start();  // its prologue may stream too: the weights here come first
    block.add_up();
}

template <int row_blocks>
__device__ __forceinline__ void project_block(const ProjectLaunch& launch) {
    const Work work = work_of(launch.args, row_blocks * product_rows);
    uint8_t* shared = dynamic_shared_memory();
    shared += (box_alignment - shared_address(shared) % box_alignment) % box_alignment;
    if (is_deep(launch.args.products[work.product])) {
        project_part<true, row_blocks>(launch, work, shared);
    } else {
        project_part<false, row_blocks>(launch, work, shared);
    }
}

}  // namespace stepgraph::projecting
