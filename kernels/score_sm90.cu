#include "score_sm90.h"

#include <stepgraph/layouts/query_row.h>

#include "copy_engine.h"
#include "wgmma.h"

namespace stepgraph {
namespace {

constexpr int pass_columns = 128;  // of a product at most: heads times the rows that share a pass
STEPGRAPH_HD constexpr int rows_of_pass(int heads) {
    return heads == 64 ? 2 : 4;
}
constexpr int consumers = 2;  // warpgroups that take turns at the pages
constexpr int consumer_threads = consumers * 128;
constexpr int threads = consumer_threads + 32;  // and one warp that keeps the ring full
constexpr int stages = 20;
constexpr int payload_bytes = page_tokens * head_dim;
constexpr int scale_bytes = page_tokens * 4;

// E4M3 products go through the matrix units as FP16, which holds every code exactly: their own FP8 products keep some 14
// bits of a sum, too few where head weights of both signs cancel. A dot product does not mind the order of its columns, so
// that a thread reads its keys 16 bytes at a time: in product step s, column pair t of each half h of the 16 is the key's
// columns 32*t + 4*s + 2*h and the next.
constexpr int steps = head_dim / 16;

/// Shared memory of a block; the copy engine's swizzle and the matrix units want payloads and query at multiples of 1024.
struct alignas(1024) Shared {
    uint8_t payloads[stages][payload_bytes];
    uint8_t query[2][pass_columns][128];  // FP16, four steps in each part
    uint8_t scales[stages][scale_bytes];
    uint64_t full[stages];
    uint64_t empty[stages];
    int blocks[stages];  // block table entry of the page in each stage
};
constexpr size_t shared_bytes = sizeof(Shared) + 1024;  // the base is aligned to 16 only

/// Pages [page_begin, page_end) of one request, scored for rows [first_row, first_row + rows) of the tile.
struct Segment {
    int request;
    int page_begin, page_end;
    int first_row, rows;
};

/// Walks over a range of the tile's units; a unit is one page in one pass over a request's rows. Each warp walks on its own.
template <int heads>
class Walk {
public:
    __device__ Walk(const ScoreArgs& args, int begin, int end) : args_(args), unit_(begin), end_(end) {}

    [[nodiscard]] __device__ bool done() const { return unit_ >= end_; }

    __device__ Segment next() {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int tile_end = args_.tile_begin + args_.tile_rows;
        for (;; base_ += 32) {
            // The first row whose prefix exceeds the unit is the last one of its request.
            const int row = args_.tile_begin + base_ + lane;
            const int prefix = row < tile_end ? args_.page_prefix[row] : 0;
            const int request = row < tile_end ? args_.row_request[row] : 0;
            const uint32_t beyond = __ballot_sync(0xFFFFFFFFU, row < tile_end && prefix > unit_);
            if (beyond == 0) {
                before_ = __shfl_sync(0xFFFFFFFFU, prefix, 31);
                continue;
            }
            const int found = __ffs(static_cast<int>(beyond)) - 1;
            const int last = args_.tile_begin + base_ + found;
            const int total = __shfl_sync(0xFFFFFFFFU, prefix, found);
            const int before = found > 0 ? __shfl_sync(0xFFFFFFFFU, prefix, found - 1) : before_;
            return cut(__shfl_sync(0xFFFFFFFFU, request, found), last, before, total - before);
        }
    }

private:
    __device__ Segment cut(int request, int last, int before, int units) {
        constexpr int rows_a_pass = rows_of_pass(heads);
        const int first = max(args_.tile_begin, args_.starts[request]);
        const int pages = units / ((last - first + rows_a_pass) / rows_a_pass);
        const int pass = (unit_ - before) / pages;
        const int page_begin = (unit_ - before) % pages;
        const int page_end = min(pages, page_begin + end_ - unit_);
        unit_ += page_end - page_begin;
        const int first_row = first + pass * rows_a_pass;
        return {request, page_begin, page_end, first_row, min(rows_a_pass, last + 1 - first_row)};
    }

