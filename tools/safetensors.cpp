#include "safetensors.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <set>
#include <system_error>

#include <unistd.h>
#include <nlohmann/json.hpp>

namespace stepgraph::tools {
namespace {

using nlohmann::json;

constexpr size_t length_bytes = 8;
constexpr size_t most_header_bytes = 100'000'000;  // the format's own limit
constexpr int deepest_level = 3;                   // header, tensor, its shape: nothing of the format nests further

struct Dtype {
    const char* name;
    int64_t bytes;
};
constexpr Dtype dtypes[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1},
                            {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
                            {"U32", 4},  {"F32", 4}, {"F64", 8}, {"I64", 8},     {"U64", 8}};

/// 0 where the format has no such dtype.
int64_t item_bytes(const std::string& dtype) {
    for (const Dtype& known : dtypes) {
        if (dtype == known.name) {
            return known.bytes;
        }
    }
    return 0;
}

std::string shown(const json& value) {
    constexpr size_t longest = 80;
    const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    return text.size() <= longest ? text : text.substr(0, longest) + "...";
}

[[noreturn]] void refuse(const std::string& what, const std::string& was, const std::string& must) {
    throw CaseError(what + " is " + was + ", must be " + must);
}

/// Parses JSON and refuses what the parser would pass over: a key given twice, of which it keeps the last.
json parse_header(std::span<const uint8_t> text) {
    std::vector<std::set<std::string>> keys;
    const auto check = [&keys](int depth, json::parse_event_t event, json& value) {
        if (depth > deepest_level) {
            refuse("the header", "nested more than " + std::to_string(deepest_level) + " levels deep",
                   "an object of tensors");
        }
        if (event == json::parse_event_t::object_start) {
            keys.emplace_back();
        } else if (event == json::parse_event_t::object_end) {
            keys.pop_back();
        } else if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
            throw CaseError("the header's key " + shown(value) + " is given twice, must be given once");
        }
        return true;
    };
    if (text.empty() || text.front() != '{') {
        throw CaseError("the header does not begin with {, must be one JSON object");
    }
    try {
        return json::parse(text.begin(), text.end(), check);
    } catch (const json::exception& error) {
        const auto* at = dynamic_cast<const json::parse_error*>(&error);
        throw CaseError("the header is not JSON" + (at != nullptr ? " at its byte " + std::to_string(at->byte) : "") +
                        ", must be one JSON object");
    }
}

std::map<std::string, std::string> parse_metadata(const json& metadata) {
    if (!metadata.is_object()) {
        refuse("__metadata__", shown(metadata), "an object of strings");
    }
    std::map<std::string, std::string> strings;
    for (const auto& [key, value] : metadata.items()) {
        if (!value.is_string()) {
            refuse("metadata " + quoted(key), shown(value), "a string");
        }
        strings[key] = value.get<std::string>();
    }
    return strings;
}

std::vector<int64_t> parse_shape(const std::string& what, const json& shape) {
    const char* const must = "an array of whole numbers of at least 0, whose product fits 63 bits";
    if (!shape.is_array()) {
        refuse(what, shown(shape), must);
    }
    std::vector<int64_t> dimensions;
    int64_t product = 1;
    for (const json& dimension : shape) {
        // Parsed as unsigned, so what a signed 64-bit number cannot hold would turn negative.
        const bool whole = dimension.is_number_unsigned() && dimension.get<uint64_t>() <= uint64_t{INT64_MAX};
        if (!whole || __builtin_mul_overflow(product, dimension.get<int64_t>(), &product)) {
            refuse(what, shown(shape), must);
        }
        dimensions.push_back(dimension.get<int64_t>());
    }
    return dimensions;
}

struct Range {
    size_t begin;
    size_t end;
    std::string tensor;
};

Range parse_range(const std::string& name, const json& offsets, size_t data_bytes) {
    const bool pair =
        offsets.is_array() && offsets.size() == 2 && offsets[0].is_number_unsigned() && offsets[1].is_number_unsigned();
    if (!pair || offsets[0].get<uint64_t>() > offsets[1].get<uint64_t>() || offsets[1].get<uint64_t>() > data_bytes) {
        refuse("tensor " + quoted(name) + ": data_offsets", shown(offsets),
               "[begin, end] with begin <= end <= " + std::to_string(data_bytes) + ", the bytes behind the header");
    }
    return {offsets[0].get<size_t>(), offsets[1].get<size_t>(), name};
}

/// Everything of one tensor but its bytes.
Tensor parse_tensor(const std::string& name, const json& entry) {
    const std::string what = "tensor " + quoted(name);
    if (!entry.is_object() || entry.size() != 3 || !entry.contains("dtype") || !entry.contains("shape") ||
        !entry.contains("data_offsets")) {
        refuse(what, shown(entry), "an object of dtype, shape and data_offsets");
    }
    const json& dtype = entry["dtype"];
    if (!dtype.is_string() || item_bytes(dtype.get<std::string>()) == 0) {
        refuse(what + ": dtype", shown(dtype), "one of the format's, such as BF16, F32, I32, I64, U8");
    }
    return {dtype.get<std::string>(), parse_shape(what + ": shape", entry["shape"]), {}};
}

void check_length(const Tensor& tensor, const Range& range) {
    int64_t bytes = item_bytes(tensor.dtype);
    bool fits = true;
    for (const int64_t dimension : tensor.shape) {
        fits = fits && !__builtin_mul_overflow(bytes, dimension, &bytes);
    }
    if (!fits || static_cast<size_t>(bytes) != range.end - range.begin) {
        refuse("tensor " + quoted(range.tensor) + ": data_offsets", std::to_string(range.end - range.begin) + " bytes apart",
               fits ? std::to_string(bytes) + " apart for " + dtype_and_shape(tensor)
                    : "as far apart as " + dtype_and_shape(tensor) + " takes, which no file holds");
    }
}

/// The format wants every byte behind the header to belong to exactly one tensor.
void check_cover(std::vector<Range> ranges, size_t data_bytes) {
    std::sort(ranges.begin(), ranges.end(),
              [](const Range& a, const Range& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
    size_t covered = 0;
    std::string before = "the header";
    for (const Range& range : ranges) {
        if (range.begin != covered) {
            refuse("tensor " + quoted(range.tensor) + ": data_offsets", "from " + std::to_string(range.begin) + " on",
                   "from " + std::to_string(covered) + " on, where " + before + " ends");
        }
        covered = range.end;
        before = "tensor " + quoted(range.tensor);
    }
    if (covered != data_bytes) {
        refuse("the data", std::to_string(data_bytes) + " bytes",
               std::to_string(covered) + " bytes, where " + before + " ends");
    }
}

std::string header_of(const Safetensors& file, const std::vector<std::string>& order) {
    json header = json::object();
    if (!file.metadata.empty()) {
        header["__metadata__"] = file.metadata;
    }
    size_t at = 0;
    for (const std::string& name : order) {
        const Tensor& tensor = file.tensors.at(name);
        header[name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {at, at + tensor.bytes.size()}}};
        at += tensor.bytes.size();
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // the data begins at a multiple of 8
    return text;
}

/// Largest items first: each tensor is then aligned to its own.
std::vector<std::string> aligned_order(const Safetensors& file) {
    std::vector<std::string> order;
    for (const auto& [name, tensor] : file.tensors) {
        order.push_back(name);
    }
    std::stable_sort(order.begin(), order.end(), [&file](const std::string& a, const std::string& b) {
        return item_bytes(file.tensors.at(a).dtype) > item_bytes(file.tensors.at(b).dtype);
    });
    return order;
}

bool write_bytes(const std::filesystem::path& path, const Safetensors& file) {
    const std::vector<std::string> order = aligned_order(file);
    const std::string header = header_of(file, order);
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    for (size_t i = 0; i < length_bytes; ++i) {
        out.put(static_cast<char>(header.size() >> (8 * i) & 0xFFU));
    }
    out << header;
    for (const std::string& name : order) {
        const std::vector<uint8_t>& bytes = file.tensors.at(name).bytes;
        out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    }
    out.close();
    return out.good();
}

}  // namespace

std::string quoted(const std::string& text) {
    return shown(json(text));
}

std::string dtype_and_shape(const Tensor& tensor) {
    std::string text = tensor.dtype + " [";
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(tensor.shape[i]);
    }
    return text + "]";
}

Safetensors parse_safetensors(std::span<const uint8_t> file) {
    if (file.size() < length_bytes) {
        refuse("the file", std::to_string(file.size()) + " bytes", "at least 8, the header's length");
    }
    uint64_t header_bytes = 0;
    for (size_t i = 0; i < length_bytes; ++i) {
        header_bytes |= static_cast<uint64_t>(file[i]) << (8 * i);
    }
    const size_t behind = file.size() - length_bytes;
    if (header_bytes > std::min(behind, most_header_bytes)) {
        refuse("the header's length", std::to_string(header_bytes),
               "at most " + std::to_string(std::min(behind, most_header_bytes)));
    }
    const json header = parse_header(file.subspan(length_bytes, header_bytes));
    const std::span<const uint8_t> data = file.subspan(length_bytes + header_bytes);

    Safetensors parsed;
    std::vector<Range> ranges;
    for (const auto& [name, entry] : header.items()) {
        if (name == "__metadata__") {
            parsed.metadata = parse_metadata(entry);
            continue;
        }
        Tensor& tensor = parsed.tensors[name] = parse_tensor(name, entry);
        ranges.push_back(parse_range(name, entry["data_offsets"], data.size()));
        check_length(tensor, ranges.back());
    }
    check_cover(ranges, data.size());
    // Copied only now, so that ranges that overlap a thousand times cost no memory.
    for (const Range& range : ranges) {
        const auto bytes = data.subspan(range.begin, range.end - range.begin);
        parsed.tensors[range.tensor].bytes.assign(bytes.begin(), bytes.end());
    }
    return parsed;
}

Safetensors read_safetensors(const std::filesystem::path& path) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) {
        throw CaseError(path.string() + ": " + (error ? error.message() : "is not a regular file"));
    }
    std::ifstream in(path, std::ios::binary);
    std::vector<uint8_t> bytes(std::filesystem::file_size(path, error));
    in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    if (error || !in) {
        throw CaseError(path.string() + ": cannot be read");
    }
    try {
        return parse_safetensors(bytes);
    } catch (const CaseError& damage) {
        throw CaseError(path.string() + ": " + damage.what());
    }
}

void write_safetensors(const std::filesystem::path& path, const Safetensors& file) {
    std::error_code error;
    // A rename would put a file in the place of a device or a pipe.
    if (std::filesystem::exists(path, error) && !std::filesystem::is_regular_file(path, error)) {
        throw std::runtime_error(path.string() + ": is not a regular file, must be one or not exist yet");
    }
    std::filesystem::path partial = path;
    partial += ".partial." + std::to_string(getpid());
    const bool written = write_bytes(partial, file);
    const int write_errno = errno;
    if (written) {
        std::filesystem::rename(partial, path, error);
    }
    if (!written || error) {
        std::error_code ignored;
        std::filesystem::remove(partial, ignored);
        throw std::runtime_error(path.string() + ": cannot be written: " +
                                 (written ? error : std::error_code(write_errno, std::generic_category())).message());
    }
}

}  // namespace stepgraph::tools
