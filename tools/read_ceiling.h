// The most that reading memory can reach on this GPU: what the bytes of a step are held against.
#pragma once

namespace stepgraph::tools {

/// Bytes per second, in TB/s, that a plain reading of 4 GiB reaches: median of 11. Allocates and frees; synchronises. Throws
/// Error.
double read_ceiling_tb_s();

}  // namespace stepgraph::tools
