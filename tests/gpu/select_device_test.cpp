// Select alone, on every kind of data that made another selection wrong, against the reference.
#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include <stepgraph/kernels/reference/select.h>
#include <stepgraph/kernels/select_sm90.h>

#include "device_step.h"

namespace stepgraph::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

constexpr int portable = -1;    // select(), instead of so many blocks a row
constexpr int as_it_comes = 0;  // select_sm90() chooses the blocks

/// Selects positions, and nothing beside them, from all rows of a batch.
SelectArgs positions_alone(int rows, int top_k, const DeviceMemory& ends, const float* logits, int64_t stride,
                           const DeviceMemory& indices) {
    return {.tile = {.number = 0, .rows = rows, .least = {rows, static_cast<int32_t>(stride)}, .shape = nullptr},
            .top_k = top_k,
            .ends = ends.as<int32_t>(),
            .logits = logits,
            .row_request = nullptr,
            .block_table = nullptr,
            .block_table_stride = 0,
            .pages = 1,
            .indices = indices.as<int32_t>(),
            .counts = nullptr,
            .physical_slots = nullptr,
            .winner_logits = nullptr,
            .padded_logits = nullptr,
            .width = stride,
            .last_of_layer = true};
}

class SelectOnDevice : public GpuTest {
protected:
    void SetUp() override {
        GpuTest::SetUp();
        if (!IsSkipped()) {
            prepare_select();
            if (can_select_sm90()) {
                prepare_select_sm90();
                ways_ = {portable, as_it_comes, 1, 2, 4, 8, 16};
            }
        }
    }

    /// Kernels, and blocks a row, that this device takes.
    [[nodiscard]] const std::vector<int>& ways() const { return ways_; }

private:
    std::vector<int> ways_ = {portable};
};

void select_by(int way, const SelectArgs& args) {
    const LaunchContext context{cudaStreamPerThread, true};
    if (way == portable) {
        select(args, context);
    } else {
        select_sm90(args, context, way);
    }
}

using Distribution = std::function<float(Random&, int)>;

struct Named {
    const char* name;
    Distribution draw;
};

float normal(Random& random) {
    return std::normal_distribution<float>()(random);
}
float uniform(Random& random) {
    return std::uniform_real_distribution<float>()(random);
}

std::vector<Named> distributions() {
    return {
        {"normal", [](Random& r, int) { return normal(r); }},
        {"zeros under a plateau", [](Random& r, int) { return std::max(0.0F, normal(r)); }},
        {"packed into [100, 101]", [](Random& r, int) { return 100.0F + uniform(r); }},
        {"heavy tail", [](Random& r, int) { return std::pow(uniform(r) + 1e-7F, -3.0F) * (r() % 2 == 0 ? 1.0F : -1.0F); }},
        {"all equal", [](Random&, int) { return 3.25F; }},
        {"all infinite", [](Random&, int) { return infinity; }},
        {"all minus infinite", [](Random&, int) { return -infinity; }},
        {"all NaN", [](Random&, int) { return std::nanf(""); }},
        {"half NaN", [](Random& r, int j) { return j % 2 == 0 ? std::nanf("") : normal(r); }},
        {"one NaN", [](Random& r, int j) { return j == 17 ? -std::nanf("") : normal(r); }},
        {"both zeros", [](Random&, int j) { return j % 3 == 0 ? -0.0F : 0.0F; }},
        {"100 winners and zeros", [](Random&, int j) { return j % 83 == 5 && j / 83 < 100 ? 1.0F : 0.0F; }},
        {"few values", [](Random& r, int) { return static_cast<float>(r() % 3); }},
        {"neighbours win", [](Random& r, int j) { return normal(r) + (j >= 3000 && j < 6000 ? 8.0F : 0.0F); }},
        {"two values that lie close, and one far off",
         [](Random& r, int j) { return j == 7         ? 1e30F
                                       : r() % 2 == 0 ? 1.0F
                                                      : std::nextafter(1.0F, 2.0F); }},
        {"denormals", [](Random& r, int) { return std::ldexp(uniform(r), -140); }},
        {"below -65504", [](Random& r, int) { return -1e6F - 1e6F * uniform(r); }},
        {"BF16 rounded", [](Random& r, int) { return round_to_bf16(normal(r)); }},
        {"ascending", [](Random&, int j) { return static_cast<float>(j); }},
        {"descending", [](Random&, int j) { return -static_cast<float>(j); }}};
}

struct Selection {
    std::vector<int32_t> indices, counts;
    std::vector<int64_t> slots;
    std::vector<float> logits;
};

