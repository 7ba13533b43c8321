#include "project_sm90.h"

#include "project_block.h"

namespace stepgraph {
namespace {

using namespace projecting;

template <int output_tiles, int row_tiles>
__global__ void __launch_bounds__(threads) project_sm90_kernel(const __grid_constant__ ProjectArgs args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    project_block<output_tiles, row_tiles>(args);
#else
    __trap();  // never launched: see can_project_sm90()
#endif
}

using Kernel = void (*)(ProjectArgs);

struct Form {
    Kernel kernel;
    int outputs;
    size_t (*shared_bytes)(const ProjectArgs&);
};

template <int output_tiles, int row_tiles>
constexpr Form form = {project_sm90_kernel<output_tiles, row_tiles>, output_tiles * 16,
                       shared_bytes<output_tiles * 16, row_tiles * 8>};

/// Few rows: small tiles, so that every multiprocessor has several to wait for. More: larger ones, because each tile reads
/// all activations.
Form form_for(int rows) {
    return rows <= 8 ? form<1, 1> : rows <= 16 ? form<1, 2> : rows <= 32 ? form<1, 4> : form<2, 8>;
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
        prepare_kernel(chosen.kernel, "project_sm90", chosen.shared_bytes(args));
    }
}

void project_sm90(const ProjectArgs& args, LaunchContext context) {
    const Form chosen = form_for(args.rows);
    const int blocks = blocks_of(args.products[0], chosen.outputs) + blocks_of(args.products[1], chosen.outputs);
    launch_clusters(chosen.kernel, "project_sm90", context, static_cast<unsigned>(blocks), cluster_size, threads,
                    chosen.shared_bytes(args), args);
}

}  // namespace stepgraph