    const ScoreArgs& args_;
    int unit_;
    int end_;
    int base_ = 0;    // rows of the tile before those that this warp looks at
    int before_ = 0;  // prefix of the row before base_
};

// [[maybe_unused]], here and below: for architectures other than sm_90a the kernel that uses them is empty.
[[maybe_unused]] __device__ void sync_consumers() {
    asm volatile("bar.sync 1, %0;" ::"n"(consumer_threads) : "memory");
}

/// Keeps the ring full, in the order in which the consumers empty it.
template <int heads>
__device__ void produce(const ScoreArgs& args, const CUtensorMap& map, Shared& shared, int begin, int end) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int count = 0;
    for (Walk<heads> walk(args, begin, end); !walk.done();) {
        const Segment segment = walk.next();
        const int32_t* blocks = args.block_table + segment.request * args.block_table_stride;
        for (int base = segment.page_begin; base < segment.page_end; base += 32) {
            const int mine = base + lane < segment.page_end ? blocks[base + lane] : 0;
            const int n = min(32, segment.page_end - base);
            for (int i = 0; i < n; ++i, ++count) {
                const int block = __shfl_sync(0xFFFFFFFFU, mine, i);
                const int stage = count % stages;
                if (lane != 0) {
                    continue;
                }
                sm90::barrier_wait(&shared.empty[stage], (count / stages % 2) ^ 1);
                shared.blocks[stage] = block;
                if (block < 0 || block >= args.pages) {
                    // Every pass and every tile of a straddling request meets it; that with the last row counts it.
                    if (segment.first_row + segment.rows == min(args.starts[segment.request + 1], args.rows)) {
                        stepgraph::count(&args.status->invalid_blocks);
                    }
                    sm90::barrier_arrive(&shared.full[stage]);
                    continue;
                }
                sm90::barrier_arrive_expect(&shared.full[stage], payload_bytes + scale_bytes);
                sm90::copy_page(shared.payloads[stage], &map, block, &shared.full[stage]);
                sm90::copy_bytes(shared.scales[stage],
                                 page_address(args.cache, block, args.page_stride_bytes) + scale_offset(args.format, 0, 0),
                                 scale_bytes, &shared.full[stage]);
            }
            __syncwarp();
        }
    }
}

/// Two E4M3 codes, the first in the low byte, as two FP16 numbers.
__device__ uint32_t halves(uint32_t codes) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
    return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16U;
}

/// Copies the segment's query rows into shared memory as FP16, swizzled as the matrix units read them; rows that are missing
/// are 0.
template <int heads, int rows>
__device__ void load_query(const ScoreArgs& args, const Segment& segment, Shared& shared) {
    for (int i = static_cast<int>(threadIdx.x); i < heads * rows * steps; i += consumer_threads) {
        const int column = i / steps;  // of the product
        const int step = i % steps;
        uint32_t low[4] = {};   // the first eight columns of the step
        uint32_t high[4] = {};  // and the others
        if (column / heads < segment.rows) {
            const int64_t row = segment.first_row + column / heads;
            const uint8_t* codes = args.query + query_payload_offset(CacheFormat::fp8, heads, row, column % heads, step * 4);
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const uint32_t word = *reinterpret_cast<const uint32_t*>(codes + t * 32);
                low[t] = halves(word & 0xFFFFU);
                high[t] = halves(word >> 16U);
            }
        }
        uint8_t* line = shared.query[step / 4][column];
        const int chunk = step % 4 * 2;
        *reinterpret_cast<uint4*>(line + (chunk ^ (column % 8)) * 16) = make_uint4(low[0], low[1], low[2], low[3]);
        *reinterpret_cast<uint4*>(line + ((chunk + 1) ^ (column % 8)) * 16) = make_uint4(high[0], high[1], high[2], high[3]);
    }
    sm90::async_proxy_fence();
}

/// This thread's part of the keys of a stage as FP16, [step][4] as the matrix units take them.
[[maybe_unused]] __device__ void load_keys(const uint8_t* payload, int token, uint32_t (&keys)[steps][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // tokens `token` and `token + 8`
        const uint8_t* line = payload + (token + half * 8) * head_dim;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const int chunk = (lane % 4 * 2 + part) ^ (token % 8);
            const uint4 codes = *reinterpret_cast<const uint4*>(line + chunk * 16);
            const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                keys[part * 4 + i][half] = halves(words[i] & 0xFFFFU);
                keys[part * 4 + i][2 + half] = halves(words[i] >> 16U);
            }
        }
    }
}

[[maybe_unused]] __device__ float scale_of(CacheFormat format, const uint8_t* scales, int token) {
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(scales + token * 4);
    return format == CacheFormat::fp8 ? float_of(bits) : ue8m0_scale(static_cast<uint8_t>(bits));
}

/// max(0, x) that keeps a NaN, in one instruction.
[[maybe_unused]] __device__ float relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

