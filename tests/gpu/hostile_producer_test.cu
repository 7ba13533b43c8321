// A producer that waits, triggers at once, sleeps 100 us and only then writes, in front of every kernel. Each kernel must
// still see what it wrote; the same kernel compiled without its wait must not, or the test shows nothing.
#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include <stepgraph/kernels/index_inputs.h>
#include <stepgraph/kernels/project_sm90.h>
#include <stepgraph/kernels/reference/index_inputs.h>
#include <stepgraph/kernels/reference/widen.h>
#include <stepgraph/kernels/schedule.h>
#include <stepgraph/kernels/score.h>
#include <stepgraph/kernels/score_sm90.h>
#include <stepgraph/kernels/select.h>
#include <stepgraph/kernels/select_sm90.h>
#include <stepgraph/layouts/query_row.h>
#include <stepgraph/tools/step_checks.h>

#include "device_step.h"
#include "without_wait.h"

namespace stepgraph::test {
namespace {

struct Delivery {
    uint32_t* to;
    const uint32_t* from;
    size_t words;
};

struct Deliveries {
    Delivery list[7];
    int count;
};

__device__ void sleep_100_us() {
    unsigned long long begin;
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < 100000);
}

__global__ void hostile_producer_kernel(Deliveries deliveries) {
    wait_for_producers();
    let_consumers_start();
    sleep_100_us();
    for (int d = 0; d < deliveries.count; ++d) {
        for (size_t i = threadIdx.x; i < deliveries.list[d].words; i += blockDim.x) {
            deliveries.list[d].to[i] = deliveries.list[d].from[i];
        }
    }
}

/// An input that the producer writes late: where the kernel looks for it, and the truth beside.
class LateInput {
public:
    template <typename Element>
    explicit LateInput(const std::vector<Element>& truth)
        : live_(truth.size() * sizeof(Element), 16, false), truth_(truth.size() * sizeof(Element), 16, false) {
        truth_.upload(truth);
        live_.fill(0);
    }
    void reset() { live_.fill(0); }
    template <typename Element>
    [[nodiscard]] Element* as() const {
        return live_.as<Element>();
    }
    [[nodiscard]] Delivery delivery() const {
        return {live_.as<uint32_t>(), truth_.as<uint32_t>(), truth_.bytes() / sizeof(uint32_t)};
    }

private:
    DeviceMemory live_;
    DeviceMemory truth_;
};

class HostileProducer : public GpuTest {
protected:
    void SetUp() override {
        GpuTest::SetUp();
        if (!IsSkipped() && !compiled_with_programmatic_launch()) {
            GTEST_SKIP() << "needs an NVIDIA GPU with code of its own for sm_90 or newer: others never start early";
        }
    }

    /// Runs producer and consumer and expects `right()` afterwards; with the consumer that does not wait, the opposite.
    void check(std::initializer_list<LateInput*> inputs, const std::function<void()>& poison,
               const std::function<void()>& consumer, const std::function<void()>& without_wait,
               const std::function<bool()>& right) {
        Deliveries deliveries{};
        for (LateInput* input : inputs) {
            deliveries.list[deliveries.count++] = input->delivery();
        }
        for (const bool waits : {true, false}) {
            // The first run may load the kernels late; the second one meets the producer asleep.
            for (int run = 0; run < 2; ++run) {
                for (LateInput* input : inputs) {
                    input->reset();
                }
                poison();
                launch(hostile_producer_kernel, "hostile producer", {cudaStreamPerThread, true}, 1, 256, 0, deliveries);
                (waits ? consumer : without_wait)();
                check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "the consumer");
            }
            EXPECT_EQ(right(), waits) << (waits ? "the kernel read before its producer had written"
                                                : "the kernel without a wait came through: this test shows nothing");
        }
    }
};

