// A tile of a product on Hopper: some outputs of every row, over a part of the depth, by one block.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "copy_engine.h"
#include "matrix_units.h"
#include "project_sm90.h"

namespace stepgraph::projecting {

using namespace sm90;

constexpr int warps = 4;  // each takes a quarter of the tile's depth
constexpr int threads = warps * 32;
constexpr int chunk_depth = 32;  // that the lanes of a warp take at a time, eight each, as two steps of the matrix units

/// Bytes from one output's weights to the next's in shared memory: an odd number of chunks, so that two outputs side by side
/// meet different banks.
__host__ __device__ constexpr int weight_stride(int chunks) {
    return (chunks | 1) * chunk_depth * 2;
}

/// Sums of sixteen rows over each warp's part of the depth, on their way to being added up.
template <int outputs>
struct Partials {
    // The padding lets the 32 lanes, which hold eight outputs of two times four rows, meet 32 banks.
    alignas(16) float sums[warps][16][outputs + 4];
};

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

/// A dot product does not mind the order of its columns. Lane t of the four that share an output, or a row, has columns
/// [8*t, 8*t + 8) of a chunk, one read of 16 bytes, and gives the matrix units the first four of them in one step and the
/// others in the next.
template <int output_tiles, int row_tiles>
class Tile {
public:
    /// The tile of outputs from `first_output` on, over chunks [chunk_begin, chunk_end) of the depth.
    __device__ Tile(const ProjectProduct& product, uint8_t* weights, int first_output, int chunk_begin, int chunk_end)
        : product_(product),
          weights_(weights),
          first_output_(first_output),
          chunk_begin_(chunk_begin),
          chunks_(chunk_end - chunk_begin),
          outputs_there_(max(0, min(output_tiles * 16, product.columns - first_output))) {}

    [[nodiscard]] __device__ uint32_t bytes_to_copy() const {
        return static_cast<uint32_t>(outputs_there_ * chunks_ * chunk_depth * 2);
    }

    /// Starts to copy the weights, an output a thread. Outputs that do not exist keep what memory holds: they are not
    /// stored.
    __device__ void copy_weights(uint64_t* there) const {
        const auto output = static_cast<int>(threadIdx.x);
        if (output < outputs_there_) {
            const __nv_bfloat16* from =
                product_.w + int64_t{first_output_ + output} * product_.depth + chunk_begin_ * chunk_depth;
            copy_bytes(weights_ + output * weight_stride(chunks_), from, static_cast<uint32_t>(chunks_ * chunk_depth * 2),
                       there, evict_first());
        }
    }

    /// Multiplies `rows` rows from `first_row` on, each warp over its part of the depth.
    __device__ void multiply(int first_row, int rows, uint64_t* there) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int warp = static_cast<int>(threadIdx.x) / 32;
        const int begin = chunks_ * warp / warps;
        const int end = chunks_ * (warp + 1) / warps;
        rows_from_ = product_.x + int64_t{first_row} * product_.depth;
        auto x = static_cast<uint32_t>(lane / 4 * product_.depth + (chunk_begin_ + begin) * chunk_depth + lane % 4 * 8) * 2U;
        const uint8_t* w = weights_ + lane / 4 * weight_stride(chunks_) + begin * chunk_depth * 2 + lane % 4 * 16;
#pragma unroll
        for (auto& of_outputs : sums_) {
#pragma unroll
            for (auto& of_rows : of_outputs) {
                of_rows[0] = of_rows[1] = of_rows[2] = of_rows[3] = 0;
            }
        }
        // Two batches of activations take turns in registers: one comes while the other is multiplied.
        Batch batch;
        Batch next;
        load(batch, x, end - begin, rows);
        barrier_wait(there, 0);
        int chunks = end - begin;
#pragma unroll 1
        while (chunks > 0) {
            load(next, x += chunks_ahead * chunk_depth * 2, chunks - chunks_ahead, rows);
            multiply_batch(w, batch, chunks);
            load(batch, x += chunks_ahead * chunk_depth * 2, chunks - 2 * chunks_ahead, rows);
            multiply_batch(w + chunks_ahead * chunk_depth * 2, next, chunks - chunks_ahead);
            w += 2 * chunks_ahead * chunk_depth * 2;
            chunks -= 2 * chunks_ahead;
        }
    }

