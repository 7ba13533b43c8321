#include "numbers.h"

#include <cstdint>
#include <limits>

namespace stepgraph::python {
namespace {

int64_t whole_number_between(nb::handle value, const std::string& name, int64_t least, int64_t most, const char* bits) {
    const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
    if (!index.is_valid()) {
        PyErr_Clear();
        throw nb::type_error((name + " is " + repr_of(value) + ", must be a whole number").c_str());
    }
    int overflow = 0;
    const int64_t number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow != 0 || number < least || number > most) {
        throw nb::value_error((name + " is " + repr_of(value) + ", must be a whole number of " + bits + " bits").c_str());
    }
    return number;
}

template <typename Whole>
Whole read(nb::handle value, const std::string& name, Whole /*of that type*/) {
    return static_cast<Whole>(whole_number_between(value, name, std::numeric_limits<Whole>::min(),
                                                   std::numeric_limits<Whole>::max(), sizeof(Whole) == 4 ? "32" : "64"));
}

float read(nb::handle value, const std::string& name, float /*of that type*/) {
    const double number = PyFloat_AsDouble(value.ptr());
    if (PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        throw nb::type_error((name + " is " + repr_of(value) + ", must be a number").c_str());
    }
    return static_cast<float>(number);
}

CacheFormat read(nb::handle value, const std::string& name, CacheFormat /*of that type*/) {
    CacheFormat format{};
    if (!nb::try_cast(value, format, false)) {
        throw nb::type_error((name + " is " + repr_of(value) + ", must be a stepgraph.CacheFormat").c_str());
    }
    return format;
}

/// Calls `visit` with the Python name and the member of every number.
template <typename AnyGeometry, typename Visit>
void for_each_number(AnyGeometry& g, Visit visit) {
    visit("heads", g.heads);
    visit("top_k", g.top_k);
    visit("max_rows", g.max_rows);
    visit("max_requests", g.max_requests);
    visit("max_model_len", g.max_model_len);
    visit("block_table_columns", g.block_table_columns);
    visit("block_table_stride", g.block_table_stride);
    visit("cache_format", g.cache_format);
    visit("pages", g.pages);
    visit("page_stride_bytes", g.page_stride_bytes);
    visit("q_lora_rank", g.q_lora_rank);
    visit("hidden_size", g.hidden_size);
    visit("projected_columns", g.projected_columns);
    visit("key_column", g.key_column);
    visit("weight_column", g.weight_column);
    visit("k_norm_eps", g.k_norm_eps);
    visit("dcp_world_size", g.dcp.world_size);
    visit("dcp_rank", g.dcp.rank);
    visit("dcp_interleave", g.dcp.interleave);
}

/// The stream's own or its attribute, not checked; empty where the object lacks it.
nb::object stream_address(nb::handle stream) {
    if (PyLong_Check(stream.ptr())) {
        return nb::borrow(stream);
    }
    if (nb::hasattr(stream, "__cuda_stream__")) {
        const nb::object version_and_address = stream.attr("__cuda_stream__")();
        const bool both = PyTuple_Check(version_and_address.ptr()) && nb::len(version_and_address) == 2;
        return both ? nb::object(version_and_address[1]) : nb::object();
    }
    for (const char* name : {"cuda_stream", "ptr"}) {
        if (nb::hasattr(stream, name)) {
            return stream.attr(name);
        }
    }
    return {};
}

}  // namespace

std::string repr_of(nb::handle value) {
    constexpr size_t longest = 60;
    const std::string text = nb::repr(value).c_str();
    return text.size() <= longest ? text : text.substr(0, longest) + "...";
}

int whole_number(nb::handle value, const std::string& name) {
    return read(value, name, int{});
}

std::vector<int> whole_numbers(nb::handle values, const char* name) {
    const nb::object list = nb::steal(PySequence_List(values.ptr()));
    if (!list.is_valid()) {
        PyErr_Clear();
        throw nb::type_error((std::string(name) + " is " + repr_of(values) + ", must hold whole numbers").c_str());
    }
    std::vector<int> numbers;
    for (const nb::handle value : nb::borrow<nb::list>(list)) {
        numbers.push_back(whole_number(value, std::string(name) + "[" + std::to_string(numbers.size()) + "]"));
    }
    return numbers;
}

Geometry geometry_from(nb::handle numbers) {
    Geometry geometry;
    for_each_number(geometry, [&](const char* name, auto& number) {
        number = read(numbers.attr(name), std::string("geometry: ") + name, number);
    });
    return geometry;
}

nb::typed<nb::dict, nb::str, nb::any> geometry_to_dict(const Geometry& geometry) {
    nb::typed<nb::dict, nb::str, nb::any> numbers;
    for_each_number(geometry, [&](const char* name, const auto& number) { numbers[name] = number; });
    return numbers;
}

cudaStream_t stream_from(nb::handle stream, bool required) {
    if (stream.is_none() && !required) {
        return nullptr;
    }
    const nb::object address = stream_address(stream);
    const bool whole = address.is_valid() && PyLong_Check(address.ptr()) && !PyBool_Check(address.ptr());
    const uintptr_t value = whole ? PyLong_AsSize_t(address.ptr()) : 0;
    if (!whole || PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        throw nb::type_error(("stream is " + repr_of(stream) +
                              ", must be a CUDA stream: its address as an integer, or an object with .cuda_stream")
                                 .c_str());
    }
    return reinterpret_cast<cudaStream_t>(value);
}

}  // namespace stepgraph::python
