#include "case_file.h"

#include <charconv>
#include <iterator>
#include <limits>
#include <system_error>

#include <stepgraph/layouts/query_row.h>

namespace stepgraph::tools {
namespace {

struct NamedFormat {
    const char* name;
    CacheFormat format;
};
constexpr NamedFormat formats[] = {{"fp8", CacheFormat::fp8},
                                   {"fp8_mx", CacheFormat::fp8_mx},
                                   {"mxfp4", CacheFormat::mxfp4},
                                   {"mxfp4_rowgroup", CacheFormat::mxfp4_rowgroup}};

constexpr const char* format_words = "fp8, fp8_mx, mxfp4 or mxfp4_rowgroup";

class Metadata {
public:
    explicit Metadata(const Safetensors& file) : strings_(file.metadata) {}

    [[nodiscard]] const std::string& text(const char* key, const char* must) const {
        const auto found = strings_.find(key);
        if (found == strings_.end()) {
            throw CaseError("metadata " + quoted(key) + " is missing, must be " + must);
        }
        return found->second;
    }

    /// The whole string, as std::from_chars reads it: no spaces, no leading plus, nothing behind the number.
    template <typename Number>
    [[nodiscard]] Number number(const char* key, const char* must) const {
        const std::string& string = text(key, must);
        const char* const last = string.data() + string.size();
        Number value{};
        const auto [end, error] = std::from_chars(string.data(), last, value);
        if (error != std::errc{} || end != last) {
            refuse(key, must);
        }
        return value;
    }
    [[nodiscard]] int32_t whole(const char* key) const { return number<int32_t>(key, "a whole number of 32 bits"); }

    [[noreturn]] void refuse(const char* key, const char* must) const {
        throw CaseError("metadata " + quoted(key) + " is " + quoted(text(key, must)) + ", must be " + must);
    }

private:
    const std::map<std::string, std::string>& strings_;
};

/// A dimension that several tensors share: the first one that is taken fixes its value, unless it is known before.
struct Dimension {
    static constexpr int64_t unknown = -1;

    const char* name;
    int64_t value = unknown;

    [[nodiscard]] std::string text() const {
        return value == unknown ? name : std::string(name) + " = " + std::to_string(value);
    }
    [[nodiscard]] int as_int() const {
        if (value > std::numeric_limits<int32_t>::max()) {
            throw CaseError(std::string("the dimension ") + text() + " is more than 32 bits hold, must be below 2^31");
        }
        return static_cast<int>(value);
    }
};

class Tensors {
public:
    explicit Tensors(const Safetensors& file) : tensors_(file.tensors) {}

    [[nodiscard]] bool has(const char* name) const { return tensors_.contains(name); }

    template <typename Element, typename... Dimensions>
    std::vector<Element> take(const char* name, Dimensions&... dimensions) const {
        Dimension* const wanted[] = {&dimensions...};
        const std::string must = must_be(dtype_of<Element>(), wanted);
        const auto found = tensors_.find(name);
        if (found == tensors_.end()) {
            throw CaseError("tensor " + quoted(name) + " is missing, must be " + must);
        }
        const Tensor& tensor = found->second;
        bool fits = tensor.dtype == dtype_of<Element>() && tensor.shape.size() == std::size(wanted);
        for (size_t i = 0; fits && i < std::size(wanted); ++i) {
            fits = tensor.shape[i] >= 1 && (wanted[i]->value == Dimension::unknown || wanted[i]->value == tensor.shape[i]);
        }
        if (!fits) {
            throw CaseError("tensor " + quoted(name) + " is " + dtype_and_shape(tensor) + ", must be " + must);
        }
        for (size_t i = 0; i < std::size(wanted); ++i) {
            wanted[i]->value = tensor.shape[i];
        }
        return elements_of<Element>(tensor);
    }

private:
    static std::string must_be(const char* dtype, std::span<Dimension* const> wanted) {
        std::string text = std::string(dtype) + " [";
        bool open = false;
        for (const Dimension* dimension : wanted) {
            text += (dimension == wanted.front() ? "" : ", ") + dimension->text();
            open = open || dimension->value == Dimension::unknown;
        }
        return text + (open ? "], none 0" : "]");
    }

