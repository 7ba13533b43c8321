// What the shared library exports.
#pragma once

#if defined(STEPGRAPH_BUILDING)
#define STEPGRAPH_API __attribute__((visibility("default")))
#define STEPGRAPH_HIDDEN __attribute__((visibility("hidden")))  // inside a class that is exported
#else
#define STEPGRAPH_API
#define STEPGRAPH_HIDDEN
#endif
