// Every case file through the host's stages: results against what the files expect of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "case_checks.h"

namespace stepgraph::test {
namespace {

using tools::Case;
using tools::run_on_cpu;
using tools::StepResults;

class CaseOnTheHost : public testing::TestWithParam<std::string> {};

TEST_P(CaseOnTheHost, GivesWhatTheFileExpects) {
    const LoadedCase loaded = load(GetParam());
    const StepResults results = run_on_cpu(loaded.step, true);
    EXPECT_EQ(joined(differences_from_expected(loaded, results)), "");
    EXPECT_EQ(results.status, StepStatus{});
}

TEST_P(CaseOnTheHost, SelectsExactlyTheBestOfItsOwnLogits) {
    const LoadedCase loaded = load(GetParam());
    EXPECT_EQ(joined(differences_from_own_logits(loaded, run_on_cpu(loaded.step, true))), "");
}

TEST_P(CaseOnTheHost, GivesTheSameWithoutLogitsAskedFor) {
    const LoadedCase loaded = load(GetParam());
    const StepResults with = run_on_cpu(loaded.step, true);
    const StepResults without = run_on_cpu(loaded.step, false);
    EXPECT_EQ(without.indices, with.indices);
    EXPECT_EQ(without.physical_slots, with.physical_slots);
    EXPECT_EQ(without.cache, with.cache);
    EXPECT_TRUE(without.logits.empty());
}

INSTANTIATE_TEST_SUITE_P(CaseFiles, CaseOnTheHost, testing::ValuesIn(case_names()),
                         [](const auto& param_info) { return param_info.param; });

TEST(CaseFiles, AreAllTen) {
    EXPECT_EQ(case_names().size(), 10U);
}

TEST(CaseFiles, RunWhateverTheirLengthsBlocksAndSlotsSay) {
    const Case whole = load("mxfp4_decode").step;
    std::mt19937 random(7);  // NOLINT: the same data every time
    const auto any_of = [&random](const std::vector<int64_t>& values) { return values[random() % values.size()]; };
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    for (int round = 0; round < 100; ++round) {
        Case step = whole;
        for (int32_t& length : step.seq_lens) {
            length = static_cast<int32_t>(any_of({-most - 1, -1, 0, 1, 64, 200, 768, 769, most}));
        }
        for (int32_t& length : step.query_lens) {
            length = static_cast<int32_t>(any_of({-most - 1, -1, 0, 1, 1, 2, 3, 4, most}));
        }
        for (int32_t& block : step.block_table) {
            block = static_cast<int32_t>(any_of({-most - 1, -1, 0, 5, 16, 17, most}));
        }
        const int64_t cache_end = step.geometry.pages * page_tokens;
        for (int64_t& slot : step.slots) {
            slot = any_of({std::numeric_limits<int64_t>::min(), -1, 0, cache_end - 1, cache_end, cache_end << 40U});
        }
        if (round % 2 == 0) {
            step.slots.clear();
        }
        const LoadedCase damaged{"damaged", {}, step};
        EXPECT_EQ(joined(differences_from_own_logits(damaged, run_on_cpu(step, true))), "") << "round " << round;
    }
}

// ---- the checks themselves: each must be able to fail --------------------------------------------------------------------
class Checks : public testing::Test {
protected:
    const LoadedCase loaded = load("fp8_decode");
    StepResults results = run_on_cpu(loaded.step, true);

    /// The tensor that the first difference names.
    static std::string first(const Differences& differences) {
        return differences.empty() ? "none" : differences.front().substr(0, differences.front().find_first_of("[: "));
    }
    std::string first_from_expected() const { return first(differences_from_expected(loaded, results)); }
    std::string first_from_own_logits() const { return first(differences_from_own_logits(loaded, results)); }
    std::string first_from_another_device() const {
        return first(differences_between(loaded, results, run_on_cpu(loaded.step, true)));
    }

