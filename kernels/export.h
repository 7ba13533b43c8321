// What the shared library exports.
#pragma once

#if defined(STEPGRAPH_BUILDING)
#define STEPGRAPH_API __attribute__((visibility("default")))
#else
#define STEPGRAPH_API
#endif
