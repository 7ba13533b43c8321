// Selection by clusters without a GPU: the kernel's own code in the emulator, on data and shapes that are drawn to be
// awkward, against a sort.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <stepgraph/kernels/select_row.h>
#include <stepgraph/layouts/cache_page.h>
#include <stepgraph/layouts/host_device.h>

#include "fresh_seed.h"

namespace stepgraph::test {
namespace {

using Random = std::mt19937_64;

constexpr float infinity = std::numeric_limits<float>::infinity();

/// Integers that order as logits do: written anew, for the kernel's own is under test.
uint32_t key_of(float logit) {
    const uint32_t bits = bits_of(std::isnan(logit) ? -infinity : logit == 0 ? 0.0F : logit);
    return bits >> 31U != 0 ? ~bits : bits | 0x80000000U;
}
float logit_of(uint32_t key) {
    return float_of(key >> 31U != 0 ? key ^ 0x80000000U : ~key);
}

struct Case {
    int top_k;
    int end;
    int blocks;
    int skew;  // logits from the last multiple of 16 bytes to the row's first
};

/// Draws a row of a case.
class RowMaker {
public:
    RowMaker(const Case& drawn, Random& random) : case_(drawn), random_(random), row_(static_cast<size_t>(drawn.end)) {}

    static constexpr int kinds = 24;

    std::vector<float> make(int kind) {
        const int k = case_.top_k;
        const uint32_t base = key_of(normal());
        switch (kind) {
        case 0:
            return each([&](int) { return normal(); });
        case 1:  // a plateau of zeros below some
            return each([&](int) { return std::max(0.0F, normal()); });
        case 2:
            each([&](int) { return 3.25F; });
            row_[below(row_.size())] = below(2) == 0 ? 4.0F : 2.0F;
            return row_;
        case 3:  // two that lie side by side, and one far off
            each([&](int) { return below(2) == 0 ? 1.0F : std::nextafter(1.0F, 2.0F); });
            row_[below(row_.size())] = 1e30F;
            return row_;
        case 4:  // every kind of number, evenly
            return shuffled([&](int i) {
                return logit_of(0x00800000U + static_cast<uint32_t>(uint64_t(i) * 0xFEFFFFFFU / row_.size()));
            });
        case 5:  // any bits: NaN too
            return each([&](int) { return float_of(static_cast<uint32_t>(random_())); });
        case 6:
            return each([](int i) { return static_cast<float>(i); });
        case 7:
            return each([](int i) { return -static_cast<float>(i); });
        case 8: {  // winners above a plateau: fewer than K, or more
            const int winners = static_cast<int>(below(2 * static_cast<size_t>(k) + 2));
            return shuffled([&](int i) { return i < winners ? 1 + uniform() : 1.0F; });
        }
        case 9: {  // a plateau in which the K-th lies, some above, some below
            const auto above = static_cast<int>(below(static_cast<size_t>(k)));
            const auto plateau = static_cast<int>(below(4 * static_cast<size_t>(k) + 1));
            return shuffled([&](int i) { return i < above ? 5 + uniform() : i < above + plateau ? 2.5F : uniform(); });
        }
        case 10: {  // about the borders of bins
            const auto shift = below(20);
            return each([&](int) {
                const uint32_t key = base + (static_cast<uint32_t>(below(4096)) << shift) + static_cast<uint32_t>(below(3));
                return logit_of(std::clamp(key, 0x007FFFFFU, 0xFF800000U));
            });
        }
        case 11:
            each([](int) { return -infinity; });
            return scatter([&] { return normal(); });
        case 12:
            each([&](int) { return below(2) == 0 ? std::nanf("") : -infinity; });
            return scatter([] { return -3e38F; });
        case 13:  // all far below zero
            return each([&](int) { return -1e38F - uniform() * 2e38F; });
        case 14:  // denormals
            return each([&](int) { return std::ldexp(uniform(), -140); });
        case 15: {  // what the sample sees is small, or large, and the rest is not
            const bool small = below(2) == 0;
            return each([&](int i) { return sampled(i) == small ? uniform() : 2 + uniform(); });
        }
        case 16:  // what the sample sees is a plateau, and the rest lies just beside it
            return each(
                [&](int i) { return sampled(i) ? 1.5F : logit_of(key_of(1.5F) + static_cast<uint32_t>(below(5)) - 2); });
        case 17: {  // a plateau of which the sample sees all, and others just above it
            each([](int) { return 1.5F; });
            const auto others = below(2 * static_cast<size_t>(k) + 1);
            for (size_t n = 0; n < others; ++n) {
                const size_t i = below(row_.size());
                if (!sampled(static_cast<int>(i)) || below(8) == 0) {
                    row_[i] = logit_of(key_of(1.5F) + (below(4) == 0 ? ~0U : static_cast<uint32_t>(below(100000))));
                }
            }
            return row_;
        }
        case 18: {  // about as many close ones as blocks can exchange
            const int close = 4096 + static_cast<int>(below(41)) - 20;
            const auto above = static_cast<int>(below(static_cast<size_t>(k)));
            return shuffled([&](int i) {
                return i < above           ? 9 + uniform()
                       : i < above + close ? logit_of(base + static_cast<uint32_t>(below(6)))
                                           : -1e30F * uniform();
            });
        }
        case 19: {  // about as many in the last bin as are ranked one by one
            const int few = 30 + static_cast<int>(below(6));
            const int above = std::max(0, k - static_cast<int>(below(static_cast<size_t>(few))));
            return shuffled([&](int i) {
                return i < above         ? 4 + uniform()
                       : i < above + few ? logit_of(key_of(2.0F) + static_cast<uint32_t>(below(40)))
                                         : uniform();
            });
        }
        case 20: {  // the winners in a stretch
            const auto begin = below(row_.size());
            const auto end = begin + below(row_.size() - begin);
            return each(
                [&](int i) { return static_cast<size_t>(i) >= begin && static_cast<size_t>(i) < end ? 1.0F : uniform(); });
        }
        case 21: {  // few values
            const auto values = 1 + below(40);
            return each([&](int) { return static_cast<float>(below(values)); });
        }
        case 22:  // most in the lowest bin of the guess's window, and some huge ones
            each([&](int) { return 1 + uniform(); });
            return scatter([&] { return std::ldexp(1 + uniform(), static_cast<int>(below(127))); });
        default:
            return each([&](int) {
                const std::array<float, 4> ends = {infinity, -infinity, std::nanf(""), 3.4e38F};
                return ends[below(4)];
            });
        }
    }

private:
    size_t below(size_t n) { return n == 0 ? 0 : random_() % n; }
    float uniform() { return std::uniform_real_distribution<float>()(random_); }
    float normal() { return std::normal_distribution<float>()(random_); }

