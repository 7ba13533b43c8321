// `stepgraph info`: what this build is, what it finds and what a model's shape costs. Needs no GPU.
#pragma once

#include "model_shape.h"

namespace stepgraph::tools {

/// Returns the exit code. Throws Error(invalid_geometry).
int info(const ModelShape& shape);

}  // namespace stepgraph::tools
