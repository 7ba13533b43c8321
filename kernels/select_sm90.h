// Select on Hopper: a row by a cluster of blocks that read its logits once.
#pragma once

#include "select.h"

namespace stepgraph {

/// Whether the kernel runs on the current device: Hopper with code for it. Throws Error.
bool can_select_sm90();

/// As select(), and the same results. A cluster of blocks a row, or one block. Reads each logit once, and a sample of a long
/// row before that; up to five times where more logits than blocks can exchange lie where, by the sample, the K-th may be.
/// How many blocks of a cluster work follows from the row's end. Needs no memory beside its arguments, and
/// prepare_select_sm90() before. `blocks_a_row`: 1, 2, 4, 8 or 16; 0: chosen by the rows of the tile. Throws Error.
void select_sm90(const SelectArgs& args, LaunchContext context, int blocks_a_row = 0);

/// Loads the kernel and lets it have its shared memory and clusters. Before capture. Throws Error.
void prepare_select_sm90();

}  // namespace stepgraph