/// Rows to select from, and what the reference selects.
class Rows {
public:
    Rows(std::vector<float> logits, int64_t stride, std::vector<int32_t> ends, int top_k)
        : logits_(std::move(logits)), stride_(stride), ends_(std::move(ends)), top_k_(top_k) {
        table_.resize(static_cast<size_t>(stride / 64 + 1));
        for (size_t i = 0; i < table_.size(); ++i) {
            table_[i] = i % 5 == 4 ? -1 : static_cast<int32_t>(i * 7 % 1000);
        }
        const std::vector<int32_t> requests(ends_.size(), 0);
        const auto outputs = ends_.size() * static_cast<size_t>(top_k);
        expected_ = {std::vector<int32_t>(outputs), std::vector<int32_t>(ends_.size()), std::vector<int64_t>(outputs),
                     std::vector<float>(outputs)};
        reference::select({.rows = static_cast<int>(ends_.size()),
                           .top_k = top_k,
                           .ends = ends_.data(),
                           .logits = logits_.data(),
                           .logits_stride = stride,
                           .row_request = requests.data(),
                           .block_table = table_.data(),
                           .block_table_stride = 0,
                           .pages = pages,
                           .indices = expected_.indices.data(),
                           .counts = expected_.counts.data(),
                           .physical_slots = expected_.slots.data(),
                           .winner_logits = expected_.logits.data()});
    }

    [[nodiscard]] const Selection& expected() const { return expected_; }

    /// Selects on the device, by `way`, in tile `number` of as many rows of a larger batch, `launches` times. By the
    /// step's lengths, where tiles might have `least_rows` rows; 0: as ever. Expects each result to be the reference's and
    /// nothing else to be written.
    void expect_selected(int number, bool winner_logits, int way, int launches = 1, int least_rows = 0) const {
        const auto own = static_cast<int>(ends_.size());
        const size_t before = static_cast<size_t>(number) * ends_.size();
        std::vector<int32_t> all_ends(before + ends_.size(), 0);
        std::copy(ends_.begin(), ends_.end(), all_ends.begin() + static_cast<int64_t>(before));
        const TileShape own_shape{own, static_cast<int32_t>(stride_)};
        DeviceMemory shape(sizeof(TileShape), 8, true);
        shape.upload(std::vector<TileShape>{own_shape});
        const bool is_cut = least_rows != 0;
        const Tile tile{.number = number,
                        .rows = static_cast<int>(all_ends.size()),
                        .least = is_cut ? TileShape{least_rows, own_shape.stride} : own_shape,
                        .shape = is_cut ? shape.as<TileShape>() : nullptr};
        const auto k = static_cast<size_t>(top_k_);
        DeviceMemory logits(logits_.size() * 4, 4, true);
        DeviceMemory ends(all_ends.size() * 4, 4, true);
        DeviceMemory requests(all_ends.size() * 4, 4, true);
        DeviceMemory table(table_.size() * 4, 4, true);
        DeviceMemory indices(all_ends.size() * k * 4, 4, true);
        DeviceMemory counts(all_ends.size() * 4, 4, true);
        DeviceMemory slots(all_ends.size() * k * 8, 8, true);
        DeviceMemory winners(all_ends.size() * k * 4, 4, true);
        logits.upload(logits_);
        ends.upload(all_ends);
        requests.upload(std::vector<int32_t>(all_ends.size(), 0));
        table.upload(table_);
        for (int launch = 0; launch < launches; ++launch) {
            for (DeviceMemory* memory : {&indices, &counts, &slots, &winners}) {
                memory->fill(poison_byte);
            }
            select_by(way, {.tile = tile,
                            .top_k = top_k_,
                            .ends = ends.as<int32_t>(),
                            .logits = logits.as<float>(),
                            .row_request = requests.as<int32_t>(),
                            .block_table = table.as<int32_t>(),
                            .block_table_stride = static_cast<int64_t>(table_.size()),
                            .pages = pages,
                            .indices = indices.as<int32_t>(),
                            .counts = counts.as<int32_t>(),
                            .physical_slots = slots.as<int64_t>(),
                            .winner_logits = winner_logits ? winners.as<float>() : nullptr,
                            .padded_logits = nullptr,
                            .width = stride_,
                            .last_of_layer = false});
            expect_rows(indices.download<int32_t>(), expected_.indices, before * k, "indices");
            expect_rows(counts.download<int32_t>(), expected_.counts, before, "counts");
            expect_rows(slots.download<int64_t>(), expected_.slots, before * k, "physical slots");
            if (winner_logits) {
                expect_rows(winners.download<float>(), expected_.logits, before * k, "winner logits");
            }
        }
    }

private:
    static constexpr int64_t pages = 900;

