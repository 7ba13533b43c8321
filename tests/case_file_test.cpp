// Case files that lack something or say something wrong, through the loader and through the command.
#include <stepgraph/tools/case_file.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include <sys/wait.h>

#include "case_checks.h"
#include "command.h"
#include "temporary_file.h"

namespace stepgraph::test {
namespace {

using namespace tools;

/// A case's file, to be made wrong; without what is expected of it.
Safetensors inputs_of(const std::string& name) {
    Safetensors file = load(name).file;
    std::erase_if(file.tensors, [](const auto& entry) { return entry.first.starts_with("expected."); });
    return file;
}

/// The sentence that a wrong file is refused with, or "".
std::string refusal(const Safetensors& file) {
    try {
        case_of(file);
    } catch (const CaseError& error) {
        return error.what();
    }
    return "";
}
std::string refusal(const std::string& name, const std::function<void(Safetensors&)>& damage) {
    Safetensors file = inputs_of(name);
    damage(file);
    return refusal(file);
}
std::string refusal_of_metadata(const std::string& key, const std::string& value) {
    return refusal("fp8_decode", [&](Safetensors& file) { file.metadata[key] = value; });
}

// ---- cases as they are
TEST(CaseFile, GivesTheGeometryOfItsTensors) {
    const Case step = load_case(case_path("fp8_dcp_rank1_of_2"));
    EXPECT_EQ(step.geometry.max_rows, 6);
    EXPECT_EQ(step.geometry.max_requests, 3);
    EXPECT_EQ(step.geometry.heads, 32);
    EXPECT_EQ(step.geometry.top_k, 128);
    EXPECT_EQ(step.geometry.block_table_columns, 8);
    EXPECT_EQ(step.geometry.block_table_stride, 8);
    EXPECT_EQ(step.geometry.pages, 14);
    EXPECT_EQ(step.geometry.projected_columns, 160);
    EXPECT_EQ(step.geometry.k_norm_eps, 1e-5F);
    EXPECT_EQ(step.geometry.dcp.rank, 1);
    EXPECT_EQ(step.geometry.dcp.interleave, 16);
    EXPECT_FALSE(step.geometry.projects());
}

TEST(CaseFile, MayHoldWhatTheProjectionsAreComputedFrom) {
    const Case step = load_case(case_path("fp8_projected_here"));
    EXPECT_EQ(step.geometry.q_lora_rank, 256);
    EXPECT_EQ(step.geometry.hidden_size, 512);
    EXPECT_TRUE(step.iq.empty() && step.projected.empty());
}

TEST(CaseFile, MayLeaveTheSlotsToTheBlockTable) {
    EXPECT_EQ(refusal("fp8_decode", [](Safetensors& file) { file.tensors.erase("slots"); }), "");
    EXPECT_TRUE(load_case(case_path("fp8_64_heads_derived_slots")).slots.empty());
}

TEST(CaseFile, MayHoldMoreLengthsThanRequestsAndTensorsOfItsOwn) {
    EXPECT_EQ(refusal("fp8_decode",
                      [](Safetensors& file) {
                          file.tensors["seq_lens"] = tensor_of<int32_t>({1, 2, 3, 4}, {4});
                          file.tensors["notes"] = tensor_of<uint8_t>({1}, {1});
                          file.metadata["author"] = "nobody";
                      }),
              "");
}

TEST(CaseFile, TakesWrongDataForTheStagesToSkip) {
    EXPECT_EQ(refusal("fp8_decode",
                      [](Safetensors& file) {
                          file.tensors["seq_lens"] = tensor_of<int32_t>({-7, 2147483647, 0}, {3});
                          file.tensors["slots"] = tensor_of<int64_t>({-9, int64_t{1} << 60, 0}, {3});
                          file.tensors["block_table"] = tensor_of(std::vector<int32_t>(std::size_t{3} * 16, -5), {3, 16});
                      }),
              "");
}

// ---- tensors
struct Wrong {
    const char* case_name;
    const char* tensor;
    const char* must;  // be, for a tensor that is missing, or of another dtype or rank
};

class CaseTensor : public testing::TestWithParam<Wrong> {};

TEST_P(CaseTensor, IsNamedWhereItIsMissing) {
    const auto [case_name, tensor, must] = GetParam();
    EXPECT_EQ(refusal(case_name, [&, name = tensor](Safetensors& file) { file.tensors.erase(name); }),
              "tensor " + quoted(tensor) + " is missing, must be " + must);
}

TEST_P(CaseTensor, IsNamedWhereItsDtypeIsAnother) {
    const auto [case_name, tensor, must] = GetParam();
    std::string was;
    const std::string sentence = refusal(case_name, [&, name = tensor](Safetensors& file) {
        file.tensors[name].dtype = "F16";
        was = dtype_and_shape(file.tensors[name]);
    });
    EXPECT_EQ(sentence, "tensor " + quoted(tensor) + " is " + was + ", must be " + must);
}

TEST_P(CaseTensor, IsNamedWhereItHasADimensionMoreOrOneOfZero) {
    const auto [case_name, tensor, must] = GetParam();
    for (const int64_t extra : {1, 0}) {
        std::string was;
        const std::string sentence = refusal(case_name, [&, name = tensor](Safetensors& file) {
            std::vector<int64_t>& shape = file.tensors[name].shape;
            extra == 1 ? shape.push_back(1) : void(shape.front() = 0);
            was = dtype_and_shape(file.tensors[name]);
        });
        EXPECT_EQ(sentence, "tensor " + quoted(tensor) + " is " + was + ", must be " + must);
    }
}

INSTANTIATE_TEST_SUITE_P(
    Every, CaseTensor,
    testing::Values(Wrong{"fp8_decode", "iq", "BF16 [rows, heads * 128 = 4096], none 0"},
                    Wrong{"fp8_decode", "projected", "BF16 [rows = 3, projected columns], none 0"},
                    Wrong{"fp8_projected_here", "q_c", "BF16 [rows, q_lora], none 0"},
                    Wrong{"fp8_projected_here", "wq_b", "BF16 [heads * 128 = 4096, q_lora = 256]"},
                    Wrong{"fp8_projected_here", "hidden", "BF16 [rows = 3, hidden], none 0"},
                    Wrong{"fp8_projected_here", "w_kv", "BF16 [projected columns, hidden = 512], none 0"},
                    Wrong{"fp8_decode", "query_lens", "I32 [requests], none 0"},
                    Wrong{"fp8_decode", "seq_lens", "I32 [at least requests], none 0"},
                    Wrong{"fp8_decode", "block_table", "I32 [requests = 3, block table columns], none 0"},
                    Wrong{"fp8_decode", "k_norm_weight", "F32 [columns of a head = 128]"},
                    Wrong{"fp8_decode", "k_norm_bias", "F32 [columns of a head = 128]"},
                    Wrong{"fp8_decode", "cache", "U8 [pages, page_stride = 8448], none 0"}),
    [](const auto& param_info) { return std::string(param_info.param.tensor); });

/// The shape that a tensor is given, with bytes to it, and the sentence.
std::string refusal_of_shape(const std::string& tensor, const std::vector<int64_t>& shape) {
    return refusal("fp8_decode", [&](Safetensors& file) {
        size_t bytes = file.tensors[tensor].dtype == "U8" ? 1 : file.tensors[tensor].dtype == "BF16" ? 2 : 4;
        bytes = file.tensors[tensor].dtype == "I64" ? 8 : bytes;
        for (const int64_t dimension : shape) {
            bytes *= static_cast<size_t>(dimension);
        }
        file.tensors[tensor].shape = shape;
        file.tensors[tensor].bytes.resize(bytes);
    });
}

TEST(CaseFile, RefusesTensorsThatDisagree) {
    EXPECT_EQ(refusal_of_shape("iq", {3, 4095}),
              R"(tensor "iq" is BF16 [3, 4095], must be BF16 [rows, heads * 128 = 4096], none 0)");
    EXPECT_EQ(refusal_of_shape("projected", {4, 160}),
              R"(tensor "projected" is BF16 [4, 160], must be BF16 [rows = 3, projected columns], none 0)");
    EXPECT_EQ(refusal_of_shape("seq_lens", {2}), R"(tensor "seq_lens" is I32 [2], must be I32 [at least requests = 3])");
    EXPECT_EQ(refusal_of_shape("block_table", {2, 16}),
              R"(tensor "block_table" is I32 [2, 16], must be I32 [requests = 3, block table columns], none 0)");
    EXPECT_EQ(refusal_of_shape("slots", {4}), R"(tensor "slots" is I64 [4], must be I64 [rows = 3])");
    EXPECT_EQ(refusal_of_shape("k_norm_bias", {127}),
              R"(tensor "k_norm_bias" is F32 [127], must be F32 [columns of a head = 128])");
    EXPECT_EQ(refusal_of_shape("cache", {24, 8452}),
              R"(tensor "cache" is U8 [24, 8452], must be U8 [pages, page_stride = 8448], none 0)");
}

TEST(CaseFile, RefusesSlotsOfAnotherDtype) {
    EXPECT_EQ(refusal("fp8_decode",
                      [](Safetensors& file) {
                          file.tensors["slots"] = tensor_of<int32_t>({1, 2, 3}, {3});
                      }),
              R"(tensor "slots" is I32 [3], must be I64 [rows = 3])");
}

TEST(CaseFile, RefusesBothOrNeitherOfProjectionsAndTheirInputs) {
    EXPECT_EQ(refusal("fp8_decode",
                      [](Safetensors& file) {
                          file.tensors.erase("iq");
                          file.tensors.erase("projected");
                      }),
              R"(tensor "iq" is missing, must be present with "projected", or "q_c", "wq_b", "hidden" and "w_kv")");
    EXPECT_EQ(refusal("fp8_decode", [](Safetensors& file) { file.tensors["w_kv"] = file.tensors["iq"]; }),
              R"(tensor "w_kv" is present, must be absent beside iq: a case holds the projections or their inputs)");
}

// ---- metadata
TEST(CaseFile, NamesEveryMetadataKeyThatIsMissing) {
    for (const char* key : {"format_version", "heads", "topk", "eps", "cache_format", "max_model_len", "page_stride",
                            "key_column", "weight_column", "dcp_rank", "dcp_world_size", "dcp_interleave"}) {
        const std::string sentence = refusal("fp8_decode", [&](Safetensors& file) { file.metadata.erase(key); });
        EXPECT_EQ(sentence.substr(0, sentence.find(',')), "metadata " + quoted(key) + " is missing");
    }
}

TEST(CaseFile, RefusesNumbersThatAreNotWrittenAsOne) {
    for (const char* key :
         {"heads", "topk", "key_column", "weight_column", "dcp_rank", "dcp_world_size", "dcp_interleave"}) {
        for (const char* value : {"", " 1", "1 ", "+1", "1.0", "1e3", "0x10", "one", "2147483648", "-2147483649"}) {
            EXPECT_EQ(refusal_of_metadata(key, value),
                      "metadata " + quoted(key) + " is " + quoted(value) + ", must be a whole number of 32 bits");
        }
    }
    for (const char* key : {"max_model_len", "page_stride"}) {
        EXPECT_EQ(refusal_of_metadata(key, "9223372036854775808"),
                  "metadata " + quoted(key) + R"( is "9223372036854775808", must be a whole number of 64 bits)");
    }
    for (const char* value : {"", "1e-5 ", "1e-5f", "small", "1e99"}) {
        EXPECT_EQ(refusal_of_metadata("eps", value),
                  R"(metadata "eps" is )" + quoted(value) + ", must be a number that FP32 holds");
    }
}

TEST(CaseFile, RefusesAnotherVersionAndAnotherFormat) {
    EXPECT_EQ(refusal_of_metadata("format_version", "2"), R"(metadata "format_version" is "2", must be 1)");
    EXPECT_EQ(refusal_of_metadata("cache_format", "fp16"),
              R"(metadata "cache_format" is "fp16", must be fp8, fp8_mx, mxfp4 or mxfp4_rowgroup)");
}

TEST(CaseFile, RefusesAGeometryThatThePipelineWouldRefuse) {
    EXPECT_EQ(refusal_of_metadata("heads", "48"), R"(metadata "heads" is "48", must be 16, 32 or 64)");
    EXPECT_EQ(refusal_of_metadata("topk", "0"), "geometry: top_k is 0, must be 1 to 4096");
    EXPECT_EQ(refusal_of_metadata("topk", "4097"), "geometry: top_k is 4097, must be 1 to 4096");
    EXPECT_EQ(refusal_of_metadata("page_stride", "0"),
              R"(metadata "page_stride" is "0", must be the bytes from one page to the next)");
    EXPECT_EQ(refusal_of_metadata("dcp_rank", "1"), "geometry: dcp.rank is 1, must be 0 to world_size - 1 (0)");
    EXPECT_EQ(refusal_of_metadata("key_column", "33"),
              "geometry: key_column is 33, must be 0 to projected_columns - 128 (32)");
    EXPECT_EQ(refusal_of_metadata("weight_column", "127"),
              "geometry: weight_column is 127, must be outside the key's columns 0 to 127");
    EXPECT_EQ(refusal_of_metadata("max_model_len", "1025"),
              "geometry: max_model_len is 1025, must be 1 to dcp.world_size * 64 * block_table_columns (1024)");
    for (const char* value : {"nan", "inf", "-1"}) {
        EXPECT_NE(refusal_of_metadata("eps", value), "");
    }
}

// ---- damaged bytes
std::vector<uint8_t> bytes_of(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

/// Whether the bytes hold a case; nothing but CaseError may say that they do not.
bool loads(const std::vector<uint8_t>& bytes) {
    try {
        case_of(parse_safetensors(bytes));
        return true;
    } catch (const CaseError& error) {
        EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
        return false;
    }
}

TEST(CaseFile, LoadsOrIsRefusedWhateverBytesAreFlippedOrCutOff) {
    const std::vector<uint8_t> whole = bytes_of(case_path("mxfp4_decode"));
    const size_t header_end = 8 + whole[0] + size_t{whole[1]} * 256;
    std::mt19937 random(20240607);  // NOLINT: the same damage every time
    const auto below = [&random](size_t n) { return random() % n; };
    int refused = 0;
    for (int round = 0; round < 2000; ++round) {
        std::vector<uint8_t> bytes = whole;
        if (round % 8 == 0) {
            bytes.resize(below(round % 16 == 0 ? header_end : bytes.size()));
        }
        const size_t flips = bytes.empty() ? 0 : below(4) + (round % 8 == 0 ? 0 : 1);
        for (size_t i = 0; i < flips; ++i) {
            bytes[below(std::min(header_end, bytes.size()))] = static_cast<uint8_t>(random());
        }
        refused += loads(bytes) ? 0 : 1;
    }
    EXPECT_GT(refused, 1000);
    EXPECT_TRUE(loads(whole));
}

// ---- the command
TEST(Command, WritesTheResultsOfACase) {
    const TemporaryFile out("results.safetensors");
    const Ended plain = command("run " + case_path("fp8_padded_graph_rows") + " --device cpu --out " + out.path().string());
    EXPECT_EQ(plain.exit_code, 0) << plain.printed;
    Safetensors file = read_safetensors(out.path());
    const auto shape_of = [&file](const char* tensor) { return dtype_and_shape(file.tensors.at(tensor)); };
    EXPECT_EQ(file.tensors.size(), 6U);
    EXPECT_EQ(shape_of("starts"), "I32 [3]");
    EXPECT_EQ(shape_of("ends"), "I32 [8]");
    EXPECT_EQ(shape_of("head_weights"), "F32 [8, 32]");
    EXPECT_EQ(shape_of("cache"), "U8 [9, 8448]");
    EXPECT_EQ(shape_of("indices"), "I32 [8, 128]");
    EXPECT_EQ(shape_of("slots"), "I64 [8]");

    const Ended all = command("run " + case_path("fp8_padded_graph_rows") + " --logits --physical --device cpu --out " +
                              out.path().string());
    EXPECT_EQ(all.exit_code, 0) << all.printed;
    file = read_safetensors(out.path());
    EXPECT_EQ(file.tensors.size(), 8U);
    EXPECT_EQ(shape_of("logits"), "F32 [8, 320]");
    EXPECT_EQ(shape_of("physical_slots"), "I64 [8, 128]");
    const std::vector<int64_t> slots = elements_of<int64_t>(file.tensors.at("slots"));
    const std::vector<int32_t> starts = elements_of<int32_t>(file.tensors.at("starts"));
    ASSERT_LT(starts.back(), 8);
    EXPECT_EQ(slots[static_cast<size_t>(starts.back())], -1) << "a stale slot of a padding row";
}

TEST(Command, SaysWhatDataItSkipped) {
    Safetensors file = inputs_of("fp8_decode");
    file.tensors["slots"] = tensor_of<int64_t>({int64_t{1} << 40, 0, -1}, {3});
    const TemporaryFile damaged("skipped.safetensors");
    const TemporaryFile out("skipped.out");
    write_safetensors(damaged.path(), file);
    const Ended ended = command("run " + damaged.path().string() + " --device cpu --out " + out.path().string());
    EXPECT_EQ(ended.exit_code, 0);
    EXPECT_NE(ended.printed.find("wrong data was skipped: invalid_slots 1, invalid_blocks 0"), std::string::npos)
        << ended.printed;
}

TEST(Command, RefusesAWrongCaseWithCodeTwoAndLeavesNoOutput) {
    const TemporaryFile damaged("damaged.safetensors");
    const TemporaryFile out("damaged.out");
    const auto expect_refused = [&](const std::string& sentence) {
        const Ended ended = command("run " + damaged.path().string() + " --device cpu --out " + out.path().string());
        EXPECT_EQ(ended.exit_code, 2);
        EXPECT_EQ(ended.printed, "stepgraph: " + damaged.path().string() + ": " + sentence + "\n");
        EXPECT_FALSE(std::filesystem::exists(out.path()));
    };
    const auto write = [&](const std::vector<uint8_t>& bytes) {
        std::ofstream(damaged.path(), std::ios::binary)
            .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    };
    expect_refused("No such file or directory");

    Safetensors file = inputs_of("fp8_decode");
    file.tensors.erase("k_norm_bias");
    write_safetensors(damaged.path(), file);
    expect_refused(R"(tensor "k_norm_bias" is missing, must be F32 [columns of a head = 128])");

    file = inputs_of("fp8_decode");
    file.metadata["heads"] = "48";
    write_safetensors(damaged.path(), file);
    expect_refused(R"(metadata "heads" is "48", must be 16, 32 or 64)");

    std::vector<uint8_t> bytes = bytes_of(case_path("fp8_decode"));
    bytes.resize(bytes.size() - 1);
    write(bytes);
    expect_refused(R"(tensor "expected.slots": data_offsets is [446540,446564], must be [begin, end] with begin <= end <= )"
                   "446563, the bytes behind the header");

    bytes[7] = 0x7F;
    write(bytes);
    expect_refused("the header's length is 9151314442816849464, must be at most 448155");

    bytes.assign(64, '?');
    bytes[0] = 56;
    std::fill_n(bytes.begin() + 1, 7, uint8_t{0});
    write(bytes);
    expect_refused("the header does not begin with {, must be one JSON object");
}

TEST(Command, RefusesToReplaceTheCaseByItsResults) {
    const TemporaryFile file("own.safetensors");
    write_safetensors(file.path(), inputs_of("fp8_decode"));
    EXPECT_EQ(command("run " + file.path().string() + " --device cpu --out " + file.path().string()).exit_code, 2);
    EXPECT_NO_THROW(load_case(file.path()));
}

TEST(Command, FailsWithCodeOneWhereTheOutputCannotBeWritten) {
    const Ended ended = command("run " + case_path("fp8_decode") + " --device cpu --out /no/such/directory/out");
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_NE(ended.printed.find("/no/such/directory/out: cannot be written"), std::string::npos) << ended.printed;
}

TEST(Command, RefusesAWrongCommandLineWithCodeTwo) {
    for (const char* arguments :
         {"", "walk", "run", "run CASE", "run CASE --out OUT --device gpu", "run CASE --out OUT --fast",
          "run CASE --out OUT --graph --eager", "graph --layers 0", "graph --heads 48", "info --heads 48",
          "info --format fp16", "info --rows many", "info --tile-rows -1", "info --max-model-len -1"}) {
        const Ended ended = command(arguments);
        EXPECT_EQ(ended.exit_code, 2) << arguments << "\n" << ended.printed;
    }
    EXPECT_NE(command("").printed.find("A subcommand is required"), std::string::npos);
    EXPECT_NE(command("walk").printed.find("not expected: walk"), std::string::npos);
    EXPECT_NE(command("info --max-model-len -1").printed.find("--max-model-len: Value -1 not in range 1 to 2147483647"),
              std::string::npos);
    EXPECT_EQ(command("--help").exit_code, 0);
    EXPECT_EQ(command("run --help").exit_code, 0);
    EXPECT_EQ(command("--version").exit_code, 0);
}

TEST(Command, SaysWithoutAGpuWhatItIs) {
    const Ended ended = command("info");
    EXPECT_EQ(ended.exit_code, 0);
    for (const char* line : {"stepgraph:", "CUDA runtime:", "CUDA driver:", "compiled for:", "tile rows:", "workspace:"}) {
        EXPECT_NE(ended.printed.find(line), std::string::npos) << ended.printed;
    }
}

TEST(Command, FailsWithCodeOneAndOneSentenceWhereAGpuIsNeededAndThereIsNone) {
    // Hides every device, so that the test says the same on a machine that has one.
    const TemporaryFile out("none.out");
    for (const std::string& arguments :
         {"run " + case_path("fp8_decode") + " --device cuda --out " + out.path().string(), std::string("graph")}) {
        FILE* pipe = popen(("CUDA_VISIBLE_DEVICES= " STEPGRAPH_COMMAND " " + arguments + " 2>&1 >/dev/null").c_str(), "r");
        std::array<char, 4096> text{};
        const std::string printed(text.data(), fread(text.data(), 1, text.size(), pipe));
        EXPECT_EQ(WEXITSTATUS(pclose(pipe)), 1);
        EXPECT_NE(printed.find("needs an NVIDIA GPU, and none can be used ("), std::string::npos) << printed;
        EXPECT_EQ(std::count(printed.begin(), printed.end(), '\n'), 1) << printed;
    }
    EXPECT_FALSE(std::filesystem::exists(out.path()));
}

}  // namespace
}  // namespace stepgraph::test
