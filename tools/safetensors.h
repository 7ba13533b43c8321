// Safetensors files: an 8-byte little-endian header length, a JSON header, the tensors' bytes. A strict reader and a writer.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <cuda_bf16.h>

namespace stepgraph::tools {

/// A file that is damaged, incomplete or not a case. what() is one line that names the file and the tensor or metadata key,
/// what it was and what it must be.
class CaseError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

struct Tensor {
    std::string dtype;           // the format's word: "BF16", "F32", "I32", ...
    std::vector<int64_t> shape;  // none negative
    std::vector<uint8_t> bytes;  // row-major; product of the shape times the item's bytes
};

struct Safetensors {
    std::map<std::string, std::string> metadata;
    std::map<std::string, Tensor> tensors;
};

/// Checks everything before it is used: sizes, JSON, repeated keys, dtypes, shapes, and that the tensors cover the data
/// once, without overlap or gap. Throws CaseError (without the file's name).
Safetensors parse_safetensors(std::span<const uint8_t> file);

/// Reads and parses a regular file. Throws CaseError.
Safetensors read_safetensors(const std::filesystem::path& path);

/// Writes beside the target and renames, so that a failure leaves no file and an older one as it was. Throws
/// std::runtime_error.
void write_safetensors(const std::filesystem::path& path, const Safetensors& file);

/// A name or value of a file as it may stand in a message: quoted, escaped, on one line, not too long.
std::string quoted(const std::string& text);

/// "F32 [3, 160]"
std::string dtype_and_shape(const Tensor& tensor);

template <typename Element>
constexpr const char* dtype_of() {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
        return "BF16";
    } else if constexpr (std::is_same_v<Element, float>) {
        return "F32";
    } else if constexpr (std::is_same_v<Element, int32_t>) {
        return "I32";
    } else if constexpr (std::is_same_v<Element, int64_t>) {
        return "I64";
    } else {
        static_assert(std::is_same_v<Element, uint8_t>);
        return "U8";
    }
}

/// The tensor's elements; its dtype is dtype_of<Element>(). Copied, for nothing aligns them in a file.
template <typename Element>
std::vector<Element> elements_of(const Tensor& tensor) {
    std::vector<Element> elements(tensor.bytes.size() / sizeof(Element));
    if (!elements.empty()) {
        std::memcpy(elements.data(), tensor.bytes.data(), elements.size() * sizeof(Element));
    }
    return elements;
}

template <typename Element>
Tensor tensor_of(const std::vector<Element>& elements, std::vector<int64_t> shape) {
    Tensor tensor{dtype_of<Element>(), std::move(shape), std::vector<uint8_t>(elements.size() * sizeof(Element))};
    if (!elements.empty()) {
        std::memcpy(tensor.bytes.data(), elements.data(), tensor.bytes.size());
    }
    return tensor;
}

}  // namespace stepgraph::tools