/// What a consumer thread holds through a segment.
template <int heads, int rows>
struct Held {
    float weights[heads * rows / 4];  // of its columns of the product
    int bounds[rows];                 // 0 for rows that need no logits

    __device__ Held(const ScoreArgs& args, const Segment& segment) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int i = 0; i < heads * rows / 4; ++i) {
            const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
            const int row = column / heads;
            weights[i] = row < segment.rows
                             ? args.head_weights[static_cast<int64_t>(segment.first_row + row) * heads + column % heads]
                             : 0.0F;
        }
#pragma unroll
        for (int row = 0; row < rows; ++row) {
            const int end = row < segment.rows ? args.ends[segment.first_row + row] : 0;
            bounds[row] = end > args.unscored_bound ? end : 0;
        }
    }
};

[[maybe_unused]] __device__ float* logits_of(const ScoreArgs& args, const Segment& segment, int row) {
    return args.logits + static_cast<int64_t>(segment.first_row + row - args.tile_begin) * args.logits_stride;
}

/// Scores the page in a stage: 64 keys, for every row of the segment.
template <int heads, int rows>
__device__ void score_page(const ScoreArgs& args, const Segment& segment, const Held<heads, rows>& held, Shared& shared,
                           int stage, int page) {
    constexpr int columns = heads * rows;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int token = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4;
    uint32_t keys[steps][4];
    load_keys(shared.payloads[stage], token, keys);
    const float scale_low = scale_of(args.format, shared.scales[stage], token);
    const float scale_high = scale_of(args.format, shared.scales[stage], token + 8);
    // Nothing was copied for an invalid block: what the stage holds is computed with like any other, and not used.
    const int block = shared.blocks[stage];
    const bool valid = block >= 0 && block < args.pages;
    __syncwarp();
    if (lane == 0) {
        sm90::barrier_arrive(&shared.empty[stage]);  // all is in registers
    }

    float products[columns / 2];
#pragma unroll
    for (auto& product : products) {
        sm90::pin(product = 0.0F);
    }
#pragma unroll
    for (int i = 0; i < steps * 4; ++i) {
        sm90::pin(keys[i / 4][i % 4]);
    }
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps; ++step) {
        const uint64_t query = sm90::swizzled_rows(sm90::shared_address(shared.query[step / 4]));
        sm90::wgmma_f16<columns>(products, keys[step], query + step % 4 * 2, step);
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait_all();
#pragma unroll
    for (auto& product : products) {
        sm90::pin(product);
    }

#pragma unroll
    for (int row = 0; row < rows; ++row) {
        float low = 0.0F;
        float high = 0.0F;
#pragma unroll
        for (int j = 0; j < heads / 8; ++j) {
            const int group = row * heads / 8 + j;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                low = fmaf(held.weights[group * 2 + i], relu(products[group * 4 + i]), low);
                high = fmaf(held.weights[group * 2 + i], relu(products[group * 4 + 2 + i]), high);
            }
        }
        low += __shfl_xor_sync(0xFFFFFFFFU, low, 1);
        high += __shfl_xor_sync(0xFFFFFFFFU, high, 1);
        low += __shfl_xor_sync(0xFFFFFFFFU, low, 2);
        high += __shfl_xor_sync(0xFFFFFFFFU, high, 2);
        // Of the four lanes that hold the sums, one writes the low key and another the high one.
        const int position = page * page_tokens + token + (lane % 2) * 8;
        if (lane % 4 < 2 && position < held.bounds[row]) {
            const float logit = lane % 2 == 0 ? low * scale_low : high * scale_high;
            logits_of(args, segment, row)[position] = valid ? logit : -INFINITY;
        }
    }
}

/// Scores this warpgroup's share of a segment's pages; `count` is the number of pages that went through the ring before.
template <int heads, int rows>
__device__ void consume_segment(const ScoreArgs& args, const Segment& segment, Shared& shared, int count) {
    sync_consumers();  // nobody reads the last segment's query any more
    load_query<heads, rows>(args, segment, shared);
    const Held<heads, rows> held(args, segment);
    sync_consumers();  // the query is there
    // Warpgroups take turns, through all segments. The shuffle tells the compiler that a warp's threads agree on whose turn
    // it is.
    const int warpgroup = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 128, 0);
    const int skipped = (warpgroup - count % consumers + consumers) % consumers;
    for (int page = segment.page_begin + skipped; page < segment.page_end; page += consumers) {
        const int passed = count + page - segment.page_begin;
        const int stage = passed % stages;
        sm90::barrier_wait(&shared.full[stage], passed / stages % 2);
        score_page<heads, rows>(args, segment, held, shared, stage, page);
    }
}

