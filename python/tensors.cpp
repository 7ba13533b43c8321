#include "tensors.h"

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>

#include "numbers.h"

namespace stepgraph::python {
namespace {

using Tensor = nb::ndarray<nb::ro>;
using Extents = std::vector<int64_t>;

std::string text_of(const Extents& extents) {
    std::string text = "[";
    for (const int64_t extent : extents) {
        text += (text.size() == 1 ? "" : ", ") + std::to_string(extent);
    }
    return text + "]";
}

std::string text_of(nb::dlpack::dtype dtype) {
    using Code = nb::dlpack::dtype_code;
    const auto word = [&] {
        switch (static_cast<Code>(dtype.code)) {
        case Code::Int:
            return "int";
        case Code::UInt:
            return "uint";
        case Code::Float:
            return "float";
        case Code::Bfloat:
            return "bfloat";
        case Code::Bool:
            return "bool";
        case Code::Complex:
            return "complex";
        default:
            return "a dtype of bits ";
        }
    }();
    return word + std::to_string(dtype.bits);
}

template <typename Element>
constexpr const char* dtype_word() {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
        return "bfloat16 (or its bits as uint16)";
    } else if constexpr (std::is_same_v<Element, float>) {
        return "float32";
    } else if constexpr (std::is_same_v<Element, int32_t>) {
        return "int32";
    } else if constexpr (std::is_same_v<Element, int64_t>) {
        return "int64";
    } else {
        static_assert(std::is_same_v<Element, uint8_t>);
        return "uint8";
    }
}

template <typename Element>
bool holds(nb::dlpack::dtype dtype) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
        // NumPy has no bfloat16: there the bits are handed over.
        return dtype == nb::dlpack::dtype{static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1} ||
               dtype == nb::dtype<uint16_t>();
    } else {
        return dtype == nb::dtype<Element>();
    }
}

bool lies_in(Memory memory, int device_type) {
    const bool both = device_type == nb::device::cuda_host::value || device_type == nb::device::cuda_managed::value;
    return both || device_type == (memory == Memory::host ? nb::device::cpu::value : nb::device::cuda::value);
}

std::string device_word(int device_type) {
    switch (device_type) {
    case nb::device::cpu::value:
        return "host memory";
    case nb::device::cuda::value:
        return "CUDA memory";
    default:
        return "memory of DLPack's device type " + std::to_string(device_type);
    }
}

/// Strides in elements of rows that lie one behind the other.
Extents contiguous(const Extents& shape) {
    Extents strides(shape.size(), 1);
    for (size_t i = shape.size(); i-- > 1;) {
        strides[i - 1] = strides[i] * shape[i];
    }
    return strides;
}

/// A tensor that may be read alone, or written too. Throws TypeError that says why it is none.
template <typename... Rights>
nb::ndarray<Rights...> imported(nb::handle value, const std::string& name) {
    nb::ndarray<Rights...> tensor;
    if (nb::try_cast(value, tensor)) {
        return tensor;
    }
    const std::string must =
        sizeof...(Rights) == 0 ? "a tensor that exports DLPack and may be written" : "a tensor that exports DLPack";
    std::string why;
    if (nb::hasattr(value, "__dlpack__")) {
        try {
            const nb::object capsule = value.attr("__dlpack__")(nb::arg("max_version") = nb::make_tuple(1, 0));
        } catch (const nb::python_error& error) {  // the array library's own words
            why = std::string(" (") + nb::str(error.value()).c_str() + ")";
        }
    }
    throw nb::type_error((name + " is a " + nb::inst_name(value).c_str() + why + ", must be " + must).c_str());
}

/// Takes tensors, or the attributes of one object of them, and keeps what it took.
class Taker {
public:
    Taker(nb::handle owner, std::string prefix, Memory memory, std::vector<Tensor>& kept)
        : owner_(owner), prefix_(std::move(prefix)), memory_(memory), kept_(kept) {}

    /// Null for None.
    template <typename Element, typename... Rights>
    const Element* take(nb::handle value, const std::string& name, const Extents& shape, const Extents& strides) {
        if (value.is_none()) {
            return nullptr;
        }
        const auto tensor = imported<Rights...>(value, prefix_ + name);
        check<Element>(Tensor(tensor), prefix_ + name, shape, strides);
        kept_.emplace_back(tensor);
        return static_cast<const Element*>(kept_.back().data());
    }