    template <typename Value>
    std::vector<float> each(Value value) {
        for (size_t i = 0; i < row_.size(); ++i) {
            row_[i] = value(static_cast<int>(i));
        }
        return row_;
    }
    template <typename Value>
    std::vector<float> shuffled(Value value) {
        each(value);
        std::shuffle(row_.begin(), row_.end(), random_);
        return row_;
    }
    template <typename Value>
    std::vector<float> scatter(Value value) {
        const auto count = below(2 * static_cast<size_t>(case_.top_k) + 2);
        for (size_t n = 0; n < count; ++n) {
            row_[below(row_.size())] = value();
        }
        return row_;
    }
    /// Whether the kernel's sample of the row holds position i.
    [[nodiscard]] bool sampled(int i) const {
        const int first = case_.skew != 0 ? 1 : 0;
        const int vectors = (case_.skew + case_.end) / 4 - first;
        const int vector = (i + case_.skew) / 4 - first;
        if (vector < 0 || vector >= vectors) {
            return false;
        }
        const int64_t samples = int64_t{selecting::threads} << selecting::log_sample_vectors(case_.end);
        const int64_t sample = (vector * samples + vectors - 1) / vectors;
        return sample < samples && sample * vectors / samples == vector;
    }

    Case case_;
    Random& random_;
    std::vector<float> row_;
};

Case draw_case(Random& random) {
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
    constexpr std::array<int, 11> often = {1, 2, 31, 64, 512, 1024, 2047, 2048, 2051, 4095, 4096};
    Case drawn{};
    drawn.top_k = below(3) != 0 ? often[static_cast<size_t>(below(11))] : 1 + below(4096);
    drawn.blocks = 1 << below(5);
    drawn.skew = below(4);
    switch (below(12)) {
    case 0:
    case 1:
        drawn.end = drawn.top_k + 1 + below(3);
        break;
    case 2:
    case 3:  // about the length up to which a block holds its keys
        drawn.end = drawn.blocks * 8192 + below(600) - 300;
        break;
    case 4:
    case 5:  // about the length from which on a block more works
        drawn.end = drawn.blocks * 4096 + below(600) - 300;
        break;
    case 6:  // many rounds of a lone block
        drawn.blocks = 1;
        drawn.end = (1 + below(2)) * (1 << 17) + below(600) - 300;
        break;
    default:
        drawn.end = drawn.top_k + 1 + below(20000 * drawn.blocks);
        break;
    }
    drawn.end = below(16) == 0 ? below(drawn.top_k + 1) : std::max(drawn.end, drawn.top_k + 1);
    return drawn;
}

std::vector<int32_t> sorted_winners(const std::vector<float>& row, int top_k) {
    std::vector<int32_t> positions(row.size());
    std::iota(positions.begin(), positions.end(), 0);
    const auto k = std::min(row.size(), static_cast<size_t>(top_k));
    std::partial_sort(positions.begin(), positions.begin() + static_cast<int64_t>(k), positions.end(), [&](int a, int b) {
        const uint32_t key_a = key_of(row[static_cast<size_t>(a)]);
        const uint32_t key_b = key_of(row[static_cast<size_t>(b)]);
        return key_a != key_b ? key_a > key_b : a < b;
    });
    positions.resize(k);
    std::sort(positions.begin(), positions.end());
    positions.resize(static_cast<size_t>(top_k), -1);
    return positions;
}

/// Selects the second of two rows of a tile that begins at row 2, in the emulator, and expects what a sort gives, and
/// nothing else to be written. Adds the bytes of logits that were read to `bytes_read`.
void select_and_compare(const Case& drawn, const std::vector<float>& row, uint64_t seed, uint64_t& bytes_read) {
    constexpr int tile_begin = 2;
    constexpr int row_number = 3;
    const TileShape shape{2, static_cast<int32_t>(row.size()) + 37};
    constexpr int64_t pages = 700;
    const auto k = static_cast<size_t>(drawn.top_k);
    // Around the row stands what would win.
    const int64_t stride = shape.stride;
    std::vector<float> memory(static_cast<size_t>(2 * stride) + 64, infinity);
    float* first = memory.data() + stride;
    first += (static_cast<size_t>(drawn.skew) + 4 - reinterpret_cast<uintptr_t>(first) / 4 % 4) % 4;
    std::copy(row.begin(), row.end(), first);
    const std::vector<float> before = memory;

    const std::array<int32_t, 5> ends = {0, 0, 0, drawn.end, 0};
    const std::array<int32_t, 5> requests = {-1, -1, -1, 1, -1};
    Random random(seed);
    const auto columns = static_cast<int64_t>(row.size()) / 64 + 3;
    std::vector<int32_t> table(static_cast<size_t>(2 * columns));
    for (int32_t& block : table) {
        block = static_cast<int32_t>(random() % 720) - 10;
    }
    std::vector<int32_t> indices(5 * k, 0x55555555);
    std::vector<int32_t> counts(5, -77);
    std::vector<int64_t> slots(5 * k, -99);
    std::vector<float> logits(5 * k, 7e7F);
    const bool all_outputs = random() % 4 == 0;
    const bool is_cut = random() % 2 == 0;  // by the step's lengths, and not as ever
    // In a grid of too few clusters each block has a row of its own, the cluster's first one the tile's first row.
    const bool alone = drawn.blocks > 1 && random() % 4 == 0;
    const SelectArgs args{.tile = {.number = 1,
                                   .rows = 5,
                                   .least = is_cut ? TileShape{1, shape.stride} : shape,
                                   .shape = is_cut ? &shape : nullptr},
                          .top_k = drawn.top_k,
                          .ends = ends.data(),
                          .logits = first - stride,
                          .row_request = requests.data(),
                          .block_table = table.data(),
                          .block_table_stride = columns,
                          .pages = pages,
                          .indices = indices.data(),
                          .counts = counts.data(),
                          .physical_slots = all_outputs ? slots.data() : nullptr,
                          .winner_logits = all_outputs ? logits.data() : nullptr,
                          .padded_logits = nullptr,
                          .width = stride,
                          .last_of_layer = false};
    ASSERT_NO_THROW(bytes_read += emulation::run({.kernel = [&] { selecting::select_rows(args); },
                                                  .blocks = drawn.blocks,
                                                  .threads = selecting::threads,
                                                  .cluster_number = alone ? 0U : unsigned{row_number - tile_begin},
                                                  .grid_blocks = static_cast<unsigned>((alone ? 1 : 2) * drawn.blocks),
                                                  .shared_bytes = sizeof(selecting::Shared),
                                                  .readable = {std::as_bytes(std::span(first, row.size()))},
                                                  .seed = seed}));

    const std::vector<int32_t> want = sorted_winners(row, drawn.top_k);
    for (size_t i = 0; i < 5 * k; ++i) {
        const bool mine = i / k == row_number;
        const bool written = mine || (alone && i / k == tile_begin);
        const int32_t position = mine ? want[i % k] : -1;
        ASSERT_EQ(indices[i], written ? position : 0x55555555) << "output " << i;
        if (all_outputs) {
            const int64_t slot = position < 0 ? -1 : slot_of(table.data() + columns, position, pages);
            ASSERT_EQ(slots[i], written ? slot : -99) << "slot " << i;
            const float logit = position < 0 ? -infinity : row[static_cast<size_t>(position)];
            ASSERT_EQ(bits_of(logits[i]), bits_of(written ? logit : 7e7F)) << "winner logit " << i;
        }
    }
    EXPECT_EQ(counts, (std::vector<int32_t>{-77, -77, alone ? 0 : -77, std::min(drawn.top_k, drawn.end), -77}));
    EXPECT_EQ(std::memcmp(memory.data(), before.data(), memory.size() * sizeof(float)), 0) << "logits were written";
}

class SelectEmulated : public ::testing::TestWithParam<int> {};

// Each kind of data in some sixteen shapes. A seed that fails fails again.
TEST_P(SelectEmulated, IsASort) {
    const uint64_t first_seed = fresh_seed();
    for (uint64_t seed = first_seed; seed < first_seed + 16; ++seed) {
        Random random(seed);
        const Case drawn = draw_case(random);
        SCOPED_TRACE("seed " + std::to_string(seed) + ": K " + std::to_string(drawn.top_k) + ", end " +
                     std::to_string(drawn.end) + ", blocks " + std::to_string(drawn.blocks) + ", skew " +
                     std::to_string(drawn.skew));
        uint64_t bytes_read = 0;
        select_and_compare(drawn, drawn.end == 0 ? std::vector<float>{} : RowMaker(drawn, random).make(GetParam()), seed,
                           bytes_read);
        if (HasFailure()) {
            return;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Kinds, SelectEmulated, ::testing::Range(0, RowMaker::kinds));

// What the sample promises: of rows like most, nearly all are read once. A guess may be wrong, or lets too many keys be; not
// often.
TEST(SelectEmulatedLong, ReadsLongRowsOnce) {
    const uint64_t seed = fresh_seed();
    Random random(seed);
    int rows = 0;
    int read_again = 0;
    for (const int end : {70001, 131072, 262144, 524288, 1048576}) {
        for (const int blocks : {1, 2, 8}) {
            SCOPED_TRACE("seed " + std::to_string(seed) + ", end " + std::to_string(end) + ", blocks " +
                         std::to_string(blocks));
            const Case drawn{.top_k = 2048, .end = end, .blocks = blocks, .skew = 0};
            uint64_t bytes_read = 0;
            select_and_compare(drawn, RowMaker(drawn, random).make(0), random(), bytes_read);
            const auto row_bytes = static_cast<uint64_t>(end) * sizeof(float);
            EXPECT_GE(bytes_read, row_bytes);
            ++rows;
            read_again += bytes_read > row_bytes * 5 / 4 + row_bytes * static_cast<uint64_t>(blocks) / 16 ? 1 : 0;
        }
    }
    EXPECT_LE(read_again, 3) << "of " << rows << " rows, seed " << seed;
}

// ---- that the emulator finds what it is for
// --------------------------------------------------------------------------------

void run_block(int blocks, const std::function<void()>& kernel) {
    emulation::run({.kernel = kernel, .blocks = blocks, .threads = 64, .shared_bytes = 256, .seed = 7});
}

TEST(Emulator, FaultsOnWhatAGpuDoesNotForgive) {
    // Written here and not inside the macros, where all lines are one.
    const auto one_stays_away = [] {
        if (emulation::thread() != 5) {
            __syncthreads();
        }
    };
    const auto two_barriers = [] {
        if (emulation::thread() < 32) {
            __syncthreads();
        } else {
            __syncthreads();
        }
    };
    const auto half_a_warp = [] {
        if (emulation::thread() % 2 == 0) {
            static_cast<void>(__reduce_add_sync(~0U, 1));
        }
    };
    const auto two_functions = [] {
        if (emulation::thread() % 2 == 0) {
            static_cast<void>(__reduce_add_sync(~0U, 1));
        } else {
            static_cast<void>(__ballot_sync(~0U, true));
        }
    };
    const auto leaves_before_the_wait = [] { emulation::cluster_arrive(); };
    const auto reads_before_a_barrier = [] { static_cast<void>(emulation::in_block(0, 1, 4)); };
    const auto reads_from_one_that_left = [] {
        emulation::cluster_arrive();
        emulation::cluster_wait();
        if (emulation::cluster_rank() == 0) {
            __syncthreads();
            static_cast<void>(emulation::in_block(0, 1, 4));
        }
    };
    const auto reads_elsewhere = [] { emulation::check_readable(&infinity, 4, 4); };
    const auto exchanges = [] {
        emulation::cluster_arrive();
        emulation::cluster_wait();
        static_cast<void>(emulation::in_block(0, 1, 4));
        emulation::cluster_arrive();
        emulation::cluster_wait();
    };
    alignas(8) static uint64_t never = 0;
    const auto waits_alone = [] {
        if (emulation::thread() == 0) {
            for (never = 0; never == 0;) {
                emulation::look_later();
            }
        }
    };
    const auto throws = [] { throw std::runtime_error("its own"); };
    EXPECT_THROW(run_block(1, waits_alone), std::runtime_error);
    EXPECT_THROW(run_block(1, throws), std::runtime_error);
    EXPECT_THROW(run_block(17, throws), std::runtime_error);
    EXPECT_THROW(run_block(1, one_stays_away), std::runtime_error);
    EXPECT_THROW(run_block(1, two_barriers), std::runtime_error);
    EXPECT_THROW(run_block(1, half_a_warp), std::runtime_error);
    EXPECT_THROW(run_block(1, two_functions), std::runtime_error);
    EXPECT_THROW(run_block(2, leaves_before_the_wait), std::runtime_error);
    EXPECT_THROW(run_block(2, reads_before_a_barrier), std::runtime_error);
    EXPECT_THROW(run_block(2, reads_from_one_that_left), std::runtime_error);
    EXPECT_THROW(run_block(1, reads_elsewhere), std::runtime_error);
    EXPECT_NO_THROW(run_block(2, exchanges));
}

TEST(Emulator, AddsUpAWarp) {
    std::array<unsigned, 64> sums{};
    run_block(1, [&] {
        const auto lane = static_cast<unsigned>(emulation::thread()) % 32;
        sums[static_cast<size_t>(emulation::thread())] =
            __reduce_add_sync(~0U, lane) + __shfl_up_sync(~0U, lane, 1) + __ballot_sync(~0U, lane < 3);
    });
    for (unsigned thread = 0; thread < 64; ++thread) {
        const unsigned lane = thread % 32;
        EXPECT_EQ(sums[thread], 496 + (lane == 0 ? 0 : lane - 1) + 7);
    }
}

}  // namespace
}  // namespace stepgraph::test
