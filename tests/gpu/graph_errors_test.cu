// What a pipeline on a GPU refuses, and the errors of an engine that it must bear.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "device_step.h"

namespace stepgraph::test {
namespace {

class StepGraphErrors : public GpuTest {};

__global__ void engine_kernel() {}

TEST_F(StepGraphErrors, LeavesNoErrorBehindAndMindsNone) {
    Random random = fresh_random();
    for (const int hidden_size : {192, 200}) {  // for Hopper's projections and for cuBLASLt's
        StepCase step = make_case({.layers = 2, .project = true, .hidden_size = hidden_size}, random);
        DeviceStep device(step);
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
        device.pipeline().capture({8});
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
        int count = 0;
        EXPECT_NE(cudaDeviceGetAttribute(&count, cudaDevAttrWarpSize, 12345), cudaSuccess);  // an engine's own mistake
        device.run_eager(8);
        EXPECT_NE(cudaSetDevice(12345), cudaSuccess);
        device.pipeline().capture({8});
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }
}

TEST_F(StepGraphErrors, SurvivesAnEngineThatThrowsBetweenLayers) {
    Random random = fresh_random();
    StepCase step = make_case({.layers = 2}, random);
    DeviceStep device(step);
    device.pipeline().capture({8});
    EXPECT_THROW(device.pipeline().capture({4, 8},
                                           [](int layer, int, cudaStream_t) {
                                               if (layer == 1) {
                                                   throw std::runtime_error("the engine's own");
                                               }
                                           }),
                 std::runtime_error);
    EXPECT_EQ(device.pipeline().buckets(), std::vector<int>{8});  // what was captured before is still there
    EXPECT_THROW(device.pipeline().capture(
                     {8}, [](int, int, cudaStream_t stream) { check_cuda(cudaStreamSynchronize(stream), "sync"); }),
                 Error);
    device.replay(8);
    device.expect_equal(step, expected_step(step, 8, true), 8);
}

TEST_F(StepGraphErrors, ReportsALaunchOfTheEngineThatFailed) {
    Random random = fresh_random();
    const StepCase step = make_case({.layers = 2}, random);
    DeviceStep device(step);
    try {
        device.pipeline().capture({4, 8}, [](int layer, int rows, cudaStream_t stream) {
            if (layer == 1 && rows == 8) {
                engine_kernel<<<1, 4096, 0, stream>>>();  // more threads than a block may have
            }
        });
        ADD_FAILURE() << "the engine's failed launch went unnoticed";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::invalid_capture);
        EXPECT_NE(std::string(error.what()).find("for layer 1 of bucket 8"), std::string::npos) << error.what();
    }
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_TRUE(device.pipeline().buckets().empty());
}

TEST_F(StepGraphErrors, RefusesToBindOrCaptureFromItsOwnCallback) {
    Random random = fresh_random();
    const StepCase step = make_case({}, random);
    DeviceStep device(step);
    int refused = 0;
    device.pipeline().capture({8}, [&](int, int, cudaStream_t) {
        EXPECT_THROW(device.pipeline().capture({4}), Error);
        ++refused;
    });
    EXPECT_EQ(refused, 1);
    device.replay(8);
}

TEST_F(StepGraphErrors, RefusesALayerWithoutItsLayout) {
    Random random = fresh_random();
    StepCase step = make_case({.max_rows = 8}, random);
    DeviceStep device(step);
    const auto code_of = [](auto call) {
        try {
            call();
        } catch (const Error& error) {
            return error.code();
        }
        return ErrorCode::cuda;
    };
    EXPECT_EQ(code_of([&] { device.pipeline().enqueue_layer(0, 8, device.stream()); }), ErrorCode::wrong_order);
    device.pipeline().enqueue_layout(4, device.stream());
    EXPECT_EQ(code_of([&] { device.pipeline().enqueue_layer(0, 8, device.stream()); }), ErrorCode::invalid_rows);
    device.pipeline().capture({8});
    EXPECT_EQ(code_of([&] { device.pipeline().enqueue_layer(0, 8, device.stream()); }), ErrorCode::wrong_order);
    device.run_eager(8);
    device.pipeline().reset_status(device.stream());
    device.run_eager(8);
    device.expect_equal(step, expected_step(step, 8, true), 8);
}

TEST_F(StepGraphErrors, RefusesRowsAndLayersItWasNotMadeFor) {
    Random random = fresh_random();
    const StepCase step = make_case({.max_rows = 8}, random);
    DeviceStep device(step);
    Pipeline& pipeline = device.pipeline();
    const auto refused = [](auto call, ErrorCode code, const char* part) {
        try {
            call();
            ADD_FAILURE() << "nothing was refused";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), code) << error.what();
            EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
        }
    };
    refused([&] { pipeline.replay(1, device.stream()); }, ErrorCode::wrong_order, "replay was called before capture");
    refused([&] { pipeline.capture({}); }, ErrorCode::invalid_rows, "buckets is empty");
    refused([&] { pipeline.capture({4, 9}); }, ErrorCode::invalid_rows, "a bucket is 9 rows, must be 1 to max_rows (8)");
    refused([&] { pipeline.capture({0}); }, ErrorCode::invalid_rows, "a bucket is 0 rows");
    pipeline.capture({4, 2, 4});
    EXPECT_EQ(pipeline.buckets(), (std::vector<int>{2, 4}));
    refused([&] { pipeline.replay(5, device.stream()); }, ErrorCode::invalid_rows,
            "rows is 5, must be 1 to the largest captured bucket (4)");
    refused([&] { pipeline.replay(0, device.stream()); }, ErrorCode::invalid_rows, "rows is 0");
    refused([&] { static_cast<void>(pipeline.graph(3)); }, ErrorCode::invalid_rows, "bucket is 3");
    refused([&] { pipeline.enqueue_layer(1, 1, device.stream()); }, ErrorCode::invalid_layer, "layer is 1, must be 0 to 0");
    refused([&] { pipeline.enqueue_layer(-1, 1, device.stream()); }, ErrorCode::invalid_layer, "layer is -1");
    refused([&] { pipeline.enqueue_layer(0, 9, device.stream()); }, ErrorCode::invalid_rows,
            "rows is 9, must be 1 to max_rows (8)");
    refused([&] { pipeline.enqueue_layout(0, device.stream()); }, ErrorCode::invalid_rows, "rows is 0");
    check_cuda(cudaStreamSynchronize(device.stream()), "nothing was launched");
    const auto indices = device.layers()[0].out.indices.download<uint8_t>();
    EXPECT_TRUE(std::all_of(indices.begin(), indices.end(), [](uint8_t byte) { return byte == poison_byte; }));
}