TEST_F(HostileProducer, IsWaitedForByTheSchedule) {
    const std::vector<int32_t> requests = {0, 0, 1, 2};
    const std::vector<int32_t> ends = {640, 641, 6400, 64};
    LateInput late_requests(requests);
    LateInput late_ends(ends);
    DeviceMemory prefix(16, 16, false);
    DeviceMemory pieces(2 * static_cast<size_t>(most_score_pieces(4, 2, 100)) * sizeof(ScorePiece), 32, false);
    DeviceMemory drawn(2 * sizeof(int32_t), 16, false);
    DeviceMemory shape(sizeof(TileShape), 16, false);
    LateInput late_starts(std::vector<int32_t>{0, 2, 3, 4});
    std::vector<int32_t> table(300);
    std::iota(table.begin(), table.end(), 1000);
    LateInput late_table(table);
    const ScheduleArgs args{.starts = late_starts.as<int32_t>(),
                            .row_request = late_requests.as<int32_t>(),
                            .ends = late_ends.as<int32_t>(),
                            .rows = 4,
                            .least = {2, 12800},  // room for all four of 6400 keys
                            .unscored_bound = 0,
                            .shape = shape.as<TileShape>(),
                            .page_prefix = prefix.as<int32_t>(),
                            .pieces = pieces.as<ScorePiece>(),
                            .pieces_a_tile = most_score_pieces(4, 2, 100),
                            .drawn = drawn.as<int32_t>(),
                            .block_table = late_table.as<int32_t>(),
                            .block_table_stride = 100,
                            .rows_a_pass = 4,
                            .blocks = 8};
    check(
        {&late_starts, &late_requests, &late_ends, &late_table},
        [&] {
            prefix.fill(poison_byte);
            pieces.fill(poison_byte);
        },
        [&] {
            schedule(args, {cudaStreamPerThread, true});
        },
        [&] { schedule_without_wait(&args, cudaStreamPerThread); },
        [&] {
            // 112 pages for 8 blocks, 14 each: the third begins with page 28 - 11 of request 1.
            const auto third = pieces.download<ScorePiece>()[4];
            const auto cut = shape.download<TileShape>().front();
            return prefix.download<int32_t>() == std::vector<int32_t>{0, 11, 111, 112} && third.drawn == 0 &&
                   cut.rows == 4 && cut.stride == 6400 && third.request == 1 && third.page_begin == 17 &&
                   third.block == 1000 + 100 + 17;
        });
}

TEST_F(HostileProducer, IsWaitedForByProject) {
    if (!can_project_sm90(4096, 128)) {
        GTEST_SKIP() << "needs an NVIDIA GPU of the Hopper generation with code of its own for sm_90";
    }
    // Ones: each output is its depth. One product is split over a whole cluster, the other over half of one.
    const __nv_bfloat16 one = bf16_from_float(1);
    LateInput hidden(std::vector<__nv_bfloat16>(size_t{8} * 4096, one));
    LateInput q_c(std::vector<__nv_bfloat16>(size_t{8} * 128, one));
    DeviceMemory w_kv(size_t{144} * 4096 * 2, 16, false);
    DeviceMemory wq_b(size_t{2048} * 128 * 2, 16, false);
    w_kv.upload(std::vector<__nv_bfloat16>(size_t{144} * 4096, one));
    wq_b.upload(std::vector<__nv_bfloat16>(size_t{2048} * 128, one));
    DeviceMemory projected(size_t{8} * 144 * 2, 16, false);
    DeviceMemory iq(size_t{8} * 2048 * 2, 16, false);
    for (const int rows : {1, 8}) {
        const ProjectArgs args{
            {{hidden.as<__nv_bfloat16>(), w_kv.as<__nv_bfloat16>(), projected.as<__nv_bfloat16>(), 144, 4096},
             {q_c.as<__nv_bfloat16>(), wq_b.as<__nv_bfloat16>(), iq.as<__nv_bfloat16>(), 2048, 128}},
            rows};
        prepare_project_sm90(args);
        const auto all_are = [rows](const DeviceMemory& memory, int columns, float value) {
            const auto values = memory.download<__nv_bfloat16>();
            return std::all_of(values.begin(), values.begin() + rows * columns,
                               [value](__nv_bfloat16 x) { return float_from_bf16(x) == value; });
        };
        check(
            {&hidden, &q_c},
            [&] {
                projected.fill(poison_byte);
                iq.fill(poison_byte);
            },
            [&] {
                project_sm90(args, {cudaStreamPerThread, true});
            },
            [&] { project_sm90_without_wait(&args, cudaStreamPerThread); },
            [&] { return all_are(projected, 144, 4096) && all_are(iq, 2048, 128); });
    }
}

