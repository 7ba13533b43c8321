#include "project_sm90.h"

#include "project_block.h"
#include "tensor_map.h"

namespace stepgraph {
namespace {

using namespace projecting;

template <int row_blocks>
__global__ void __launch_bounds__(threads) project_sm90_kernel(const __grid_constant__ ProjectLaunch launch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    project_block<row_blocks>(launch);
#else
    __trap();  // never launched: see can_project_sm90()
#endif
}

struct Form {
    void (*kernel)(ProjectLaunch);
    int group_rows;  // that share a reading of the weights
    size_t (*shared_bytes)(const ProjectArgs&);
};

template <int row_blocks>
constexpr Form form = {project_sm90_kernel<row_blocks>, row_blocks* product_rows, shared_bytes<row_blocks>};

Form form_for(int rows) {
    return rows <= product_rows ? form<1> : form<2>;
}

}  // namespace

bool can_project_sm90(int depth, int other_depth) {
    const auto fits = [](int d) { return d % 32 == 0 && d <= most_project_sm90_depth; };
    return fits(depth) && fits(other_depth) && attribute_of_device(cudaDevAttrComputeCapabilityMajor) == 9 &&
           attribute_of_device(cudaDevAttrComputeCapabilityMinor) == 0 &&
           compiled_for_clusters(form<1>.kernel, "project_sm90");
}

void prepare_project_sm90(const ProjectArgs& args) {
    for (const int rows : {product_rows, 2 * product_rows}) {
        ProjectArgs of_rows = args;
        of_rows.rows = rows;
        // Fewer rows may want more, for more stages, but then within the budget.
        const size_t bytes = std::max<size_t>(form_for(rows).shared_bytes(of_rows), shared_budget + box_alignment);
        prepare_kernel(form_for(rows).kernel, "project_sm90", bytes);
    }
    find_tensor_map_encoder();
}

void project_sm90(const ProjectArgs& args, LaunchContext context) {
    const Form chosen = form_for(args.rows);
    // The driver's function for the maps wants a current context: a thread's first call of the runtime makes one so.
    compiled_for_clusters(chosen.kernel, "project_sm90");
    ProjectLaunch launch{args, {}};
    for (int i = 0; i < 2; ++i) {
        const ProjectProduct& product = args.products[i];
        launch.activations[i] = map_of_boxes(product.x, args.rows, product.depth, box_rows(args.rows), box_columns);
    }
    const int groups = (args.rows + chosen.group_rows - 1) / chosen.group_rows;
    launch_clusters(chosen.kernel, "project_sm90", context, static_cast<unsigned>(groups * blocks_of_rows(args)),
                    cluster_size, threads, chosen.shared_bytes(args), launch);
}

}  // namespace stepgraph