    template <typename Element>
    const Element* input(const char* name, const Extents& shape, const Extents& strides = {}) {
        const nb::object value = owner_.attr(name);
        return take<Element, nb::ro>(value, name, shape, strides.empty() ? contiguous(shape) : strides);
    }
    template <typename Element>
    Element* output(const char* name, const Extents& shape) {
        const nb::object value = owner_.attr(name);
        return const_cast<Element*>(take<Element>(value, name, shape, contiguous(shape)));
    }
    /// An input of products that this pipeline does not make must not be there.
    void none(const char* name, const char* must) {
        const nb::object value = owner_.attr(name);
        if (!value.is_none()) {
            throw nb::value_error((prefix_ + name + " is a " + nb::inst_name(value).c_str() + ", must be " + must).c_str());
        }
    }
    /// Pages of at least `own` bytes, `stride` bytes apart: a whole cache, or the index section of an engine's merged pages.
    uint8_t* pages(const char* name, int64_t pages, int64_t own, int64_t stride) {
        const nb::object value = owner_.attr(name);
        Extents shape = {pages, stride};
        if (!value.is_none()) {
            const auto tensor = imported(value, prefix_ + name);
            if (tensor.ndim() == 2 && static_cast<int64_t>(tensor.shape(1)) >= own &&
                static_cast<int64_t>(tensor.shape(1)) < stride) {
                shape[1] = static_cast<int64_t>(tensor.shape(1));
            }
        }
        return const_cast<uint8_t*>(take<uint8_t>(value, name, shape, {stride, 1}));
    }

private:
    template <typename Element>
    void check(const Tensor& tensor, const std::string& name, const Extents& shape, const Extents& strides) const {
        Extents given_shape;
        Extents given_strides;
        bool apart = true;
        for (size_t i = 0; i < tensor.ndim(); ++i) {
            given_shape.push_back(static_cast<int64_t>(tensor.shape(i)));
            given_strides.push_back(tensor.stride(i));
            apart = apart && (given_shape[i] <= 1 || (i < strides.size() && given_strides[i] == strides[i]));
        }
        const std::string must = std::string(", must be ") + dtype_word<Element>() + " " + text_of(shape);
        if (!holds<Element>(tensor.dtype())) {
            throw nb::type_error((name + " is " + text_of(tensor.dtype()) + " " + text_of(given_shape) + must).c_str());
        }
        if (given_shape != shape) {
            throw nb::value_error((name + " is " + text_of(tensor.dtype()) + " " + text_of(given_shape) + must).c_str());
        }
        if (!apart) {
            throw nb::value_error((name + " has strides of " + text_of(given_strides) + " elements, must have " +
                                   text_of(strides) + (strides == contiguous(shape) ? ": contiguous" : ""))
                                      .c_str());
        }
        if (!lies_in(memory_, tensor.device_type())) {
            throw nb::value_error((name + " is in " + device_word(tensor.device_type()) + ", must be in " +
                                   device_word(memory_ == Memory::host ? nb::device::cpu::value : nb::device::cuda::value) +
                                   ", the pipeline's")
                                      .c_str());
        }
    }

    nb::handle owner_;
    std::string prefix_;
    Memory memory_;
    std::vector<Tensor>& kept_;
};

StepBuffers step_buffers(Taker take, const Geometry& g) {
    return {.seq_lens = take.input<int32_t>("seq_lens", {g.max_requests}),
            .query_lens = take.input<int32_t>("query_lens", {g.max_requests}),
            .num_requests = take.input<int32_t>("num_requests", {1}),
            .block_table =
                take.input<int32_t>("block_table", {g.max_requests, g.block_table_columns}, {g.block_table_stride, 1}),
            .slots = take.input<int64_t>("slots", {g.max_rows})};
}

LayerBuffers layer_buffers(Taker take, const Geometry& g) {
    const int64_t query_columns = int64_t{g.heads} * head_dim;
    if (!g.projects()) {
        for (const char* name : {"q_c", "hidden", "wq_b", "w_kv"}) {
            take.none(name, "None, for the geometry's q_lora_rank and hidden_size are 0");
        }
    }
    return {.q_c = take.input<__nv_bfloat16>("q_c", {g.max_rows, g.q_lora_rank}),
            .hidden = take.input<__nv_bfloat16>("hidden", {g.max_rows, g.hidden_size}),
            .wq_b = take.input<__nv_bfloat16>("wq_b", {query_columns, g.q_lora_rank}),
            .w_kv = take.input<__nv_bfloat16>("w_kv", {g.projected_columns, g.hidden_size}),
            .iq = take.input<__nv_bfloat16>("iq", {g.max_rows, query_columns}),
            .projected = take.input<__nv_bfloat16>("projected", {g.max_rows, g.projected_columns}),
            .k_norm_weight = take.input<float>("k_norm_weight", {head_dim}),
            .k_norm_bias = take.input<float>("k_norm_bias", {head_dim}),
            .cache = take.pages("cache", g.pages, page_bytes(g.cache_format), g.page_stride_bytes),
            .indices = take.output<int32_t>("indices", {g.max_rows, g.top_k}),
            .counts = take.output<int32_t>("counts", {g.max_rows}),
            .physical_slots = take.output<int64_t>("physical_slots", {g.max_rows, g.top_k}),
            .winner_logits = take.output<float>("winner_logits", {g.max_rows, g.top_k}),
            .logits = take.output<float>("logits", {g.max_rows, g.width()})};
}

/// One-dimensional bytes, as many as they are: bind says how many it wants.
Workspace workspace_from(nb::handle value, Memory memory, std::vector<Tensor>& kept) {
    if (value.is_none()) {
        return {};
    }
    const auto size = static_cast<int64_t>(imported(value, "workspace").size());
    const uint8_t* const bytes = Taker({}, "", memory, kept).take<uint8_t>(value, "workspace", {size}, {1});
    return {const_cast<uint8_t*>(bytes), static_cast<size_t>(size)};
}

}  // namespace

Buffers buffers_from(nb::handle step, nb::handle layers, nb::handle workspace, const Geometry& geometry, Memory memory) {
    Buffers buffers;
    buffers.step = step_buffers(Taker(step, "step buffers: ", memory, buffers.tensors), geometry);
    for (const nb::handle layer : layers) {
        const std::string prefix = "layer " + std::to_string(buffers.layers.size()) + ": ";
        buffers.layers.push_back(layer_buffers(Taker(layer, prefix, memory, buffers.tensors), geometry));
    }
    buffers.workspace = workspace_from(workspace, memory, buffers.tensors);
    return buffers;
}

}  // namespace stepgraph::python