class HostileProducerOf : public HostileProducer, public testing::WithParamInterface<CacheFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, HostileProducerOf, testing::Values(CacheFormat::fp8, CacheFormat::mxfp4_rowgroup));

TEST_P(HostileProducerOf, IsWaitedForByIndexInputsScoreAndSelect) {
    Random random = fresh_random();
    StepCase step = make_case({.format = GetParam(), .max_rows = 4, .max_requests = 4, .columns = 4}, random);
    step.set_lengths(200, 1);
    const std::vector<uint8_t> old_cache = step.layers[0].cache;
    const Geometry& g = step.geometry;
    const ExpectedStep expected = expected_step(step, 4, true);
    const auto& want = expected.layers[0];
    const std::vector<uint8_t>& new_cache = step.layers[0].cache;

    LateInput starts(expected.layout.starts);
    LateInput requests(expected.layout.row_request);
    LateInput ends(expected.layout.ends);
    LateInput slots(expected.layout.slots);
    LateInput iq(step.layers[0].iq);
    LateInput projected(step.layers[0].projected);
    LateInput late_query(want.query);
    LateInput late_weights(want.head_weights);
    std::vector<uint8_t> widened_query(static_cast<size_t>(4 * g.heads) * head_dim);
    std::vector<float> widened_weights(want.head_weights.size());
    if (is_mxfp4(g.cache_format)) {
        reference::widen_query(g.cache_format, g.heads, 4, 4, want.query.data(), want.head_weights.data(),
                               widened_query.data(), widened_weights.data());
    }
    LateInput late_widened_query(widened_query);
    LateInput late_widened_weights(widened_weights);
    LateInput late_cache(new_cache);
    LateInput late_logits(want.logits);
    DeviceMemory prefix(4 * sizeof(int32_t), 16, false);
    DeviceMemory pieces(static_cast<size_t>(most_score_pieces(4, 4, 100)) * sizeof(ScorePiece), 32, false);
    DeviceMemory drawn(sizeof(int32_t), 16, false);
    drawn.fill(0);
    DeviceMemory norm_weight(512, 16, false);
    DeviceMemory norm_bias(512, 16, false);
    DeviceMemory table(step.block_table.size() * 4, 16, false);
    DeviceMemory status(sizeof(StepStatus), 16, false);
    DeviceMemory query(want.query.size(), 16, false);
    DeviceMemory weights(want.head_weights.size() * 4, 16, false);
    DeviceMemory cache(old_cache.size(), 16, false);
    DeviceMemory logits(want.logits.size() * 4, 16, false);
    DeviceMemory indices(want.indices.size() * 4, 16, false);
    norm_weight.upload(step.layers[0].k_norm_weight);
    norm_bias.upload(step.layers[0].k_norm_bias);
    table.upload(step.block_table);
    status.fill(0);

    {
        SCOPED_TRACE("index inputs");
        const IndexInputsArgs args{.format = g.cache_format,
                                   .heads = g.heads,
                                   .rows = 4,
                                   .max_rows = 4,
                                   .max_requests = g.max_requests,
                                   .starts = starts.as<int32_t>(),
                                   .iq = iq.as<__nv_bfloat16>(),
                                   .projected = projected.as<__nv_bfloat16>(),
                                   .projected_columns = g.projected_columns,
                                   .key_column = g.key_column,
                                   .weight_column = g.weight_column,
                                   .k_norm_weight = norm_weight.as<float>(),
                                   .k_norm_bias = norm_bias.as<float>(),
                                   .k_norm_eps = g.k_norm_eps,
                                   .slots = slots.as<int64_t>(),
                                   .cache = cache.as<uint8_t>(),
                                   .pages = g.pages,
                                   .page_stride_bytes = g.page_stride_bytes,
                                   .query = query.as<uint8_t>(),
                                   .head_weights = weights.as<float>(),
                                   .widened_query = nullptr,
                                   .widened_weights = nullptr,
                                   .status = status.as<StepStatus>()};
        check(
            {&starts, &slots, &iq, &projected},
            [&] {
                query.fill(poison_byte);
                weights.fill(poison_byte);
                cache.upload(old_cache);
            },
            [&] {
                index_inputs(args, {cudaStreamPerThread, true});
            },
            [&] { index_inputs_without_wait(&args, cudaStreamPerThread); },
            [&] {
                return query.download<uint8_t>() == want.query && weights.download<float>() == want.head_weights &&
                       cache.download<uint8_t>() == new_cache;
            });
    }
    // Score and select find the layout in place: what is late is what the kernel before them makes.
    const auto deliver = [](LateInput& input) {
        const Delivery d = input.delivery();
        check_cuda(cudaMemcpy(d.to, d.from, d.words * 4, cudaMemcpyDeviceToDevice), "cudaMemcpy");
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    };
    for (LateInput* input : {&starts, &requests, &ends}) {
        deliver(*input);
    }
    const Tile fixed{.number = 0, .rows = 4, .least = {4, static_cast<int32_t>(g.width())}, .shape = nullptr};
    schedule({.starts = starts.as<int32_t>(),
              .row_request = requests.as<int32_t>(),
              .ends = ends.as<int32_t>(),
              .rows = 4,
              .least = fixed.least,
              .unscored_bound = 0,
              .shape = nullptr,
              .page_prefix = prefix.as<int32_t>(),
              .pieces = pieces.as<ScorePiece>(),
              .pieces_a_tile = most_score_pieces(4, 4, 100),
              .drawn = drawn.as<int32_t>(),
              .block_table = table.as<int32_t>(),
              .block_table_stride = g.block_table_stride,
              .rows_a_pass = 4,
              .blocks = 8},
             {cudaStreamPerThread, true});
    check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "the schedule");
    std::vector<ScorePiece> made = pieces.download<ScorePiece>();
    made.resize(2 * 8);  // of eight blocks; four requests of four pages leave no more
    LateInput late_pieces(made);
    // Of a tile that grows, the schedule's word on how far is late too.
    LateInput late_shape(std::vector<TileShape>{fixed.least});
    const Tile grown{.number = 0, .rows = 4, .least = {2, fixed.least.stride}, .shape = late_shape.as<TileShape>()};
    const auto check_score = [&](const Tile& tile) {
        SCOPED_TRACE("score");
        const ScoreArgs args{.format = g.cache_format,
                             .heads = g.heads,
                             .tile = tile,
                             .max_rows = 4,
                             .query = late_query.as<uint8_t>(),
                             .head_weights = late_weights.as<float>(),
                             .widened_query = late_widened_query.as<uint8_t>(),
                             .widened_weights = late_widened_weights.as<float>(),
                             .cache = late_cache.as<uint8_t>(),
                             .pages = g.pages,
                             .page_stride_bytes = g.page_stride_bytes,
                             .block_table = table.as<int32_t>(),
                             .block_table_stride = g.block_table_stride,
                             .starts = starts.as<int32_t>(),
                             .row_request = requests.as<int32_t>(),
                             .ends = ends.as<int32_t>(),
                             .page_prefix = prefix.as<int32_t>(),
                             .pieces = late_pieces.as<ScorePiece>(),
                             .drawn = drawn.as<int32_t>(),
                             .unscored_bound = 0,
                             .logits = logits.as<float>(),
                             .status = status.as<StepStatus>()};
        prepare_score();
        // Logits behind a row's bound stay as they were: the truth has -inf there.
        check(
            {&late_query, &late_weights, &late_cache, &late_shape},
            [&] { logits.upload(std::vector<float>(want.logits.size(), -std::numeric_limits<float>::infinity())); },
            [&] {
                score(args, 8, {cudaStreamPerThread, true});
            },
            [&] { score_without_wait(&args, 8, cudaStreamPerThread); },
            [&] { return logits.download<float>() == want.logits; });

        SCOPED_TRACE("score on Hopper");
        if (can_score_sm90(g.cache_format, late_cache.as<uint8_t>(), g.page_stride_bytes)) {
            prepare_score_sm90(g.cache_format, g.heads);
            check(
                {&late_query, &late_weights, &late_widened_query, &late_widened_weights, &late_cache, &late_pieces,
                 &late_shape},
                [&] { logits.upload(std::vector<float>(want.logits.size(), -std::numeric_limits<float>::infinity())); },
                [&] {
                    score_sm90(args, 8, {cudaStreamPerThread, true});
                },
                [&] { score_sm90_without_wait(&args, 8, cudaStreamPerThread); },
                [&] {
                    return tools::check_logits(g, expected.layout.ends, want.logits, logits.download<float>(),
                                               tools::logit_tolerance(g.cache_format))
                        .empty();
                });
        }
    };
    const auto check_select = [&](const Tile& tile) {
        SCOPED_TRACE("select");
        const SelectArgs args{.tile = tile,
                              .top_k = g.top_k,
                              .ends = ends.as<int32_t>(),
                              .logits = late_logits.as<float>(),
                              .row_request = requests.as<int32_t>(),
                              .block_table = table.as<int32_t>(),
                              .block_table_stride = g.block_table_stride,
                              .pages = g.pages,
                              .indices = indices.as<int32_t>(),
                              .counts = nullptr,
                              .physical_slots = nullptr,
                              .winner_logits = nullptr,
                              .padded_logits = nullptr,
                              .width = g.width(),
                              .last_of_layer = true};
        check(
            {&late_logits, &late_shape}, [&] { indices.fill(poison_byte); },
            [&] {
                select(args, {cudaStreamPerThread, true});
            },
            [&] { select_without_wait(&args, cudaStreamPerThread); },
            [&] { return indices.download<int32_t>() == want.indices; });
        if (can_select_sm90()) {
            SCOPED_TRACE("by clusters");
            prepare_select_sm90();
            check(
                {&late_logits, &late_shape}, [&] { indices.fill(poison_byte); },
                [&] {
                    select_sm90(args, {cudaStreamPerThread, true});
                },
                [&] { select_sm90_without_wait(&args, cudaStreamPerThread); },
                [&] { return indices.download<int32_t>() == want.indices; });
        }
    };
    for (const Tile& tile : {fixed, grown}) {
        SCOPED_TRACE(tile.shape == nullptr ? "a tile of fixed shape" : "a tile that grows");
        check_score(tile);
        check_select(tile);
    }
}

