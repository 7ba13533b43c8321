// Random test data: a fresh seed in every run, printed where a test fails, and repeated with STEPGRAPH_SEED=<seed>.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>

#include <cuda_bf16.h>

namespace stepgraph::test {

class Random {
public:
    Random() : Random(fresh_seed()) {}
    explicit Random(uint32_t seed) : seed_(seed), engine_(seed) {}

    /// What SCOPED_TRACE is given.
    [[nodiscard]] std::string trace() const { return "repeat with STEPGRAPH_SEED=" + std::to_string(seed_); }

    /// A whole number, both ends included.
    int64_t integer(int64_t first, int64_t last) { return std::uniform_int_distribution<int64_t>(first, last)(engine_); }
    int32_t integer32(int32_t first, int32_t last) { return static_cast<int32_t>(integer(first, last)); }
    bool one_in(int n) { return integer(1, n) == 1; }
    uint8_t byte() { return static_cast<uint8_t>(integer(0, 255)); }
    float uniform(float first, float last) { return std::uniform_real_distribution<float>(first, last)(engine_); }
    float normal(float deviation = 1.0F) { return std::normal_distribution<float>(0.0F, deviation)(engine_); }
    __nv_bfloat16 normal_bf16(float deviation = 1.0F) { return __float2bfloat16_rn(normal(deviation)); }

    std::mt19937& engine() { return engine_; }

private:
    static uint32_t fresh_seed() {
        const char* wanted = std::getenv("STEPGRAPH_SEED");
        return wanted != nullptr ? static_cast<uint32_t>(std::strtoul(wanted, nullptr, 10)) : std::random_device{}();
    }

    uint32_t seed_;
    std::mt19937 engine_;
};

}  // namespace stepgraph::test
