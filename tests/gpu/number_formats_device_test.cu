// Number formats on the device give the bits that they give on the host, which the host tests hold against their definition.
#include <vector>

#include <stepgraph/layouts/number_formats.h>

#include "device_step.h"

namespace stepgraph::test {
namespace {

STEPGRAPH_HD uint64_t codes_of(float x) {
    const float magnitude = fabsf(x);
    const bool is_nan = x != x;
    uint64_t all = e4m3_from_float(x);
    all |= static_cast<uint64_t>(e2m1_from_float(x)) << 8U;
    all |= static_cast<uint64_t>(__bfloat16_as_ushort(bf16_from_float(x))) << 16U;
    all |= static_cast<uint64_t>(is_nan ? 0 : mxfp4_scale_byte(magnitude)) << 32U;
    all |= static_cast<uint64_t>(is_nan ? 0 : fp8_scale_exponent(magnitude) + 64) << 40U;
    return all;
}

__global__ void code_kernel(uint64_t* out, uint32_t first, uint32_t step) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = codes_of(float_of(first + i * step));
}

__global__ void decode_kernel(float* e4m3, float* e2m1, float* powers) {
    e4m3[threadIdx.x] = float_from_e4m3(static_cast<uint8_t>(threadIdx.x));
    e2m1[threadIdx.x] = float_from_e2m1(static_cast<uint8_t>(threadIdx.x));
    powers[threadIdx.x] = threadIdx.x < 255 ? power_of_two(static_cast<int>(threadIdx.x) - 127) : 0.0F;
}

class NumberFormatsOnDevice : public GpuTest {};

TEST_F(NumberFormatsOnDevice, EncodeEveryPatternAsTheHostDoes) {
    // 2^24 patterns, evenly over all floats from a random start: every sign, exponent and 15 bits of mantissa, and besides
    // every BF16 value exactly.
    constexpr uint32_t n = 1U << 24U;
    Random random = fresh_random();
    DeviceMemory out(n * sizeof(uint64_t), 8, false);
    for (const auto& [first, step, count] :
         {std::tuple{static_cast<uint32_t>(random() % 256), 256U, n}, std::tuple{0U, 1U << 16U, 1U << 16U}}) {
        code_kernel<<<count / 256, 256>>>(out.as<uint64_t>(), first, step);
        const auto device = out.download<uint64_t>();
        std::vector<uint64_t> host(count);
        for (uint32_t i = 0; i < count; ++i) {
            host[i] = codes_of(float_of(first + i * step));
        }
        expect_same_bits(device.data(), host.data(), count, "codes");
    }
}

TEST_F(NumberFormatsOnDevice, DecodeEveryCodeAsTheHostDoes) {
    DeviceMemory e4m3(1024, 4, false);
    DeviceMemory e2m1(1024, 4, false);
    DeviceMemory powers(1024, 4, false);
    decode_kernel<<<1, 256>>>(e4m3.as<float>(), e2m1.as<float>(), powers.as<float>());
    const auto device_e4m3 = e4m3.download<float>();
    const auto device_e2m1 = e2m1.download<float>();
    const auto device_powers = powers.download<float>();
    for (int code = 0; code < 256; ++code) {
        const auto i = static_cast<size_t>(code);
        EXPECT_EQ(bits_of(device_e4m3[i]), bits_of(float_from_e4m3(static_cast<uint8_t>(code)))) << code;
        EXPECT_EQ(bits_of(device_e2m1[i]), bits_of(float_from_e2m1(static_cast<uint8_t>(code)))) << code;
        EXPECT_EQ(bits_of(device_powers[i]), code < 255 ? bits_of(power_of_two(code - 127)) : 0U) << code;
    }
}

}  // namespace
}  // namespace stepgraph::test