    template <typename Element>
    static void expect_rows(const std::vector<Element>& actual, const std::vector<Element>& expected, size_t before,
                            const char* what) {
        ASSERT_EQ(actual.size(), before + expected.size());
        expect_same_bits(actual.data() + before, expected.data(), expected.size(), what);
        const auto* bytes = reinterpret_cast<const uint8_t*>(actual.data());
        EXPECT_TRUE(std::all_of(bytes, bytes + before * sizeof(Element), [](uint8_t byte) { return byte == poison_byte; }))
            << what << " of another tile were written";
    }

    std::vector<float> logits_;
    int64_t stride_;
    std::vector<int32_t> ends_;
    int top_k_;
    std::vector<int32_t> table_;
    Selection expected_;
};

std::vector<float> draw_rows(const Named& distribution, size_t rows, int64_t stride, Random& random) {
    std::vector<float> logits(rows * static_cast<size_t>(stride));
    for (size_t i = 0; i < logits.size(); ++i) {
        logits[i] = distribution.draw(random, static_cast<int>(i % static_cast<size_t>(stride)));
    }
    return logits;
}

TEST_F(SelectOnDevice, IsExactOnEveryDistributionAndLength) {
    Random random = fresh_random();
    for (const Named& distribution : distributions()) {
        for (const int top_k : {1, 64, 512, 1024, 2048, 2051, 4096}) {
            SCOPED_TRACE(std::string(distribution.name) + ", K " + std::to_string(top_k));
            const std::vector<int32_t> ends = {0, 1, 63, 64, 65, top_k - 1, top_k, top_k + 1, 8320, 8319, 4097, 5000};
            const int64_t stride = 8321;  // rows that begin at any multiple of four bytes
            const Rows rows(draw_rows(distribution, ends.size(), stride, random), stride, ends, top_k);
            for (const int way : {portable, as_it_comes}) {
                if (way == portable || ways().size() > 1) {
                    rows.expect_selected(3, true, way);
                }
            }
        }
    }
}

// Rows in shared memory and rows read as lists, of blocks alone and in clusters; lengths that are a multiple of nothing.
TEST_F(SelectOnDevice, IsExactHoweverManyBlocksShareARow) {
    Random random = fresh_random();
    for (const Named& distribution : distributions()) {
        for (const int top_k : {64, 2048, 4096}) {
            const std::vector<int32_t> ends = {8192, 12345, 16390, 40001, 70003, 140001};
            const int64_t stride = 140003;
            const Rows rows(draw_rows(distribution, ends.size(), stride, random), stride, ends, top_k);
            for (const int way : ways()) {
                SCOPED_TRACE(std::string(distribution.name) + ", K " + std::to_string(top_k) + ", way " +
                             std::to_string(way));
                rows.expect_selected(0, false, way);
            }
        }
    }
}

TEST_F(SelectOnDevice, IsExactOnRandomShapes) {
    Random random = fresh_random();
    const std::vector<Named> all = distributions();
    for (int i = 0; i < 60; ++i) {
        const Named& distribution = all[random() % all.size()];
        const int top_k = 1 + static_cast<int>(random() % 4096);
        const auto stride = static_cast<int64_t>(top_k + 1 + random() % 60000);
        std::vector<int32_t> ends(1 + random() % 7);
        for (int32_t& end : ends) {
            end = static_cast<int32_t>(random() % static_cast<uint64_t>(stride + 1));
        }
        const int way = ways()[random() % ways().size()];
        SCOPED_TRACE(std::string(distribution.name) + ", K " + std::to_string(top_k) + ", stride " + std::to_string(stride) +
                     ", way " + std::to_string(way));
        Rows(draw_rows(distribution, ends.size(), stride, random), stride, ends, top_k)
            .expect_selected(static_cast<int>(random() % 5), random() % 2 == 0, way);
    }
}

TEST_F(SelectOnDevice, ReadsNoLogitOfARowWithinK) {
    // Of an address that is not mapped: reading it would fault.
    const std::vector<int32_t> ends = {100, 64, 0};
    for (const int way : ways()) {
        DeviceMemory device_ends(12, 4, true);
        DeviceMemory indices(3 * 128 * 4, 4, true);
        device_ends.upload(ends);
        select_by(way, positions_alone(3, 128, device_ends, nullptr, 1 << 20, indices));
        const auto actual = indices.download<int32_t>();
        for (size_t row = 0; row < 3; ++row) {
            for (int i = 0; i < 128; ++i) {
                ASSERT_EQ(actual[row * 128 + static_cast<size_t>(i)], i < ends[row] ? i : -1);
            }
        }
    }
}