TEST_F(StepGraphErrors, RefusesMemoryThatTheDeviceCannotReach) {
    Random random = fresh_random();
    const StepCase step = make_case({}, random);
    DeviceStep device(step);
    alignas(256) static int32_t host[64];
    Pipeline pipeline(step.geometry);
    const auto& memory = device.layers()[0];
    const LayerBuffers layer{.iq = memory.iq.as<__nv_bfloat16>(),
                             .projected = memory.projected.as<__nv_bfloat16>(),
                             .k_norm_weight = memory.k_norm_weight.as<float>(),
                             .k_norm_bias = memory.k_norm_bias.as<float>(),
                             .cache = memory.cache.as<uint8_t>(),
                             .indices = memory.out.indices.as<int32_t>()};
    DeviceMemory workspace(pipeline.workspace_bytes(), 256, false);
    const int32_t* table = memory.out.indices.as<int32_t>();
    const auto message = [&](const StepBuffers& buffers) -> std::string {
        try {
            pipeline.bind(buffers, {&layer, 1}, {workspace.as<void>(), workspace.bytes()});
        } catch (const Error& error) {
            return error.code() == ErrorCode::invalid_buffer ? error.what() : "another code";
        }
        return "nothing was refused";
    };
    const std::string sentence = message({.seq_lens = host, .query_lens = table, .block_table = table});
    EXPECT_NE(sentence.find("seq_lens is 0x"), std::string::npos) << sentence;
    EXPECT_NE(sentence.find("must be device memory"), std::string::npos) << sentence;
}

}  // namespace
}  // namespace stepgraph::test
