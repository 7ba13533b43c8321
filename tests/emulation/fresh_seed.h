// The seed of a test: STEPGRAPH_SEED where it is set, else a new one. Printed first, for a run that ends in a crash.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace stepgraph::test {

inline uint64_t fresh_seed() {
    const char* wanted = std::getenv("STEPGRAPH_SEED");
    const uint64_t seed = wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : std::random_device{}();
    std::printf("repeat with STEPGRAPH_SEED=%llu\n", static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    return seed;
}

}  // namespace stepgraph::test
