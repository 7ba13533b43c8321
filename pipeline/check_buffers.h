// Checks of what an engine hands over.
#pragma once

#include <span>

#include "buffers.h"
#include "geometry.h"

namespace stepgraph {

/// Refuses null, misaligned and contradictory pointers and a workspace that is too small. Looks at the addresses alone, and
/// needs no GPU. Throws Error(invalid_buffer) or Error(workspace_too_small).
void check_addresses(const Geometry& geometry, const StepBuffers& step, std::span<const LayerBuffers> layers,
                     const Workspace& workspace, size_t workspace_bytes);

/// Refuses pointers that the current device cannot reach, such as ordinary host memory. Throws Error(invalid_buffer).
void check_device_memory(const StepBuffers& step, std::span<const LayerBuffers> layers, const Workspace& workspace);

}  // namespace stepgraph