/// Reads late what the kernel behind it overwrites.
__global__ void slow_reader_kernel(const uint32_t* from, uint32_t* to, size_t words) {
    wait_for_producers();
    let_consumers_start();
    sleep_100_us();
    for (size_t i = threadIdx.x; i < words; i += blockDim.x) {
        to[i] = from[i];
    }
}

TEST_F(HostileProducer, AsASlowReaderSeesNothingThatTheNextKernelWrites) {
    // The query buffer is one layer's: index inputs of the next layer must not overwrite it under the scorer's eyes.
    Random random = fresh_random();
    StepCase step = make_case({.max_rows = 4, .max_requests = 4, .columns = 4}, random);
    step.set_lengths(200, 1);
    DeviceStep device(step);
    device.run_eager(4);
    const StepState state = device.pipeline().state();
    const size_t bytes = 4 * 16 * 128;
    auto* query = const_cast<uint8_t*>(state.query);
    DeviceMemory status(sizeof(StepStatus), 16, false);
    DeviceMemory seen(bytes, 16, false);
    const auto& memory = device.layers()[0];
    const Geometry& g = device.pipeline().geometry();
    const IndexInputsArgs args{.format = g.cache_format,
                               .heads = g.heads,
                               .rows = 4,
                               .max_rows = 4,
                               .max_requests = g.max_requests,
                               .starts = state.starts,
                               .iq = memory.iq.as<__nv_bfloat16>(),
                               .projected = memory.projected.as<__nv_bfloat16>(),
                               .projected_columns = g.projected_columns,
                               .key_column = g.key_column,
                               .weight_column = g.weight_column,
                               .k_norm_weight = memory.k_norm_weight.as<float>(),
                               .k_norm_bias = memory.k_norm_bias.as<float>(),
                               .k_norm_eps = g.k_norm_eps,
                               .slots = state.slots,
                               .cache = memory.cache.as<uint8_t>(),
                               .pages = g.pages,
                               .page_stride_bytes = g.page_stride_bytes,
                               .query = query,
                               .head_weights = const_cast<float*>(state.head_weights),
                               .widened_query = nullptr,
                               .widened_weights = nullptr,
                               .status = status.as<StepStatus>()};
    const std::vector<uint8_t> poison(bytes, poison_byte);
    for (const bool waits : {true, false}) {
        for (int run = 0; run < 2; ++run) {
            check_cuda(cudaMemset(query, poison_byte, bytes), "cudaMemset");
            check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            launch(slow_reader_kernel, "slow reader", {cudaStreamPerThread, true}, 1, 256, 0,
                   reinterpret_cast<const uint32_t*>(query), seen.as<uint32_t>(), bytes / 4);
            if (waits) {
                index_inputs(args, {cudaStreamPerThread, true});
            } else {
                index_inputs_without_wait(&args, cudaStreamPerThread);
            }
            check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "the writer");
        }
        EXPECT_EQ(seen.download<uint8_t>() == poison, waits);
    }
}

