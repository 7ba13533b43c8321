#include "info_command.h"

#include <iostream>
#include <string>

#include <cuda_runtime_api.h>

#include <stepgraph/pipeline/pipeline.h>

#include "case_file.h"
#include "cuda_device.h"

namespace stepgraph::tools {
namespace {

/// 13000 is 13.0.
std::string cuda_version(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void print_versions() {
    int runtime = 0;
    int driver = 0;
    check_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    const bool has_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver != 0;
    std::cout << "stepgraph:      " << STEPGRAPH_VERSION << "\n"
              << "CUDA runtime:   " << cuda_version(runtime) << "\n"
              << "CUDA driver:    " << (has_driver ? "up to CUDA " + cuda_version(driver) : "none") << "\n"
              << "compiled for:   " << STEPGRAPH_COMPILED_ARCHITECTURES << "\n";
}

void print_devices() {
    const std::string reason = why_no_device();
    if (!reason.empty()) {
        std::cout << "device:         none can be used (" << reason << ")\n";
        return;
    }
    int devices = 0;
    check_cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    for (int device = 0; device < devices; ++device) {
        cudaDeviceProp properties{};
        check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
        std::cout << "device " << device << ":       " << properties.name << ", " << properties.multiProcessorCount
                  << " SMs, compute capability " << properties.major << "." << properties.minor << "\n";
    }
}

void print_shape(const Pipeline& pipeline) {
    const Geometry& g = pipeline.geometry();
    std::cout << "shape:          " << g.heads << " heads, top " << g.top_k << ", " << g.max_rows << " rows, "
              << g.max_model_len << " tokens over " << g.dcp.world_size << (g.dcp.world_size == 1 ? " rank, " : " ranks, ")
              << format_name(g.cache_format) << ", projections "
              << (g.projects() ? "made here (q_lora_rank " + std::to_string(g.q_lora_rank) + ", hidden_size " +
                                     std::to_string(g.hidden_size) + ")"
                               : "by the engine")
              << "\n"
              << "tile rows:      " << pipeline.tile_rows() << "\n"
              << "workspace:      " << pipeline.workspace_bytes() << " bytes\n";
}

}  // namespace

int info(const ModelShape& shape) {
    const Pipeline pipeline(geometry_of(shape), options_of(shape));  // first: a wrong shape is refused before a line is out
    print_versions();
    std::cout
        << "what runs where: every stage on any GPU that the kernels are compiled for, from compute capability 8.0 on;"
           " programmatic edges from 9.0 on; projections in one kernel, the fast scorer and selection by clusters on 9.0"
           " with code for sm_90a; `run`, `demo` and `trace` with `--device cpu`, and `info`, anywhere\n";
    print_devices();
    print_shape(pipeline);
    return 0;
}

}  // namespace stepgraph::tools