    const std::map<std::string, Tensor>& tensors_;
};

void take_projections(const Tensors& tensors, Dimension& rows, Case& out) {
    Dimension heads_columns{"heads * 128", int64_t{out.geometry.heads} * head_dim};
    Dimension columns{"projected columns"};
    const char* const inputs[] = {"q_c", "wq_b", "hidden", "w_kv"};
    const char* input = nullptr;
    for (const char* name : inputs) {
        input = input == nullptr && tensors.has(name) ? name : input;
    }
    const bool given = tensors.has("iq") || tensors.has("projected");
    if (given && input != nullptr) {
        throw CaseError("tensor " + quoted(input) + " is present, must be absent beside " +
                        (tensors.has("iq") ? "iq" : "projected") + ": a case holds the projections or their inputs");
    }
    if (!given && input == nullptr) {
        throw CaseError(
            R"(tensor "iq" is missing, must be present with "projected", or "q_c", "wq_b", "hidden" and "w_kv")");
    }
    if (given) {
        out.iq = tensors.take<__nv_bfloat16>("iq", rows, heads_columns);
        out.projected = tensors.take<__nv_bfloat16>("projected", rows, columns);
    } else {
        Dimension q_lora_rank{"q_lora"};
        Dimension hidden_size{"hidden"};
        out.q_c = tensors.take<__nv_bfloat16>("q_c", rows, q_lora_rank);
        out.wq_b = tensors.take<__nv_bfloat16>("wq_b", heads_columns, q_lora_rank);
        out.hidden = tensors.take<__nv_bfloat16>("hidden", rows, hidden_size);
        out.w_kv = tensors.take<__nv_bfloat16>("w_kv", columns, hidden_size);
        out.geometry.q_lora_rank = q_lora_rank.as_int();
        out.geometry.hidden_size = hidden_size.as_int();
    }
    out.geometry.max_rows = rows.as_int();
    out.geometry.projected_columns = columns.as_int();
}

void take_lengths(const Tensors& tensors, Case& out) {
    Dimension requests{"requests"};
    Dimension table_columns{"block table columns"};
    Dimension lengths{"at least requests"};
    out.query_lens = tensors.take<int32_t>("query_lens", requests);
    out.seq_lens = tensors.take<int32_t>("seq_lens", lengths);
    out.block_table = tensors.take<int32_t>("block_table", requests, table_columns);
    if (lengths.value < requests.value) {
        throw CaseError(R"(tensor "seq_lens" is I32 [)" + std::to_string(lengths.value) + "], must be I32 [at least " +
                        requests.text() + "]");
    }
    out.geometry.max_requests = requests.as_int();
    out.geometry.block_table_columns = table_columns.as_int();
}

Geometry geometry_of(const Metadata& metadata) {
    if (metadata.text("format_version", "1") != "1") {
        metadata.refuse("format_version", "1");
    }
    Geometry geometry;
    geometry.heads = metadata.whole("heads");
    if (!valid_heads(geometry.heads)) {  // before a tensor's shape is held against it
        metadata.refuse("heads", "16, 32 or 64");
    }
    const std::optional<CacheFormat> format = format_named(metadata.text("cache_format", format_words));
    if (!format.has_value()) {
        metadata.refuse("cache_format", format_words);
    }
    geometry.cache_format = *format;
    geometry.top_k = metadata.whole("topk");
    geometry.k_norm_eps = metadata.number<float>("eps", "a number that FP32 holds");
    geometry.max_model_len = metadata.number<int64_t>("max_model_len", "a whole number of 64 bits");
    geometry.page_stride_bytes = metadata.number<int64_t>("page_stride", "a whole number of 64 bits");
    if (geometry.page_stride_bytes == 0) {  // which the geometry would read as "the page's own bytes"
        metadata.refuse("page_stride", "the bytes from one page to the next");
    }
    geometry.key_column = metadata.whole("key_column");
    geometry.weight_column = metadata.whole("weight_column");
    geometry.dcp = {.world_size = metadata.whole("dcp_world_size"),
                    .rank = metadata.whole("dcp_rank"),
                    .interleave = metadata.whole("dcp_interleave")};
    return geometry;
}

}  // namespace

const char* format_name(CacheFormat format) {
    for (const NamedFormat& known : formats) {
        if (known.format == format) {
            return known.name;
        }
    }
    return "unknown";
}

std::optional<CacheFormat> format_named(const std::string& name) {
    for (const NamedFormat& known : formats) {
        if (name == known.name) {
            return known.format;
        }
    }
    return std::nullopt;
}

Case case_of(const Safetensors& file) {
    const Tensors tensors(file);
    Case out;
    out.geometry = geometry_of(Metadata(file));

    Dimension rows{"rows"};
    Dimension head_columns{"columns of a head", head_dim};
    Dimension pages{"pages"};
    Dimension page_stride{"page_stride", out.geometry.page_stride_bytes};
    take_projections(tensors, rows, out);
    take_lengths(tensors, out);
    out.k_norm_weight = tensors.take<float>("k_norm_weight", head_columns);
    out.k_norm_bias = tensors.take<float>("k_norm_bias", head_columns);
    if (tensors.has("slots")) {
        out.slots = tensors.take<int64_t>("slots", rows);
    }
    out.cache = tensors.take<uint8_t>("cache", pages, page_stride);
    out.geometry.pages = pages.value;
    try {
        out.geometry = validate(out.geometry);
    } catch (const Error& error) {
        throw CaseError(error.what());
    }
    return out;
}

Case load_case(const std::filesystem::path& path) {
    const Safetensors file = read_safetensors(path);
    try {
        return case_of(file);
    } catch (const CaseError& error) {
        throw CaseError(path.string() + ": " + error.what());
    }
}

}  // namespace stepgraph::tools