TEST_F(HostileProducer, IsWaitedForByAWholeLayerInACapture) {
    // Three kernels deep and more: every kernel of the layer triggers early, and the last one may start while the producer
    // still sleeps.
    Random random = fresh_random();
    for (const bool projects : {false, true}) {
        StepCase step = make_case({.max_rows = 8, .max_requests = 4, .project = projects}, random);
        step.set_lengths(400, 2);
        DeviceStep device(step, {.tile_rows = 3});
        DeviceStep eager(step, {.programmatic_edges = false, .tile_rows = 3});
        eager.run_eager(8);
        const auto want = eager.snapshot();

        auto& memory = device.layers()[0];
        LateInput first(projects ? step.layers[0].q_c : step.layers[0].iq);
        LateInput second(projects ? step.layers[0].hidden : step.layers[0].projected);
        Deliveries deliveries{{first.delivery(), second.delivery()}, 2};
        deliveries.list[0].to = projects ? memory.q_c.as<uint32_t>() : memory.iq.as<uint32_t>();
        deliveries.list[1].to = projects ? memory.hidden.as<uint32_t>() : memory.projected.as<uint32_t>();
        const CapturedGraph graph = CapturedGraph::capture([&](cudaStream_t stream) {
            device.pipeline().enqueue_layout(8, stream);
            launch(hostile_producer_kernel, "hostile producer", {stream, true}, 1, 256, 0, deliveries);
            device.pipeline().enqueue_layer(0, 8, stream);
        });
        for (int run = 0; run < 3; ++run) {
            for (DeviceMemory* input : {&memory.q_c, &memory.hidden, &memory.iq, &memory.projected}) {
                input->fill(0);
            }
            device.poison_outputs();
            graph.launch(device.stream());
            check_cuda(cudaStreamSynchronize(device.stream()), "the step");
            EXPECT_EQ(device.snapshot(), want);
        }
    }
}

}  // namespace
}  // namespace stepgraph::test
