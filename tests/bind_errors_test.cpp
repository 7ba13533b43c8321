// What bind refuses before it asks CUDA anything, and calls that come too early. The addresses are made up: nothing may
// read or write them, and no GPU is needed.
#include <cstdint>
#include <functional>
#include <ostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <stepgraph/pipeline/check_buffers.h>
#include <stepgraph/pipeline/pipeline.h>

#include "refused.h"

namespace stepgraph {
namespace {

Geometry small_geometry(bool projects) {
    return {.heads = 32,
            .top_k = 64,
            .max_rows = 8,
            .max_requests = 4,
            .max_model_len = 256,
            .block_table_columns = 4,
            .pages = 16,
            .q_lora_rank = projects ? 64 : 0,
            .hidden_size = projects ? 64 : 0};
}

/// An address that no process has mapped, 256-byte aligned and another for every `n`.
template <typename Element>
Element* made_up(uintptr_t n) {
    return reinterpret_cast<Element*>((uintptr_t{1} << 60U) + n * 4096);
}

enum class Projections { here, by_the_engine };

StepBuffers step_buffers() {
    return {.seq_lens = made_up<int32_t>(1),
            .query_lens = made_up<int32_t>(2),
            .num_requests = made_up<int32_t>(3),
            .block_table = made_up<int32_t>(4),
            .slots = made_up<int64_t>(5)};
}

LayerBuffers layer_buffers(Projections projections) {
    LayerBuffers layer{.k_norm_weight = made_up<float>(10),
                       .k_norm_bias = made_up<float>(11),
                       .cache = made_up<uint8_t>(12),
                       .indices = made_up<int32_t>(13),
                       .counts = made_up<int32_t>(14),
                       .physical_slots = made_up<int64_t>(15),
                       .winner_logits = made_up<float>(16),
                       .logits = made_up<float>(17)};
    if (projections == Projections::here) {
        layer.q_c = made_up<__nv_bfloat16>(20);
        layer.hidden = made_up<__nv_bfloat16>(21);
        layer.wq_b = made_up<__nv_bfloat16>(22);
        layer.w_kv = made_up<__nv_bfloat16>(23);
    } else {
        layer.iq = made_up<__nv_bfloat16>(24);
        layer.projected = made_up<__nv_bfloat16>(25);
    }
    return layer;
}

/// All that an engine hands over, right in every respect.
struct Handed {
    Projections projections = Projections::here;
    StepBuffers step = step_buffers();
    std::vector<LayerBuffers> layers;
    Workspace workspace{.data = made_up<void>(30), .bytes = 0};

    explicit Handed(Projections whose) : projections(whose), layers(3, layer_buffers(whose)) {
        workspace.bytes = Pipeline(geometry()).workspace_bytes();
    }

