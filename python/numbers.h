// Numbers and handles from Python: each is checked by hand, so that a refusal names it.
#pragma once

#include <string>
#include <vector>

#include <nanobind/nanobind.h>

#include <cuda_runtime_api.h>

#include <stepgraph/pipeline/geometry.h>

namespace stepgraph::python {

namespace nb = nanobind;

/// How a value may stand in a message: its repr, not too long.
std::string repr_of(nb::handle value);

/// Throws TypeError where `value` is no whole number, and ValueError where 32 bits do not hold it.
int whole_number(nb::handle value, const std::string& name);

std::vector<int> whole_numbers(nb::handle values, const char* name);

/// From the attributes of stepgraph.Geometry, and as a dictionary of them.
Geometry geometry_from(nb::handle numbers);
nb::typed<nb::dict, nb::str, nb::any> geometry_to_dict(const Geometry& geometry);

/// The address that an integer or a stream object (.cuda_stream, __cuda_stream__(), .ptr) holds. None is none: `required`
/// says whether that is refused.
cudaStream_t stream_from(nb::handle stream, bool required);

}  // namespace stepgraph::python
