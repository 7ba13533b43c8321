// The reader of safetensors files against everything that may be wrong with one.
#include <stepgraph/tools/safetensors.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "temporary_file.h"

namespace stepgraph::test {
namespace {

using namespace tools;

std::vector<uint8_t> file_of(const std::string& header, size_t data_bytes) {
    std::vector<uint8_t> file;
    for (size_t i = 0; i < 8; ++i) {
        file.push_back(static_cast<uint8_t>(header.size() >> (8 * i)));
    }
    file.insert(file.end(), header.begin(), header.end());
    for (size_t i = 0; i < data_bytes; ++i) {
        file.push_back(static_cast<uint8_t>(i));
    }
    return file;
}

/// The sentence that parsing ends with, or "".
std::string refusal(const std::vector<uint8_t>& file) {
    try {
        parse_safetensors(file);
    } catch (const CaseError& error) {
        return error.what();
    }
    return "";
}
std::string refusal(const std::string& header, size_t data_bytes) {
    return refusal(file_of(header, data_bytes));
}

/// A header of one tensor "x".
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"x":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

TEST(Safetensors, ReadsTensorsAndMetadata) {
    const Safetensors file = parse_safetensors(file_of(
        R"({"__metadata__":{"a":"1"},"y":{"dtype":"U8","shape":[],"data_offsets":[8,9]},)"
        R"("x":{"dtype":"I32","shape":[2,1],"data_offsets":[0,8]},"empty":{"dtype":"F32","shape":[0,3],"data_offsets":[8,8]}}  )",
        9));
    EXPECT_EQ(file.metadata.at("a"), "1");
    EXPECT_EQ(elements_of<int32_t>(file.tensors.at("x")), (std::vector<int32_t>{0x03020100, 0x07060504}));
    EXPECT_EQ(file.tensors.at("x").shape, (std::vector<int64_t>{2, 1}));
    EXPECT_EQ(elements_of<uint8_t>(file.tensors.at("y")), std::vector<uint8_t>{8});
    EXPECT_TRUE(file.tensors.at("empty").bytes.empty());
}

TEST(Safetensors, ReadsWhatItWrote) {
    Safetensors file;
    file.metadata["k"] = "v";
    file.tensors["bytes"] = tensor_of<uint8_t>({1, 2, 3}, {3});
    file.tensors["longs"] = tensor_of<int64_t>({-1, int64_t{1} << 40}, {2, 1});
    file.tensors["floats"] = tensor_of<float>({0.5F}, {});
    const TemporaryFile out("written.safetensors");
    write_safetensors(out.path(), file);
    const Safetensors back = read_safetensors(out.path());
    EXPECT_EQ(back.metadata, file.metadata);
    EXPECT_EQ(back.tensors.size(), 3U);
    EXPECT_EQ(elements_of<int64_t>(back.tensors.at("longs")), (std::vector<int64_t>{-1, int64_t{1} << 40}));
    EXPECT_EQ(dtype_and_shape(back.tensors.at("bytes")), "U8 [3]");
    EXPECT_EQ(dtype_and_shape(back.tensors.at("floats")), "F32 []");
}

TEST(Safetensors, RefusesAFileWithoutRoomForALength) {
    EXPECT_EQ(refusal(std::vector<uint8_t>(7)), "the file is 7 bytes, must be at least 8, the header's length");
    EXPECT_EQ(refusal(std::vector<uint8_t>()), "the file is 0 bytes, must be at least 8, the header's length");
}

TEST(Safetensors, RefusesAHeaderLongerThanTheFile) {
    std::vector<uint8_t> file = file_of("{}", 0);
    file[0] = 3;
    EXPECT_EQ(refusal(file), "the header's length is 3, must be at most 2");
    std::fill_n(file.begin(), 8, uint8_t{0xFF});
    EXPECT_EQ(refusal(file), "the header's length is 18446744073709551615, must be at most 2");
}

TEST(Safetensors, RefusesAHeaderThatIsNotOneJsonObject) {
    EXPECT_EQ(refusal("", 0), "the header does not begin with {, must be one JSON object");
    EXPECT_EQ(refusal("[]", 0), "the header does not begin with {, must be one JSON object");
    EXPECT_EQ(refusal("{", 0), "the header is not JSON at its byte 2, must be one JSON object");
    EXPECT_EQ(refusal("{}x", 0), "the header is not JSON at its byte 3, must be one JSON object");
    EXPECT_EQ(refusal("{\"\xFF\":1}", 0), "the header is not JSON at its byte 3, must be one JSON object");
    EXPECT_EQ(refusal(R"({"x":1e999})", 0), "the header is not JSON, must be one JSON object");
    const std::string deep = R"({"x":)" + std::string(100000, '[') + std::string(100000, ']') + "}";
    EXPECT_EQ(refusal(deep, 0), "the header is nested more than 3 levels deep, must be an object of tensors");
}

TEST(Safetensors, RefusesAKeyGivenTwice) {
    const std::string x = R"("x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
    EXPECT_EQ(refusal("{" + x + "," + x + "}", 1), R"(the header's key "x" is given twice, must be given once)");
    EXPECT_EQ(refusal(R"({"__metadata__":{"heads":"32","heads":"64"}})", 0),
              R"(the header's key "heads" is given twice, must be given once)");
    EXPECT_EQ(refusal(R"({"x":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1),
              R"(the header's key "dtype" is given twice, must be given once)");
}

TEST(Safetensors, RefusesMetadataThatAreNotStrings) {
    EXPECT_EQ(refusal(R"({"__metadata__":{"heads":32}})", 0), R"(metadata "heads" is 32, must be a string)");
    EXPECT_EQ(refusal(R"({"__metadata__":[]})", 0), "__metadata__ is [], must be an object of strings");
}

TEST(Safetensors, RefusesATensorThatLacksAPartOrHasAnother) {
    const char* const must = ", must be an object of dtype, shape and data_offsets";
    EXPECT_EQ(refusal(R"({"x":7})", 0), std::string(R"(tensor "x" is 7)") + must);
    EXPECT_EQ(refusal(R"({"x":{"dtype":"U8","shape":[1]}})", 1),
              std::string(R"(tensor "x" is {"dtype":"U8","shape":[1]})") + must);
    EXPECT_NE(refusal(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":0}})", 1), "");
}

TEST(Safetensors, RefusesAnUnknownDtype) {
    const char* const must = ", must be one of the format's, such as BF16, F32, I32, I64, U8";
    EXPECT_EQ(refusal(one(R"("F33")", "[1]", "[0,4]"), 4), std::string(R"(tensor "x": dtype is "F33")") + must);
    EXPECT_EQ(refusal(one("32", "[1]", "[0,4]"), 4), std::string(R"(tensor "x": dtype is 32)") + must);
}

TEST(Safetensors, RefusesAShapeThatNoTensorHas) {
    const std::string must = ", must be an array of whole numbers of at least 0, whose product fits 63 bits";
    for (const std::string shape : {"[-1]", "[1.5]", "[\"1\"]", "7", "{}", "[4294967296,4294967296]",
                                    "[9223372036854775808]", "[0,18446744073709551615]"}) {
        EXPECT_EQ(refusal(one(R"("U8")", shape, "[0,4]"), 4), R"(tensor "x": shape is )" + shape + must);
    }
}

TEST(Safetensors, RefusesOffsetsOutsideTheFile) {
    const std::string must = ", must be [begin, end] with begin <= end <= 4, the bytes behind the header";
    for (const std::string offsets :
         {"[0,5]", "[4,0]", "[-4,0]", "[0]", "[0,1,2]", "[0.0,4.0]", "[0,18446744073709551615]", "\"0,4\"", "null"}) {
        EXPECT_EQ(refusal(one(R"("U8")", "[4]", offsets), 4), R"(tensor "x": data_offsets is )" + offsets + must);
    }
}

TEST(Safetensors, RefusesALengthThatIsNotTheShapes) {
    EXPECT_EQ(refusal(one(R"("I32")", "[2]", "[0,4]"), 4),
              R"(tensor "x": data_offsets is 4 bytes apart, must be 8 apart for I32 [2])");
    EXPECT_EQ(refusal(one(R"("I64")", "[2305843009213693952]", "[0,4]"), 4),
              R"(tensor "x": data_offsets is 4 bytes apart, must be as far apart as I64 [2305843009213693952] takes, )"
              "which no file holds");
}

TEST(Safetensors, RefusesTensorsThatOverlapOrLeaveAGap) {
    const auto two = [](const char* a, const char* b) {
        return std::string(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)") + a +
               R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}";
    };
    EXPECT_EQ(refusal(two("[4,8]", "[0,4]"), 8), "");
    EXPECT_EQ(refusal(two("[0,4]", "[2,6]"), 8),
              R"(tensor "b": data_offsets is from 2 on, must be from 4 on, where tensor "a" ends)");
    EXPECT_EQ(refusal(two("[0,4]", "[0,4]"), 4),
              R"(tensor "b": data_offsets is from 0 on, must be from 4 on, where tensor "a" ends)");
    EXPECT_EQ(refusal(two("[1,5]", "[5,9]"), 9),
              R"(tensor "a": data_offsets is from 1 on, must be from 0 on, where the header ends)");
    EXPECT_EQ(refusal(two("[0,4]", "[4,8]"), 9), R"(the data is 9 bytes, must be 8 bytes, where tensor "b" ends)");
}

TEST(Safetensors, KeepsAMessageOnOneShortLineWhateverTheNames) {
    const std::string name(1000, 'n');
    const std::string sentence = refusal(R"({"a\nb)" + name + R"(":7})", 0);
    EXPECT_EQ(sentence.find('\n'), std::string::npos);
    EXPECT_LT(sentence.size(), 300U);
}

TEST(Safetensors, NamesTheFileThatCannotBeRead) {
    const auto refusal_of_path = [](const std::string& path) {
        try {
            read_safetensors(path);
        } catch (const CaseError& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    EXPECT_EQ(refusal_of_path("/no/such/file"), "/no/such/file: No such file or directory");
    EXPECT_EQ(refusal_of_path("/"), "/: is not a regular file");
    EXPECT_EQ(refusal_of_path("/dev/null"), "/dev/null: is not a regular file");
}

TEST(Safetensors, LeavesNothingWhereItCannotWrite) {
    EXPECT_THROW(write_safetensors("/no/such/directory/out", {}), std::runtime_error);
    EXPECT_THROW(write_safetensors("/dev/null", {}), std::runtime_error);
    EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));

    const TemporaryFile directory("directory");
    std::filesystem::create_directory(directory.path());
    EXPECT_THROW(write_safetensors(directory.path(), {}), std::runtime_error);
    EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(Safetensors, ReplacesAnOlderFileAndLeavesNoOther) {
    const TemporaryFile directory("replacing");
    std::filesystem::create_directory(directory.path());
    const std::filesystem::path out = directory.path() / "out";
    std::ofstream(out) << "older";
    write_safetensors(out, {});
    EXPECT_TRUE(read_safetensors(out).tensors.empty());
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), std::filesystem::directory_iterator()),
              1);
    std::filesystem::remove(out);
}

}  // namespace
}  // namespace stepgraph::test
