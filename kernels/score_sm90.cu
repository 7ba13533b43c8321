#include "score_sm90.h"

#include <algorithm>

#include "score_block.h"

namespace stepgraph {
namespace {

using namespace sm90;

template <int heads, typename Keys>
__global__ void __launch_bounds__(threads, 1) score_sm90_kernel(const __grid_constant__ ScoreArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    score_block<heads, Keys>(args);
#else
    __trap();  // never launched: see can_score_sm90()
#endif
}

using Kernel = void (*)(ScoreArgs);

template <typename Keys>
Kernel kernel_of(int heads) {
    return heads == 16   ? score_sm90_kernel<16, Keys>
           : heads == 32 ? score_sm90_kernel<32, Keys>
                         : score_sm90_kernel<64, Keys>;
}

Kernel kernel_for(CacheFormat format, int heads) {
    return is_mxfp4(format) ? kernel_of<Mxfp4Keys>(heads) : kernel_of<Fp8Keys>(heads);
}

size_t shared_bytes_for(CacheFormat format) {
    return is_mxfp4(format) ? shared_bytes<Mxfp4Page> : shared_bytes<Fp8Page>;
}

}  // namespace

bool can_score_sm90(CacheFormat format, const uint8_t* cache, int64_t page_stride_bytes) {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, kernel_for(format, 32)), "score_sm90");
    const bool hopper = attribute_of_device(cudaDevAttrComputeCapabilityMajor) == 9 &&
                        attribute_of_device(cudaDevAttrComputeCapabilityMinor) == 0 && attributes.ptxVersion >= 90;
    return hopper && reinterpret_cast<uintptr_t>(cache) % 16 == 0 && page_stride_bytes % 16 == 0;
}

int score_sm90_rows_a_pass(int heads) {
    return row_columns / heads;
}

void score_sm90(const ScoreArgs& args, int blocks, LaunchContext context) {
    launch(kernel_for(args.format, args.heads), "score_sm90", context, static_cast<unsigned>(blocks), threads,
           shared_bytes_for(args.format), args);
}

void prepare_score_sm90(CacheFormat format, int heads) {
    prepare_kernel(kernel_for(format, heads), "score_sm90", shared_bytes_for(format));
}

int score_sm90_blocks() {
    return std::min(attribute_of_device(cudaDevAttrMultiProcessorCount), most_score_blocks);
}

}  // namespace stepgraph