    [[nodiscard]] size_t first_byte_of_first_key() const {
        return static_cast<size_t>(results.slots[0] / page_tokens * loaded.step.geometry.page_stride_bytes +
                                   results.slots[0] % page_tokens * head_dim);
    }
};

TEST_F(Checks, PassWhatIsRight) {
    EXPECT_EQ(first_from_expected(), "none");
    EXPECT_EQ(first_from_own_logits(), "none");
    EXPECT_EQ(first_from_another_device(), "none");
}

TEST_F(Checks, CatchAStartThatIsOneOff) {
    results.starts[1] += 1;
    EXPECT_EQ(first_from_expected(), "starts");
    EXPECT_EQ(first_from_another_device(), "starts");
}

TEST_F(Checks, CatchABoundThatIsOneOff) {
    results.ends[1] -= 1;
    EXPECT_EQ(first_from_expected(), "ends");
    EXPECT_EQ(first_from_another_device(), "ends");
}

TEST_F(Checks, CatchASlotThatIsOneOff) {
    results.slots[2] += 1;
    EXPECT_EQ(first_from_expected(), "slots");
    EXPECT_EQ(first_from_another_device(), "slots");
}

TEST_F(Checks, CatchAHeadWeightThatIsOneBitOff) {
    results.head_weights[5] = std::nextafter(results.head_weights[5], 1.0F);
    EXPECT_EQ(first_from_expected(), "head_weights");
    EXPECT_EQ(first_from_another_device(), "head_weights");
}

TEST_F(Checks, AllowOneKeyByteOneCodeApartAndNotTwo) {
    uint8_t& byte = results.cache[first_byte_of_first_key()];
    byte = static_cast<uint8_t>((byte & 127U) > 1 ? byte - 1 : byte + 1);
    EXPECT_EQ(first_from_expected(), "none");
    EXPECT_EQ(first_from_another_device(), "cache");
    byte = static_cast<uint8_t>(byte ^ 0x20U);
    EXPECT_EQ(first_from_expected(), "cache");
}

TEST_F(Checks, CatchMoreKeyBytesOneCodeApartThanTheTolerance) {
    for (size_t i = 0; i < 8; ++i) {
        uint8_t& byte = results.cache[first_byte_of_first_key() + i];
        byte = static_cast<uint8_t>((byte & 127U) > 1 ? byte - 1 : byte + 1);
    }
    EXPECT_EQ(first_from_expected(), "cache");
}

TEST_F(Checks, CatchAByteThatNobodyShouldHaveWritten) {
    size_t untouched = 0;
    while (untouched == first_byte_of_first_key()) {
        untouched += page_tokens * head_dim;
    }
    results.cache[untouched] = static_cast<uint8_t>(results.cache[untouched] ^ 1U);
    EXPECT_EQ(first_from_expected(), "cache");
    EXPECT_EQ(first_from_another_device(), "cache");
}

TEST_F(Checks, CatchALogitBeyondTheTolerance) {
    const auto row = results.logits.begin();
    const auto largest = std::max_element(row, row + results.ends[0]);
    *largest *= 1.003F;
    EXPECT_EQ(first_from_expected(), "logits");
}

TEST_F(Checks, CatchALogitWrittenBehindTheBound) {
    results.logits[static_cast<size_t>(results.ends[0])] = 0.0F;
    EXPECT_EQ(first_from_expected(), "logits");
    EXPECT_EQ(first_from_another_device(), "logits");
}

TEST_F(Checks, CatchALoserAmongTheIndices) {
    // The last winner gives way to the first position that did not win.
    const size_t last = static_cast<size_t>(loaded.step.geometry.top_k) - 1;
    int32_t loser = 0;
    while (std::find(results.indices.begin(), results.indices.begin() + loaded.step.geometry.top_k, loser) !=
           results.indices.begin() + loaded.step.geometry.top_k) {
        ++loser;
    }
    results.indices[last] = loser;
    EXPECT_EQ(first_from_own_logits(), "indices");
    EXPECT_EQ(first_from_expected(), "indices");
    EXPECT_EQ(first_from_another_device(), "indices");
}

TEST_F(Checks, CatchWinnersOutOfOrder) {
    std::swap(results.indices[0], results.indices[1]);
    EXPECT_EQ(first_from_own_logits(), "indices");
}

TEST_F(Checks, CatchAPhysicalSlotOfAnotherPage) {
    results.physical_slots[0] += page_tokens;
    EXPECT_EQ(first_from_own_logits(), "physical_slots");
}

TEST_F(Checks, CatchATensorOfAnotherSize) {
    results.logits.pop_back();
    EXPECT_EQ(first_from_expected(), "logits");
}

}  // namespace
}  // namespace stepgraph::test