template <int heads>
__device__ void consume(const ScoreArgs& args, Shared& shared, int begin, int end) {
    int count = 0;
    for (Walk<heads> walk(args, begin, end); !walk.done();) {
        const Segment segment = walk.next();
        if (segment.rows == 1) {
            consume_segment<heads, 1>(args, segment, shared, count);
        } else if (segment.rows == 2) {
            consume_segment<heads, 2>(args, segment, shared, count);
        } else if constexpr (heads < 64) {
            consume_segment<heads, 4>(args, segment, shared, count);
        }
        count += segment.page_end - segment.page_begin;
    }
}

template <int heads>
__global__ void __launch_bounds__(threads, 1)
    score_sm90_kernel(const ScoreArgs args, const __grid_constant__ CUtensorMap map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t shared_memory[];
    const uint32_t base = sm90::shared_address(shared_memory);
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory + ((base + 1023) / 1024 * 1024 - base));
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < stages; ++stage) {
            sm90::barrier_init(&shared.full[stage], 1);
            sm90::barrier_init(&shared.empty[stage], 4);  // the warps of the warpgroup that used it
        }
        sm90::barrier_init_fence();
    }
    __syncthreads();  // the barriers are there

    wait_for_producers();  // for keys, query, weights, layout and schedule, and for select's reading of the logits
    let_consumers_start();

    // What index inputs stored the ordinary way is read by the copy engine here.
    sm90::async_proxy_fence();
    const int64_t units = args.page_prefix[args.tile_begin + args.tile_rows - 1];
    const int begin = static_cast<int>(units * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);
    if (threadIdx.x < consumer_threads) {
        consume<heads>(args, shared, begin, end);
    } else {
        produce<heads>(args, map, shared, begin, end);
    }
#endif
}

using Kernel = void (*)(ScoreArgs, CUtensorMap);

Kernel kernel_for(int heads) {
    return heads == 16 ? score_sm90_kernel<16> : heads == 32 ? score_sm90_kernel<32> : score_sm90_kernel<64>;
}

int attribute_of_device(cudaDeviceAttr attribute) {
    int device = 0;
    int value = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
    return value;
}

}  // namespace

bool can_score_sm90(CacheFormat format, const uint8_t* cache, int64_t page_stride_bytes) {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, kernel_for(32)), "score_sm90");
    const bool hopper = attribute_of_device(cudaDevAttrComputeCapabilityMajor) == 9 &&
                        attribute_of_device(cudaDevAttrComputeCapabilityMinor) == 0 && attributes.ptxVersion >= 90;
    return hopper && !is_mxfp4(format) && reinterpret_cast<uintptr_t>(cache) % 16 == 0 && page_stride_bytes % 16 == 0 &&
           page_stride_bytes < int64_t{1} << 40;  // what a tensor map can step over
}

int score_sm90_rows_a_pass(int heads) {
    return rows_of_pass(heads);
}

CUtensorMap make_page_map(const uint8_t* cache, int64_t pages, int64_t page_stride_bytes) {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(address);
    CUtensorMap map{};
    const cuuint64_t extents[] = {head_dim, page_tokens, static_cast<cuuint64_t>(pages)};
    const cuuint64_t strides[] = {head_dim, static_cast<cuuint64_t>(page_stride_bytes)};  // of the second and third axis
    const cuuint32_t box[] = {head_dim, page_tokens, 1};
    const cuuint32_t steps[] = {1, 1, 1};
    const CUresult result = encode == nullptr
                                ? CUDA_ERROR_NOT_FOUND
                                : encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<uint8_t*>(cache), extents,
                                         strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        throw Error(ErrorCode::cuda, "cuTensorMapEncodeTiled failed for a cache of " + std::to_string(pages) + " pages, " +
                                         std::to_string(page_stride_bytes) + " bytes apart: CUDA driver error " +
                                         std::to_string(static_cast<int>(result)));
    }
    return map;
}

void score_sm90(const ScoreArgs& args, const CUtensorMap& pages, int blocks, LaunchContext context) {
    launch(kernel_for(args.heads), "score_sm90", context, static_cast<unsigned>(blocks), threads, shared_bytes, args, pages);
}

void prepare_score_sm90(int heads) {
    prepare_kernel(kernel_for(heads), "score_sm90", shared_bytes);
}

int score_sm90_blocks() {
    return attribute_of_device(cudaDevAttrMultiProcessorCount);
}

}  // namespace stepgraph
