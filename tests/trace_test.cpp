// Request traces: what is read of them, how a batch follows one, and the command from end to end on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <stepgraph/tools/safetensors.h>
#include <stepgraph/tools/serving_batch.h>
#include <stepgraph/tools/trace_command.h>
#include <stepgraph/tools/trace_file.h>

#include "command.h"
#include "temporary_file.h"

namespace stepgraph::test {
namespace {

using namespace tools;

constexpr const char* header = "arrival_ms,input_tokens,output_tokens\n";

void write(const TemporaryFile& file, const std::string& text) {
    std::ofstream(file.path()) << text;
}

/// The sentence that a trace is refused with, or "".
std::string refusal(const std::string& text) {
    const TemporaryFile file("trace.csv");
    write(file, text);
    try {
        read_trace(file.path());
    } catch (const CaseError& error) {
        return error.what();
    }
    return "";
}

TEST(TraceFile, GivesTheRequestsOfItsLines) {
    const TemporaryFile file("trace.csv");
    write(file, std::string(header) + "0,100,5\r\n0,1,1\n2147483647,123192,7");
    const std::vector<TraceRequest> trace = read_trace(file.path());
    ASSERT_EQ(trace.size(), 3U);
    EXPECT_EQ(trace[0].prompt_tokens, 100);
    EXPECT_EQ(trace[0].generated_tokens, 5);
    EXPECT_EQ(trace[2].arrival_ms, 2147483647);
    EXPECT_EQ(trace[2].generated_tokens, 7);
}

TEST(TraceFile, IsRefusedWithTheLineTheColumnAndWhatMustStandThere) {
    const std::map<std::string, std::string> wrong{
        {"", "trace.csv: is empty, must hold arrival_ms,input_tokens,output_tokens"},
        {header, "holds no request"},
        {"\xEF\xBB\xBF" + std::string(header), R"(line 1 is "\ufeffarrival_ms,input_tokens,output_tokens", must be)"},
        {std::string(header) + "\x1B[2J\n", R"(line 2 is "\u001b[2J", must be three numbers)"},
        {std::string(header) + "\xFF,1,1\n", R"(line 2: arrival_ms is "\ufffd", must be a whole number)"},
        {"0,1,1\n", "line 1 is \"0,1,1\", must be arrival_ms,input_tokens,output_tokens"},
        {std::string(header) + "0,1\n", "line 2 is \"0,1\", must be three numbers with commas between them"},
        {std::string(header) + "0,1,1,1\n", "line 2 is \"0,1,1,1\", must be three numbers"},
        {std::string(header) + "0,1,1\n\n", "line 3 is \"\", must be three numbers"},
        {std::string(header) + "-1,1,1\n", "line 2: arrival_ms is \"-1\", must be a whole number from 0"},
        {std::string(header) + "0,0,1\n", "line 2: input_tokens is \"0\", must be a whole number from 1"},
        {std::string(header) + "0,1,1.5\n", "line 2: output_tokens is \"1.5\", must be a whole number"},
        {std::string(header) + "0,1,99999999999\n", "line 2: output_tokens is \"99999999999\", must be"},
        {std::string(header) + "0, 1,1\n", "line 2: input_tokens is \" 1\", must be"},
        {std::string(header) + "7,1,1\n6,1,1\n",
         "line 3: arrival_ms is \"6\", must be at least that of the line before, 7"}};
    for (const auto& [text, sentence] : wrong) {
        EXPECT_NE(refusal(text).find(sentence), std::string::npos) << text << "\n" << refusal(text);
    }
}

TEST(TraceFile, IsRefusedInAShortSentenceWhateverStandsInIt) {
    EXPECT_LT(refusal(std::string(100000, 'x')).size(), 400U);
    EXPECT_LT(refusal(std::string(header) + std::string(100000, '\0')).size(), 400U);
}

Geometry geometry_of(int rows, int pages) {
    return validate({.heads = 16,
                     .top_k = 4,
                     .max_rows = rows,
                     .max_requests = rows,
                     .max_model_len = 640,
                     .block_table_columns = 10,
                     .pages = pages});
}

TEST(ServingBatchOfATrace, AdmitsARequestWhenItHasCome) {
    const std::vector<TraceRequest> trace{{0, 10, 3}, {20, 10, 1}, {1000, 10, 2}};
    ServingBatch batch(geometry_of(4, 10), trace, {.step_ms = 10, .drafts = 0}, 1);
    std::vector<size_t> arrivals;
    int tokens = 0;
    for (int step = 0; !batch.done(); ++step) {
        ASSERT_LT(step, 10);
        arrivals.push_back(batch.begin_step(step).size());
        tokens += batch.end_step();
    }
    EXPECT_EQ(arrivals, (std::vector<size_t>{1, 0, 1, 1, 0}));  // at 0, 10 and 20 ms, and at 1000 and 1010 ms
    EXPECT_EQ(tokens, 6);
}

TEST(ServingBatchOfATrace, TakesAPageWhenARequestGrowsIntoIt) {
    const std::vector<TraceRequest> trace{{0, 62, 5}};
    ServingBatch batch(geometry_of(4, 10), trace, {.step_ms = 10, .drafts = 0}, 1);
    std::vector<size_t> pages;
    for (int step = 0; !batch.done(); ++step) {
        batch.begin_step(step);
        pages.push_back(batch.pages(0).size());
        batch.end_step();
    }
    EXPECT_EQ(pages, (std::vector<size_t>{1, 1, 2, 2, 2}));  // 63 to 67 tokens
}

TEST(ServingBatchOfATrace, UsesPagesAgainAndGivesNoneToTwo) {
    std::vector<TraceRequest> trace{{0, 700, 5}};  // longer than a sequence can be
    std::mt19937_64 random{std::random_device{}()};
    for (int i = 0; i < 60; ++i) {
        trace.push_back({i * 5, 1 + static_cast<int>(random() % 700), 1 + static_cast<int>(random() % 100)});
    }
    const Geometry g = geometry_of(6, 23);
    ServingBatch batch(g, trace, {.step_ms = 1, .drafts = 3, .acceptance = 0.7}, random());
    std::set<int32_t> ever;
    bool verified = false;
    int64_t tokens = 0;
    int64_t taken = 0;
    for (int step = 0; !batch.done(); ++step) {
        ASSERT_LT(step, 100000);
        for (const auto& arrival : batch.begin_step(step)) {
            taken += pages_for(arrival.prompt_tokens);
        }
        ASSERT_GE(batch.live(), 1);
        ASSERT_LE(batch.rows(), g.max_rows);
        std::set<int32_t> pages;
        size_t used = 0;
        for (int q = 0; q < batch.live(); ++q) {
            const auto of_request = batch.pages(q);
            ASSERT_GE(of_request.size(), static_cast<size_t>(pages_for(batch.seq_lens[static_cast<size_t>(q)])));
            ASSERT_TRUE(
                std::equal(of_request.begin(), of_request.end(), batch.block_table.begin() + q * g.block_table_stride));
            pages.insert(of_request.begin(), of_request.end());
            used += of_request.size();
            verified = verified || batch.query_lens[static_cast<size_t>(q)] > 1;
        }
        ASSERT_EQ(pages.size(), used) << "two requests share a page at step " << step;
        ever.insert(pages.begin(), pages.end());
        tokens += batch.end_step();
    }
    EXPECT_TRUE(verified);
    EXPECT_LE(ever.size(), static_cast<size_t>(g.pages));
    EXPECT_GT(taken, g.pages);
    EXPECT_GT(batch.cut(), 0);
    int64_t expected = 0;
    for (const TraceRequest& request : trace) {
        const int prompt = std::min(request.prompt_tokens, 639);
        expected += std::min(request.generated_tokens, 640 - prompt);
    }
    EXPECT_EQ(tokens, expected);
}

TEST(TraceCommand, DecodesATraceOnTheHostInEveryFormat) {
    const std::string file = STEPGRAPH_TEST_DATA "/../../tools/data/conversation_trace.csv";
    for (const char* format : {"fp8", "fp8_mx", "mxfp4", "mxfp4_rowgroup"}) {
        const Ended ended = command("trace " + file + " --device cpu --steps 25 --rows 6 --check 25 --format " + format);
        EXPECT_EQ(ended.exit_code, 0) << ended.printed;
        for (const char* part : {"seed ", "steps          25 of 2 layers", "time per step ", "padding ",
                                 "checks         25 steps in every row, 0 wrong"}) {
            EXPECT_NE(ended.printed.find(part), std::string::npos) << part << "\n" << ended.printed;
        }
    }
}

TEST(TraceCommand, GivesTheSameTotalsFromTheSameSeed) {
    const std::string file = STEPGRAPH_TEST_DATA "/../../tools/data/conversation_trace.csv";
    const auto totals = [&file](const std::string& seed) {
        const Ended ended = command("trace " + file + " --device cpu --steps 30 --check 1 --json --seed " + seed);
        EXPECT_EQ(ended.exit_code, 0) << ended.printed;
        EXPECT_EQ(ended.printed.find('{'), 0U) << ended.printed;
        const size_t from = ended.printed.find("\"steps\"");
        return ended.printed.substr(from, ended.printed.find("\"us_p50\"") - from);
    };
    EXPECT_EQ(totals("7"), totals("7"));
    EXPECT_NE(totals("7").find("\"steps\": 30,"), std::string::npos) << totals("7");
}

TEST(TraceCommand, EndsWithItsTrace) {
    const TemporaryFile file("short.csv");
    write(file, std::string(header) + "0,700,2\n5000,64,3\n");
    const Ended ended =
        command("trace " + file.path().string() + " --device cpu --shrink 1 --drafts 0 --max-model-len 704 --pages 11");
    EXPECT_EQ(ended.exit_code, 0) << ended.printed;
    EXPECT_NE(ended.printed.find("requests       2, of which 0 were cut"), std::string::npos) << ended.printed;
    EXPECT_NE(ended.printed.find("steps          5 of"), std::string::npos) << ended.printed;
    EXPECT_NE(ended.printed.find("tokens         5\n"), std::string::npos) << ended.printed;
}

TEST(TraceCommand, RefusesInOneSentenceWhatItCannotUse) {
    const std::string file = STEPGRAPH_TEST_DATA "/../../tools/data/conversation_trace.csv --device cpu";
    const std::map<std::string, std::string> wrong{
        {"nowhere.csv", "stepgraph: nowhere.csv: cannot be read: No such file or directory"},
        {"/", "stepgraph: /: cannot be read: Is a directory"},
        {file + " --pages 3", "--pages is 3, must be at least 64, which a request of --max-model-len 4096 takes"},
        {file + " --steps 5 --check 6", "--check is 6, must be at most --steps, 5"},
        {file + " --rows 0", "--rows: Value 0 not in range 1 to 1024"},
        {file + " --acceptance 2", "--acceptance: Value 2 not in range"},
        {file + " --acceptance nan", "--acceptance: Value nan not in range 0 to 1"},
        {file + " --step-ms nan", "--step-ms: Value nan not in range 0.001 to 1e+06"},
        {file + " --step-ms soon", "--step-ms: Value soon not in range"},
        {file + " --seed -1", "--seed: Value -1 is not a whole number from 0 to 18446744073709551615"},
        {file + " --seed 18446744073709551616", "--seed: Value 18446744073709551616 is not"},
        {file + " --seed 1.5", "--seed: Value 1.5 is not"},
        {file + " --layers many", "--layers: Value many not in range 1 to 128"}};
    for (const auto& [arguments, sentence] : wrong) {
        const Ended ended = command("trace " + arguments);
        EXPECT_EQ(ended.exit_code, 2) << ended.printed;
        EXPECT_NE(ended.printed.find(sentence), std::string::npos) << ended.printed;
    }
}

}  // namespace
}  // namespace stepgraph::test
