// Tensors from Python: checked against the geometry, and the pointers of them.
#pragma once

#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stepgraph/pipeline/buffers.h>
#include <stepgraph/pipeline/geometry.h>

namespace stepgraph::python {

namespace nb = nanobind;

enum class Memory { host, device };

/// Every buffer that bind() takes. The tensors are kept: their memory lives as long as this does.
struct Buffers {
    StepBuffers step;
    std::vector<LayerBuffers> layers;
    Workspace workspace;
    std::vector<nb::ndarray<nb::ro>> tensors;
};

/// Reads the attributes of a stepgraph.StepBuffers, of a sequence of stepgraph.LayerBuffers, and the workspace. Null stands
/// for None: whether that may be is bind's to say. Throws TypeError and ValueError with a sentence that names the tensor,
/// what it is and what it must be.
Buffers buffers_from(nb::handle step, nb::handle layers, nb::handle workspace, const Geometry& geometry, Memory memory);

}  // namespace stepgraph::python