TEST_F(SelectOnDevice, GivesARowTheSameBitsAloneAmongOthersAndInAnotherTile) {
    Random random = fresh_random();
    const int64_t stride = 20000;
    for (const size_t which : {size_t{0}, size_t{1}, size_t{4}}) {
        const Named distribution = distributions()[which];
        SCOPED_TRACE(distribution.name);
        const std::vector<float> alone = draw_rows(distribution, 1, stride, random);
        const Rows one(alone, stride, {19999}, 2048);
        std::vector<float> many = draw_rows(distribution, 128, stride, random);
        std::copy(alone.begin(), alone.end(), many.begin() + 77 * stride);
        std::vector<int32_t> ends(128, 12345);
        ends[77] = 19999;
        const Rows batch(many, stride, ends, 2048);
        EXPECT_TRUE(std::equal(one.expected().indices.begin(), one.expected().indices.end(),
                               batch.expected().indices.begin() + 77 * 2048));
        for (const int way : ways()) {
            for (const int number : {0, 3}) {
                batch.expect_selected(number, false, way);
                batch.expect_selected(number, false, way, 1, 32);
            }
            one.expect_selected(0, false, way, 100);
        }
    }
}

TEST_F(SelectOnDevice, GivesTheSameBitsInEveryReplay) {
    Random random = fresh_random();
    const int64_t stride = 40001;
    const std::vector<int32_t> ends = {40000, 8000, 2048, 39999, 20001, 0, 16385, 8193};
    const std::vector<float> logits = draw_rows(distributions()[1], ends.size(), stride, random);
    const Rows rows(logits, stride, ends, 2048);
    DeviceMemory device_logits(logits.size() * 4, 4, true);
    DeviceMemory device_ends(ends.size() * 4, 4, true);
    DeviceMemory indices(ends.size() * 2048 * 4, 4, true);
    device_logits.upload(logits);
    device_ends.upload(ends);
    for (const int way : ways()) {
        SCOPED_TRACE("way " + std::to_string(way));
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        check_cuda(cudaStreamBeginCapture(cudaStreamPerThread, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
        select_by(way, positions_alone(static_cast<int>(ends.size()), 2048, device_ends, device_logits.as<float>(), stride,
                                       indices));
        check_cuda(cudaStreamEndCapture(cudaStreamPerThread, &graph), "cudaStreamEndCapture");
        check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
        for (int replay = 0; replay < 100; ++replay) {
            indices.fill(poison_byte);
            check_cuda(cudaGraphLaunch(executable, cudaStreamPerThread), "cudaGraphLaunch");
            check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "a replay");
            ASSERT_EQ(indices.download<int32_t>(), rows.expected().indices) << "replay " << replay;
        }
        check_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
        check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
}

TEST_F(SelectOnDevice, TakesRowsOfAMillionKeysAndOffsetsBeyondTwoToThe31Elements) {
    Random random = fresh_random();
    const Rows million(draw_rows(distributions()[1], 2, 1 << 20, random), 1 << 20, {1 << 20, (1 << 20) - 3}, 2048);
    for (const int way : ways()) {
        million.expect_selected(0, true, way);
    }

    // 2^31 elements and more before the last row: its logits are written there and nowhere else.
    const int64_t stride = int64_t{1} << 30U;
    const std::vector<float> row = draw_rows(distributions()[0], 1, 5000, random);
    DeviceMemory logits((static_cast<size_t>(stride) * 3 + 5000) * 4, 4, false);
    check_cuda(cudaMemcpy(logits.as<float>() + 3 * stride, row.data(), 5000 * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
    const std::vector<int32_t> ends = {0, 0, 0, 5000};
    DeviceMemory device_ends(16, 4, true);
    DeviceMemory indices(4 * 64 * 4, 4, true);
    device_ends.upload(ends);
    const Rows alone(row, 5000, {5000}, 64);
    for (const int way : ways()) {
        SCOPED_TRACE("way " + std::to_string(way));
        indices.fill(poison_byte);
        select_by(way, positions_alone(4, 64, device_ends, logits.as<float>(), stride, indices));
        const auto actual = indices.download<int32_t>();
        EXPECT_TRUE(std::equal(alone.expected().indices.begin(), alone.expected().indices.end(), actual.begin() + 3 * 64));
    }
}

}  // namespace
}  // namespace stepgraph::test