    [[nodiscard]] Geometry geometry() const { return small_geometry(projections == Projections::here); }
};

template <typename Element>
void misalign(Element*& pointer, uintptr_t by) {
    pointer = reinterpret_cast<Element*>(reinterpret_cast<uintptr_t>(pointer) + by);
}

std::string printed(const void* pointer) {
    std::ostringstream out;
    out << pointer;
    return out.str();
}

/// One pointer: how it is called in a refusal, how it is aligned, whether it may be null, and where it stands.
struct Pointer {
    std::string name;
    int alignment;
    bool required;
    Projections projections;
    std::function<const void*(const Handed&)> get;
    std::function<void(Handed&)> make_null;
    std::function<void(Handed&, uintptr_t)> move;
};

void PrintTo(const Pointer& pointer, std::ostream* out) {
    *out << pointer.name;
}

template <typename Access>
Pointer pointer(const std::string& name, int alignment, bool required, Projections projections, Access access) {
    return {name,
            alignment,
            required,
            projections,
            [access](const Handed& handed) { return static_cast<const void*>(access(const_cast<Handed&>(handed))); },
            [access](Handed& handed) { access(handed) = nullptr; },
            [access](Handed& handed, uintptr_t by) { misalign(access(handed), by); }};
}

std::vector<Pointer> all_pointers() {
    const Projections here = Projections::here;
    const Projections engine = Projections::by_the_engine;
    return {pointer(
                "step buffers: seq_lens", 4, true, here, [](Handed & h) -> auto& { return h.step.seq_lens; }),
            pointer(
                "step buffers: query_lens", 4, true, here, [](Handed & h) -> auto& { return h.step.query_lens; }),
            pointer(
                "step buffers: num_requests", 4, false, here, [](Handed & h) -> auto& { return h.step.num_requests; }),
            pointer(
                "step buffers: block_table", 4, true, here, [](Handed & h) -> auto& { return h.step.block_table; }),
            pointer(
                "step buffers: slots", 8, false, here, [](Handed & h) -> auto& { return h.step.slots; }),
            pointer(
                "layer 1: q_c", 16, true, here, [](Handed & h) -> auto& { return h.layers[1].q_c; }),
            pointer(
                "layer 1: hidden", 16, true, here, [](Handed & h) -> auto& { return h.layers[1].hidden; }),
            pointer(
                "layer 1: wq_b", 16, true, here, [](Handed & h) -> auto& { return h.layers[1].wq_b; }),
            pointer(
                "layer 1: w_kv", 16, true, here, [](Handed & h) -> auto& { return h.layers[1].w_kv; }),
            pointer(
                "layer 1: iq", 16, true, engine, [](Handed & h) -> auto& { return h.layers[1].iq; }),
            pointer(
                "layer 1: projected", 16, true, engine, [](Handed & h) -> auto& { return h.layers[1].projected; }),
            pointer(
                "layer 1: k_norm_weight", 16, true, here, [](Handed & h) -> auto& { return h.layers[1].k_norm_weight; }),
            pointer(
                "layer 1: k_norm_bias", 16, true, here, [](Handed & h) -> auto& { return h.layers[1].k_norm_bias; }),
            pointer(
                "layer 1: cache", 4, true, here, [](Handed & h) -> auto& { return h.layers[1].cache; }),
            pointer(
                "layer 2: indices", 4, true, here, [](Handed & h) -> auto& { return h.layers[2].indices; }),
            pointer(
                "layer 2: counts", 4, false, here, [](Handed & h) -> auto& { return h.layers[2].counts; }),
            pointer(
                "layer 2: physical_slots", 8, false, here, [](Handed & h) -> auto& { return h.layers[2].physical_slots; }),
            pointer(
                "layer 2: winner_logits", 4, false, here, [](Handed & h) -> auto& { return h.layers[2].winner_logits; }),
            pointer(
                "layer 2: logits", 4, false, here, [](Handed & h) -> auto& { return h.layers[2].logits; })};
}

void check(const Handed& handed) {
    check_addresses(validate(handed.geometry()), handed.step, handed.layers, handed.workspace,
                    Pipeline(handed.geometry()).workspace_bytes());
}

void bind(const Handed& handed) {
    Pipeline pipeline(handed.geometry());
    pipeline.bind(handed.step, handed.layers, handed.workspace);
}

class HandedPointer : public ::testing::TestWithParam<Pointer> {};

TEST_P(HandedPointer, IsRefusedWhereItIsNullAndMustNotBe) {
    Handed handed(GetParam().projections);
    GetParam().make_null(handed);
    if (GetParam().required) {
        const std::vector<std::string> sentence{GetParam().name + " is null", "must be",
                                                "aligned to " + std::to_string(GetParam().alignment) + " bytes"};
        EXPECT_TRUE(test::refused([&] { bind(handed); }, ErrorCode::invalid_buffer, sentence));
    } else {
        EXPECT_NO_THROW(check(handed)) << GetParam().name << " may be null";
    }
}

TEST_P(HandedPointer, IsRefusedAtEveryMisalignedAddress) {
    for (int by = 1; by < GetParam().alignment; ++by) {
        Handed handed(GetParam().projections);
        GetParam().move(handed, static_cast<uintptr_t>(by));
        const std::vector<std::string> sentence{GetParam().name + " is " + printed(GetParam().get(handed)),
                                                "must be aligned to " + std::to_string(GetParam().alignment) + " bytes"};
        EXPECT_TRUE(test::refused([&] { bind(handed); }, ErrorCode::invalid_buffer, sentence)) << by << " bytes off";
    }
}

TEST_P(HandedPointer, IsTakenAtTheAlignmentItNeedsAndNoMore) {
    Handed handed(GetParam().projections);
    GetParam().move(handed, static_cast<uintptr_t>(GetParam().alignment));
    EXPECT_NO_THROW(check(handed));
}

std::string operand_name(const ::testing::TestParamInfo<Pointer>& info) {
    return info.param.name.substr(info.param.name.find(": ") + 2);
}

INSTANTIATE_TEST_SUITE_P(Buffers, HandedPointer, ::testing::ValuesIn(all_pointers()), operand_name);

TEST(BindErrors, AddressesThatAreRightPassTheChecksThatNeedNoGpu) {
    EXPECT_NO_THROW(check(Handed(Projections::here)));
    EXPECT_NO_THROW(check(Handed(Projections::by_the_engine)));
}

TEST(BindErrors, TheWorkspaceIsAligned) {
    for (const uintptr_t by : {1U, 4U, 16U, 128U, 255U}) {
        Handed handed(Projections::here);
        misalign(handed.workspace.data, by);
        EXPECT_TRUE(test::refused([&] { bind(handed); }, ErrorCode::invalid_buffer,
                                  {"workspace is " + printed(handed.workspace.data), "must be aligned to 256 bytes"}));
    }
}

TEST(BindErrors, TheWorkspaceIsNotNull) {
    Handed handed(Projections::here);
    handed.workspace = {};
    EXPECT_TRUE(test::refused([&] { bind(handed); }, ErrorCode::invalid_buffer, {"workspace is null", "must be"}));
}

TEST(BindErrors, TheWorkspaceIsLargeEnough) {
    const Handed right(Projections::here);
    const size_t wanted = right.workspace.bytes;
    for (const size_t bytes : {size_t{0}, size_t{1}, wanted / 2, wanted - 1}) {
        Handed handed = right;
        handed.workspace.bytes = bytes;
        EXPECT_TRUE(test::refused(
            [&] { bind(handed); }, ErrorCode::workspace_too_small,
            {"workspace is " + std::to_string(bytes) + " bytes", "must be at least " + std::to_string(wanted)}));
    }
    for (const size_t bytes : {wanted, wanted + 1, 2 * wanted}) {
        Handed handed = right;
        handed.workspace.bytes = bytes;
        EXPECT_NO_THROW(check(handed));
    }
}

TEST(BindErrors, ThereIsALayer) {
    Handed handed(Projections::here);
    handed.layers.clear();
    EXPECT_TRUE(test::refused([&] { bind(handed); }, ErrorCode::invalid_buffer, {"layers is empty", "must hold"}));
}

TEST(BindErrors, ProjectionsAreMadeByOneSide) {
    const auto refused_with = [](const std::function<void(LayerBuffers&)>& change, const std::string& name) {
        Handed handed(Projections::here);
        change(handed.layers[2]);
        return test::refused([&] { bind(handed); }, ErrorCode::invalid_buffer,
                             {"layer 2: " + name + " is ", "must be null where iq and projected are handed over"});
    };
    const LayerBuffers engine = layer_buffers(Projections::by_the_engine);
    const auto hand_both = [engine](LayerBuffers& l) {
        l.iq = engine.iq;
        l.projected = engine.projected;
    };
    EXPECT_TRUE(refused_with(hand_both, "q_c"));
    EXPECT_TRUE(refused_with([engine](LayerBuffers& l) { l.iq = engine.iq; }, "q_c"));
    EXPECT_TRUE(refused_with([engine](LayerBuffers& l) { l.projected = engine.projected; }, "q_c"));
    EXPECT_TRUE(refused_with(
        [hand_both](LayerBuffers& l) {
            hand_both(l);
            l.q_c = l.wq_b = l.w_kv = nullptr;
        },
        "hidden"));
    EXPECT_TRUE(refused_with(
        [hand_both](LayerBuffers& l) {
            hand_both(l);
            l.q_c = l.hidden = l.w_kv = nullptr;
        },
        "wq_b"));
    EXPECT_TRUE(refused_with(
        [hand_both](LayerBuffers& l) {
            hand_both(l);
            l.q_c = l.hidden = l.wq_b = nullptr;
        },
        "w_kv"));
}

TEST(BindErrors, AGeometryWithoutProjectionsNeedsThoseOfTheEngine) {
    Handed handed(Projections::by_the_engine);
    handed.layers[1] = layer_buffers(Projections::here);
    EXPECT_TRUE(test::refused([&] { bind(handed); }, ErrorCode::invalid_buffer,
                              {"layer 1: iq is null", "must be handed over", "q_lora_rank and hidden_size are 0"}));
}

TEST(BindErrors, AGeometryWithProjectionsTakesLayersOfBothKinds) {
    Handed handed(Projections::here);
    handed.layers[1] = layer_buffers(Projections::by_the_engine);
    EXPECT_NO_THROW(check(handed));
}

TEST(BindErrors, OrdinaryHostMemoryIsNotTaken) {
    // Without a GPU the question alone fails; either way bind refuses and writes nothing.
    std::vector<int32_t> on_the_host(4, 7);
    Handed handed(Projections::here);
    handed.step.seq_lens = on_the_host.data();
    EXPECT_THROW(bind(handed), Error);
    EXPECT_EQ(on_the_host, std::vector<int32_t>(4, 7));
}

// ---- calls out of order

class BeforeBind : public ::testing::Test {
protected:
    template <typename Call>
    static void expect_refused(const std::string& name, Call call) {
        EXPECT_TRUE(test::refused(call, ErrorCode::wrong_order, {name + " was called before bind", "must follow it"}));
    }

