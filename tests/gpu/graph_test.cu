// Capture and replay: what the graph is made of, and that a replay is the eager step.
#include <algorithm>
#include <future>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include <stepgraph/kernels/project_sm90.h>
#include <stepgraph/layouts/decode_layout.h>
#include <stepgraph/layouts/tiles.h>

#include "device_step.h"

namespace stepgraph::test {
namespace {

class StepGraph : public GpuTest {};

/// Stands in for an engine's attention: reads a layer's indices and leaves a checksum.
__global__ void attention_kernel(const int32_t* indices, int n, unsigned long long* sum) {
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
        atomicAdd(sum, static_cast<unsigned long long>(static_cast<long long>(indices[i]) + 2));
    }
}

/// Takes processors away for a while, on another stream.
__global__ void load_kernel(long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {
    }
}

std::string kind_of(const GraphNode& node) {
    if (node.type != cudaGraphNodeTypeKernel) {
        return node.name;
    }
    for (const char* own : {"schedule", "index_inputs", "project", "score", "select", "attention"}) {
        for (const char* variant : {"_kernel", "_sm90_kernel"}) {
            if (node.name.find(std::string(own) + variant) != std::string::npos) {
                return own;
            }
        }
    }
    if (node.name.find("DeviceScanInit") != std::string::npos) {
        return "scan init";
    }
    if (node.name.find("DeviceScan") != std::string::npos) {
        return "scan";
    }
    return node.name.find("for_each") != std::string::npos ? "for_each" : "product";
}

using Edges = std::multiset<std::string>;

/// Nodes named by kind and how many of that kind came before, as "score 3".
std::vector<std::string> names_of(const std::vector<GraphNode>& nodes) {
    std::map<std::string, int> seen;
    std::vector<std::string> names;
    for (const GraphNode& node : nodes) {
        const std::string kind = kind_of(node);
        names.push_back(kind + " " + std::to_string(seen[kind]++));
    }
    return names;
}

Edges edges_of(const CapturedGraph& graph) {
    const std::vector<std::string> names = names_of(graph.nodes());
    Edges edges;
    for (const GraphEdge& edge : graph.edges()) {
        edges.insert(names[edge.from] + (edge.programmatic ? " ~> " : " -> ") + names[edge.to]);
    }
    return edges;
}

/// The edges that a step must have, from its numbers alone.
Edges expected_edges(int requests, int layers, int tiles, bool projects, bool own_projections, bool engine_between,
                     bool programmatic) {
    const std::string soft = programmatic ? " ~> " : " -> ";
    Edges edges = {"for_each 0" + soft + "schedule 0"};
    if (requests > most_counted_requests) {
        edges.insert({"scan init 0 -> scan 0", "scan 0 -> for_each 0"});
    }
    std::string before = "schedule 0";
    std::map<std::string, int> made;
    const auto next = [&made](const char* kind) { return std::string(kind) + " " + std::to_string(made[kind]++); };
    for (int layer = 0; layer < layers; ++layer) {
        std::vector<std::string> producers = {before};
        if (projects) {
            std::string last;
            std::string first;
            if (own_projections) {
                first = last = next("project");
            } else {
                first = next("product");
                last = next("product");
                edges.insert(first + " -> " + last);
            }
            if (layer > 0) {
                edges.insert(before + (own_projections ? soft : " -> ") + first);
                producers.clear();
            }
            producers.push_back(last);
        }
        before = next("index_inputs");
        for (const std::string& producer : producers) {
            edges.insert(producer + soft + before);
        }
        for (int tile = 0; tile < tiles; ++tile) {
            for (const char* kind : {"score", "select"}) {
                const std::string node = next(kind);
                edges.insert(before + soft + node);
                before = node;
            }
        }
        if (engine_between) {
            const std::string node = next("attention");
            edges.insert(before + " -> " + node);
            before = node;
        }
    }
    return edges;
}

TEST_F(StepGraph, HoldsExactlyTheNodesAndEdgesThatItsNumbersGive) {
    Random random = fresh_random();
    DeviceMemory sum(8, 8, false);
    // Projected elsewhere; for Hopper's kernel; for cuBLASLt.
    for (const auto& [hidden_size, requests] : {std::pair{0, 10}, {192, 10}, {200, 10}, {192, 300}}) {
        const bool projects = hidden_size > 0;
        const bool own_projections = projects && can_project_sm90(hidden_size, 128);
        for (const bool programmatic : {false, true}) {
            for (const int layers : {1, 3}) {
                const StepCase step = make_case({.max_rows = 40,
                                                 .max_requests = requests,
                                                 .columns = 2,
                                                 .layers = layers,
                                                 .project = projects,
                                                 .hidden_size = hidden_size},
                                                random);
                DeviceStep device(step, {.programmatic_edges = programmatic, .tile_rows = 16});
                for (const bool engine_between : {false, true}) {
                    Pipeline::AfterLayer attention = [&](int layer, int rows, cudaStream_t stream) {
                        const auto& out = device.layers()[static_cast<size_t>(layer)].out;
                        attention_kernel<<<1, 128, 0, stream>>>(out.indices.as<int32_t>(), rows * 64,
                                                                sum.as<unsigned long long>());
                    };
                    device.pipeline().capture({5, 40}, engine_between ? attention : nullptr);
                    for (const int rows : {5, 40}) {
                        const CapturedGraph& graph = device.pipeline().graph(rows);
                        const int tiles = tile_count(rows, 16);
                        EXPECT_EQ(edges_of(graph),
                                  expected_edges(requests, layers, tiles, projects, own_projections, engine_between,
                                                 programmatic && compiled_with_programmatic_launch()));
                        const auto per_layer = static_cast<size_t>((own_projections ? 1
                                                                    : projects      ? 2
                                                                                    : 0) +
                                                                   1 + 2 * tiles + (engine_between ? 1 : 0));
                        const size_t layout_and_schedule = requests > most_counted_requests ? 4 : 2;
                        EXPECT_EQ(graph.nodes().size(), layout_and_schedule + static_cast<size_t>(layers) * per_layer);
                        for (const GraphNode& node : graph.nodes()) {
                            EXPECT_EQ(node.type, cudaGraphNodeTypeKernel) << node.name;
                        }
                        const std::string dot = graph.dot();
                        EXPECT_EQ(static_cast<size_t>(std::count(dot.begin(), dot.end(), '>')), graph.edges().size());
                    }
                }
            }
        }
    }
}

TEST_F(StepGraph, CapturedWithDummyInputsReplaysWithOthers) {
    Random random = fresh_random();
    for (const bool programmatic : {true, false}) {
        StepCase dummy = make_case({.max_rows = 12, .max_requests = 4, .layers = 2}, random);
        dummy.set_lengths(0, 0);
        dummy.slots.assign(12, -1);
        DeviceStep captured(dummy, {.programmatic_edges = programmatic}, {}, true);
        captured.pipeline().capture({12});
        captured.poison_outputs();

        StepCase real = dummy;
        real.set_lengths(300, 3);
        real.draw_activations(random);
        for (int64_t row = 0; row < 12; ++row) {
            const auto block = real.block_table[static_cast<size_t>(row / 3 * real.geometry.block_table_stride + 297 / 64)];
            real.slots[static_cast<size_t>(row)] = int64_t{block} * 64 + (297 + row % 3) % 64;
        }
        captured.upload_inputs(real);
        captured.replay(12);

        DeviceStep eager(real, {}, {}, true);
        eager.run_eager(12);
        EXPECT_EQ(captured.snapshot(), eager.snapshot());
        captured.expect_equal(real, expected_step(real, 12, true), 12);
    }
}

TEST_F(StepGraph, ReplaysAThousandStepsOfChangingLengths) {
    Random random = fresh_random();
    StepCase step = make_case({.max_rows = 8, .max_requests = 6, .columns = 6}, random);
    DeviceStep device(step);
    const std::vector<int> buckets = {1, 2, 4, 8};
    device.pipeline().capture(buckets);
    for (int i = 0; i < 1000 && !HasFailure(); ++i) {
        SCOPED_TRACE("step " + std::to_string(i));
        const int rows = static_cast<int>(1 + random() % 8);
        const int bucket = *std::lower_bound(buckets.begin(), buckets.end(), rows);
        step.draw_lengths(random, rows);  // smaller after larger too: the old rows stand behind it
        step.draw_activations(random);
        device.upload_inputs(step);
        device.poison_outputs();
        device.pipeline().reset_status(device.stream());
        device.replay(rows);
        device.expect_equal(step, expected_step(step, bucket, true), bucket);
    }
}

TEST_F(StepGraph, GivesTheSameBitsWithProgrammaticEdgesOnAndOff) {
    Random random = fresh_random();
    for (const bool projects : {false, true}) {
        StepCase step =
            make_case({.max_rows = 64, .max_requests = 20, .columns = 16, .layers = 3, .project = projects}, random);
        DeviceStep on(step, {.programmatic_edges = true, .tile_rows = 8});
        DeviceStep off(step, {.programmatic_edges = false, .tile_rows = 8});
        on.pipeline().capture({64});
        off.pipeline().capture({64});
        for (int i = 0; i < 100; ++i) {
            step.draw_lengths(random, 64);
            step.draw_activations(random);
            on.upload_inputs(step);
            off.upload_inputs(step);
            on.replay(64);
            off.replay(64);
            ASSERT_EQ(on.snapshot(), off.snapshot()) << "step " << i;
        }
    }
}

TEST_F(StepGraph, RunsInsideAForeignCaptureWithAttentionBetweenLayers) {
    Random random = fresh_random();
    for (const bool projects : {false, true}) {
        StepCase step = make_case({.max_rows = 10, .max_requests = 5, .layers = 3, .project = projects}, random);
        DeviceStep device(step);
        DeviceMemory sum(8, 8, false);
        sum.fill(0);
        cudaStream_t stream = nullptr;
        check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        // Global is the strictest mode: it refuses hidden allocations and synchronisation of the whole process.
        check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
        device.pipeline().enqueue_layout(10, stream);
        for (int layer = 0; layer < 3; ++layer) {
            device.pipeline().enqueue_layer(layer, 10, stream);
            const auto& out = device.layers()[static_cast<size_t>(layer)].out;
            attention_kernel<<<1, 128, 0, stream>>>(out.indices.as<int32_t>(), 640, sum.as<unsigned long long>());
        }
        cudaGraph_t raw = nullptr;
        check_cuda(cudaStreamEndCapture(stream, &raw), "cudaStreamEndCapture");
        const CapturedGraph graph = CapturedGraph::adopt(raw);
        const bool own_projections = projects && can_project_sm90(step.geometry.hidden_size, step.geometry.q_lora_rank);
        EXPECT_EQ(graph.nodes().size(), 2U + 3U * (own_projections ? 5U : projects ? 6U : 4U));
        graph.launch(stream);
        check_cuda(cudaStreamSynchronize(stream), "the engine's step");
        const auto captured = device.snapshot();

        DeviceStep eager(step);
        eager.run_eager(10);
        EXPECT_EQ(captured, eager.snapshot());
        unsigned long long expected = 0;
        for (const auto& layer : eager.layers()) {
            for (const int32_t index : layer.out.indices.download<int32_t>()) {
                expected += static_cast<unsigned long long>(int64_t{index} + 2);
            }
        }
        EXPECT_EQ(sum.download<unsigned long long>()[0], expected);
        cudaStreamDestroy(stream);
    }
}

TEST_F(StepGraph, CaptureTouchesNoBuffer) {
    Random random = fresh_random();
    const StepCase step = make_case({.layers = 2, .project = true}, random);
    DeviceStep device(step);
    const auto before = device.snapshot();
    device.pipeline().capture({1, 8});
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    EXPECT_EQ(device.snapshot(), before);
}

TEST_F(StepGraph, StandsBesideOtherPipelinesAndSurvivesMoves) {
    // The scorer's shared memory grows with the heads: binding for 32 must not take away what 64 need.
    Random random = fresh_random();
    StepCase large = make_case({.heads = 64}, random);
    StepCase small = make_case({.format = CacheFormat::mxfp4, .heads = 16, .layers = 2}, random);
    DeviceStep first(large);
    DeviceStep second(small);
    first.pipeline().capture({8});
    second.pipeline().capture({8});
    Pipeline moved = std::move(first.pipeline());
    moved.replay(8, first.stream());
    second.replay(8);
    check_cuda(cudaStreamSynchronize(first.stream()), "the first");
    first.pipeline() = std::move(moved);
    first.expect_equal(large, expected_step(large, 8, true), 8);
    second.expect_equal(small, expected_step(small, 8, true), 8);
}

TEST_F(StepGraph, TakesEachLayersProjectionsFromWhoeverMakesThem) {
    Random random = fresh_random();
    StepCase step = make_case({.layers = 3, .project = true}, random);
    StepCase by_engine = make_case({}, random);
    step.layers[1].q_c.clear();
    step.layers[1].hidden.clear();
    step.layers[1].wq_b.clear();
    step.layers[1].w_kv.clear();
    step.layers[1].iq = by_engine.layers[0].iq;
    step.layers[1].projected = by_engine.layers[0].projected;
    const Options portable{.portable_scorer = true};
    DeviceStep device(step, portable);
    device.pipeline().capture({8});
    device.replay(8);
    const auto captured = device.snapshot();
    DeviceStep eager(step, portable);
    eager.run_eager(8);
    EXPECT_EQ(captured, eager.snapshot());
    // The engine's layer is the reference's, bit for bit.
    const ExpectedStep expected = expected_step(step, 8, true);
    EXPECT_EQ(device.layers()[1].out.indices.download<int32_t>(), expected.layers[1].indices);
    EXPECT_EQ(device.layers()[1].out.logits.download<float>(), expected.layers[1].logits);
}

TEST_F(StepGraph, LetsTheEngineForkBetweenLayers) {
    Random random = fresh_random();
    StepCase step = make_case({.layers = 2}, random);
    DeviceStep device(step);
    DeviceMemory sums(16, 8, false);
    sums.fill(0);
    cudaStream_t side = nullptr;
    cudaEvent_t event = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    device.pipeline().capture({8}, [&](int layer, int rows, cudaStream_t stream) {
        const int32_t* indices = device.layers()[static_cast<size_t>(layer)].out.indices.as<int32_t>();
        check_cuda(cudaEventRecord(event, stream), "cudaEventRecord");
        check_cuda(cudaStreamWaitEvent(side, event, 0), "cudaStreamWaitEvent");
        attention_kernel<<<1, 128, 0, side>>>(indices, rows * 64, sums.as<unsigned long long>());
        attention_kernel<<<1, 128, 0, stream>>>(indices, rows * 64, sums.as<unsigned long long>() + 1);
        check_cuda(cudaEventRecord(event, side), "cudaEventRecord");
        check_cuda(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
    });
    device.replay(8);
    device.expect_equal(step, expected_step(step, 8, true), 8);
    const auto both = sums.download<unsigned long long>();
    EXPECT_EQ(both[0], both[1]);
    EXPECT_NE(both[0], 0U);
    cudaEventDestroy(event);
    cudaStreamDestroy(side);
}

TEST_F(StepGraph, BindsAndCapturesWhileAnotherThreadCapturesGlobally) {
    Random random = fresh_random();
    for (const bool project : {false, true}) {
        if (project && !can_project_sm90(192, 128)) {
            continue;  // making a cuBLASLt handle is what such a capture does not bear
        }
        StepCase step = make_case({.layers = 2, .project = project}, random);
        DeviceStep warm(step);
        std::promise<void> begun;
        std::promise<void> done;
        cudaError_t ended = cudaErrorUnknown;
        std::thread other([&] {
            cudaStream_t stream = nullptr;
            cudaGraph_t graph = nullptr;
            cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
            load_kernel<<<1, 1, 0, stream>>>(1);  // loaded before the capture, which would not bear it
            cudaStreamSynchronize(stream);
            cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
            begun.set_value();
            done.get_future().wait();
            load_kernel<<<1, 1, 0, stream>>>(1);
            ended = cudaStreamEndCapture(stream, &graph);
            cudaGraphDestroy(graph);
            cudaStreamDestroy(stream);
        });
        begun.get_future().wait();
        std::string failure;
        try {
            warm.bind_again();
            warm.pipeline().capture({8});
        } catch (const Error& error) {
            failure = error.what();
        }
        done.set_value();
        other.join();
        EXPECT_EQ(failure, "");
        EXPECT_EQ(ended, cudaSuccess);
        warm.replay(8);
        DeviceStep eager(step);
        eager.run_eager(8);
        EXPECT_EQ(warm.snapshot(), eager.snapshot());
    }
}

TEST_F(StepGraph, WorksByTheLengthsWhateverWidthWasCaptured) {
    // Captured for a wide table and run short, and the other way round: the same bits as a table of the right width.
    Random random = fresh_random();
    StepCase narrow = make_case({.max_rows = 4, .max_requests = 4, .columns = 4}, random);
    narrow.set_lengths(200, 1);
    StepCase wide = narrow;
    wide.geometry.block_table_columns = 4096;
    wide.geometry.block_table_stride = 4096;
    wide.geometry.max_model_len = 262144;
    wide.block_table.assign(4 * 4096, -1);
    for (size_t q = 0; q < 4; ++q) {
        std::copy_n(narrow.block_table.begin() + static_cast<int64_t>(q * 7), 4,
                    wide.block_table.begin() + static_cast<int64_t>(q * 4096));
    }
    const Wanted wanted{.logits = false};
    DeviceStep a(narrow, {}, wanted);
    DeviceStep b(wide, {}, wanted);
    a.pipeline().capture({4});
    b.pipeline().capture({4});
    a.replay(4);
    b.replay(4);
    EXPECT_EQ(a.snapshot(), b.snapshot());

    // The graph of the wide table, captured while the lengths were short, serves its full width too.
    StepCase full = wide;
    full.geometry.pages = wide.geometry.pages;
    for (size_t column = 0; column < 4096; ++column) {
        full.block_table[column] = static_cast<int32_t>(column % 20);  // pages may be shared: they are only read
    }
    full.seq_lens = {262144, 0, 0, 0};
    full.query_lens = {1, 0, 0, 0};
    b.upload_inputs(full);
    b.upload_caches(full);
    b.pipeline().reset_status(b.stream());
    b.poison_outputs();
    b.replay(4);
    b.expect_equal(full, expected_step(full, 4, true), 4);
}

TEST_F(StepGraph, KeepsNoScratchOutsideItsWorkspace) {
    Random random = fresh_random();
    StepCase step = make_case({.max_rows = 16, .max_requests = 6, .layers = 2, .project = true}, random);
    DeviceStep device(step, {.tile_rows = 5});
    device.pipeline().capture({16});
    device.replay(16);
    const auto first = device.snapshot();
    for (int i = 0; i < 1000; ++i) {
        // Churn: what a per-call allocation would have left behind is handed to someone else and overwritten.
        DeviceMemory other(1U << (10U + random() % 12U), 256, false);
        other.fill(static_cast<uint8_t>(i));
        device.pipeline().replay(16, device.stream());
    }
    check_cuda(cudaStreamSynchronize(device.stream()), "the replays");
    EXPECT_EQ(device.snapshot(), first);
}

TEST_F(StepGraph, StaysTheSameOverAHundredThousandReplaysOnALoadedDevice) {
    Random random = fresh_random();
    StepCase step = make_case({.max_rows = 16, .max_requests = 6, .columns = 4}, random);
    DeviceStep device(step, {.tile_rows = 8});
    device.pipeline().capture({16});
    device.replay(16);
    const auto first = device.snapshot();
    cudaStream_t other = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    for (int i = 0; i < 100000; ++i) {
        if (i % 20 == 0) {
            load_kernel<<<static_cast<unsigned>(1 + random() % 200), 512, 0, other>>>(
                static_cast<long long>(random() % 400000));
        }
        device.pipeline().replay(16, device.stream());
        if (i % 1000 == 999) {
            ASSERT_EQ(device.snapshot(), first) << "replay " << i;
            device.poison_outputs();
        }
    }
    check_cuda(cudaStreamSynchronize(other), "the load");
    cudaStreamDestroy(other);
}

}  // namespace
}  // namespace stepgraph::test