    /// Adds up the warps' sums, in the order of the depth, and gives them away, four outputs of a row at a time, rows that
    /// do not exist included.
    template <int outputs = output_tiles * 16, typename Take>
    __device__ void add_up(Partials<outputs>& partials, Take take) {
        const auto thread = static_cast<int>(threadIdx.x);
        const int lane = thread % 32;
#pragma unroll
        for (int first = 0; first < row_tiles; first += 2) {
            constexpr int tiles = row_tiles < 2 ? 1 : 2;
            __syncthreads();  // nobody reads the last sixteen rows any more
#pragma unroll
            for (int j = 0; j < tiles; ++j) {
#pragma unroll
                for (int i = 0; i < output_tiles; ++i) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        partials.sums[thread / 32][j * 8 + lane % 4 * 2 + k % 2][i * 16 + lane / 4 + k / 2 * 8] =
                            sums_[i][first + j][k];
                    }
                }
            }
            __syncthreads();  // every warp's sums are there
            for (int i = thread; i < tiles * 8 * outputs / 4; i += threads) {
                const int row = i / (outputs / 4);
                const int output = i % (outputs / 4) * 4;
                float4 sum{};
#pragma unroll
                for (int warp = 0; warp < warps; ++warp) {
                    const float4 addend = *reinterpret_cast<const float4*>(&partials.sums[warp][row][output]);
                    sum.x += addend.x;
                    sum.y += addend.y;
                    sum.z += addend.z;
                    sum.w += addend.w;
                }
                take(first * 8 + row, output, sum);
            }
        }
    }

private:
    // Activations that are on their way together: enough to hide the L2, as many as registers hold twice.
    static constexpr int chunks_ahead = row_tiles >= 8 ? 1 : row_tiles == 4 ? 3 : row_tiles == 2 ? 6 : 12;

    struct Batch {
        uint4 activations[chunks_ahead][row_tiles];
    };

    /// Starts to load the activations of up to `chunks` chunks of `rows` rows, this lane's from byte `offset` of them on.
    __device__ void load(Batch& batch, uint32_t offset, int chunks, int rows) const {
        const auto* x = reinterpret_cast<const uint8_t*>(rows_from_);
        const auto tile_stride = static_cast<uint32_t>(product_.depth) * 8 * 2;
        const int row = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
        for (int ahead = 0; ahead < chunks_ahead; ++ahead) {
#pragma unroll
            for (int j = 0; j < row_tiles; ++j) {
                batch.activations[ahead][j] = uint4{};
                if (ahead < chunks && j * 8 + row < rows) {
                    batch.activations[ahead][j] =
                        *reinterpret_cast<const uint4*>(x + (offset + ahead * chunk_depth * 2 + j * tile_stride));
                }
            }
        }
    }

    __device__ void multiply_batch(const uint8_t* w, const Batch& batch, int chunks) {
#pragma unroll
        for (int ahead = 0; ahead < chunks_ahead; ++ahead) {
            if (ahead < chunks) {
                multiply_chunk(w + ahead * chunk_depth * 2, batch.activations[ahead]);
            }
        }
    }

    __device__ void multiply_chunk(const uint8_t* w, const uint4 (&activations)[row_tiles]) {
#pragma unroll
        for (int i = 0; i < output_tiles; ++i) {
            const uint4 low = *reinterpret_cast<const uint4*>(w + i * 16 * weight_stride(chunks_));
            const uint4 high = *reinterpret_cast<const uint4*>(w + (i * 16 + 8) * weight_stride(chunks_));
#pragma unroll
            for (int j = 0; j < row_tiles; ++j) {
                mma_bf16(sums_[i][j], low.x, high.x, low.y, high.y, activations[j].x, activations[j].y);
                mma_bf16(sums_[i][j], low.z, high.z, low.w, high.w, activations[j].z, activations[j].w);
            }
        }
    }

    ProjectProduct product_;
    uint8_t* weights_;
    int first_output_;
    int chunk_begin_;
    int chunks_;
    int outputs_there_;
    const __nv_bfloat16* rows_from_ = nullptr;  // the activations of the rows at work
    float sums_[output_tiles][row_tiles][4];
};

}  // namespace stepgraph::projecting
