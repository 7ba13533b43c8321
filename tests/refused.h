// What a refusal must look like: its code, and a sentence that says operand, value and what it must be.
#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <stepgraph/kernels/error.h>

namespace stepgraph::test {

/// Passes where `call` throws Error of `code` whose sentence contains each of `parts` in this order.
template <typename Call>
::testing::AssertionResult refused(Call call, ErrorCode code, const std::vector<std::string>& parts) {
    try {
        call();
    } catch (const Error& error) {
        const std::string sentence = error.what();
        if (error.code() != code) {
            return ::testing::AssertionFailure() << "refused with code " << static_cast<int>(error.code()) << " in place of "
                                                 << static_cast<int>(code) << ": " << sentence;
        }
        size_t from = 0;
        for (const std::string& part : parts) {
            const size_t at = sentence.find(part, from);
            if (at == std::string::npos) {
                return ::testing::AssertionFailure() << "the sentence lacks '" << part << "': " << sentence;
            }
            from = at + part.size();
        }
        return ::testing::AssertionSuccess() << sentence;
    }
    return ::testing::AssertionFailure() << "not refused";
}

}  // namespace stepgraph::test