    Pipeline pipeline_{small_geometry(true)};
};

TEST_F(BeforeBind, EveryCallThatBuildsOnItIsRefusedByName) {
    expect_refused("capture", [this] { pipeline_.capture({1, 2}); });
    expect_refused("replay", [this] { pipeline_.replay(1, nullptr); });
    expect_refused("enqueue_layout", [this] { pipeline_.enqueue_layout(1, nullptr); });
    expect_refused("enqueue_layer", [this] { pipeline_.enqueue_layer(0, 1, nullptr); });
    expect_refused("state", [this] { static_cast<void>(pipeline_.state()); });
    expect_refused("graph", [this] { static_cast<void>(pipeline_.graph(1)); });
    expect_refused("read_status", [this] { static_cast<void>(pipeline_.read_status(nullptr)); });
    expect_refused("reset_status", [this] { pipeline_.reset_status(nullptr); });
}

TEST_F(BeforeBind, TheOrderIsCheckedBeforeTheArguments) {
    expect_refused("capture", [this] { pipeline_.capture({}); });
    expect_refused("replay", [this] { pipeline_.replay(-1, nullptr); });
    expect_refused("enqueue_layer", [this] { pipeline_.enqueue_layer(-1, -1, nullptr); });
}

TEST_F(BeforeBind, ThereAreNoBucketsAndTheNumbersAreKnown) {
    EXPECT_TRUE(pipeline_.buckets().empty());
    EXPECT_EQ(pipeline_.geometry().page_stride_bytes, 8448);
    EXPECT_EQ(pipeline_.tile_rows(), 8);
    EXPECT_GT(pipeline_.workspace_bytes(), 0U);
}

TEST_F(BeforeBind, ABindThatFailsLeavesThePipelineUnbound) {
    Handed handed(Projections::here);
    handed.step.seq_lens = nullptr;
    EXPECT_THROW(pipeline_.bind(handed.step, handed.layers, handed.workspace), Error);
    expect_refused("replay", [this] { pipeline_.replay(1, nullptr); });
}

TEST_F(BeforeBind, AMovedPipelineIsAsItWas) {
    const size_t bytes = pipeline_.workspace_bytes();
    Pipeline moved = std::move(pipeline_);
    EXPECT_EQ(moved.workspace_bytes(), bytes);
    EXPECT_TRUE(test::refused([&] { moved.replay(1, nullptr); }, ErrorCode::wrong_order, {"replay"}));
}

}  // namespace
}  // namespace stepgraph
