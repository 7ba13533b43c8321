// The module stepgraph._core: what the Python files of the package are made on.
#include <cstdint>
#include <mutex>
#include <type_traits>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "numbers.h"
#include "steps.h"
#include "tensors.h"

namespace stepgraph::python {
namespace {

const char* code_word(ErrorCode code) {
    switch (code) {
    case ErrorCode::invalid_geometry:
        return "invalid_geometry";
    case ErrorCode::invalid_buffer:
        return "invalid_buffer";
    case ErrorCode::workspace_too_small:
        return "workspace_too_small";
    case ErrorCode::wrong_order:
        return "wrong_order";
    case ErrorCode::invalid_rows:
        return "invalid_rows";
    case ErrorCode::invalid_layer:
        return "invalid_layer";
    case ErrorCode::invalid_capture:
        return "invalid_capture";
    case ErrorCode::cuda:
        return "cuda";
    case ErrorCode::cublas:
        return "cublas";
    }
    return "unknown";
}

/// Raises stepgraph.Error for Error; passes other exceptions on.
void translate(const std::exception_ptr& thrown, void* /*none*/) {
    try {
        std::rethrow_exception(thrown);
    } catch (const Error& error) {
        const nb::object type = nb::module_::import_("stepgraph._error").attr("Error");
        PyErr_SetObject(type.ptr(), nb::make_tuple(code_word(error.code()), error.what()).ptr());
    }
}

/// The Python callback as Pipeline takes it. What it raises passes through as an exception.
Pipeline::AfterLayer callback_from(nb::handle after_layer) {
    if (after_layer.is_none()) {
        return nullptr;
    }
    return [after_layer](int layer, int rows, cudaStream_t stream) {
        const nb::gil_scoped_acquire held;
        after_layer(layer, rows, reinterpret_cast<uintptr_t>(stream));
    };
}

/// Steps as Python's threads may use them: calls follow each other, and the interpreter is free while one runs. A thread
/// that waits for its turn holds no interpreter, for the call before it may want it for a callback.
class Core {
public:
    Core(nb::handle geometry, Memory memory, bool programmatic_edges, bool portable_scorer, bool portable_select,
         nb::handle tile_rows)
        : memory_(memory) {
        const Options options{.programmatic_edges = programmatic_edges,
                              .portable_scorer = portable_scorer,
                              .portable_select = portable_select,
                              .tile_rows = whole_number(tile_rows, "tile_rows")};
        const Geometry numbers = geometry_from(geometry);
        steps_ = memory == Memory::host ? make_host_steps(numbers, options) : make_device_steps(numbers, options);
    }

    [[nodiscard]] nb::typed<nb::dict, nb::str, nb::any> geometry() const { return geometry_to_dict(steps_->geometry()); }
    [[nodiscard]] int tile_rows() const { return steps_->tile_rows(); }
    [[nodiscard]] size_t workspace_bytes() const { return steps_->workspace_bytes(); }
    [[nodiscard]] std::vector<int> buckets() {
        return in_turn([&] { return steps_->buckets(); });
    }

    void bind(nb::handle step, nb::handle layers, nb::handle workspace) {
        Buffers buffers = buffers_from(step, layers, workspace, steps_->geometry(), memory_);
        in_turn([&] {
            steps_->bind(buffers.step, buffers.layers, buffers.workspace);
            std::swap(tensors_, buffers.tensors);  // those of before go with `buffers`, the interpreter held again
        });
    }
    void capture(nb::handle buckets, nb::handle after_layer) {
        const std::vector<int> rows = whole_numbers(buckets, "buckets");
        const Pipeline::AfterLayer callback = callback_from(after_layer);
        in_turn([&] { steps_->capture(rows, callback); });
    }
    void replay(nb::handle rows, nb::handle stream, nb::handle after_layer) {
        const int row_count = whole_number(rows, "rows");
        const Pipeline::AfterLayer callback = callback_from(after_layer);
        in_turn([this, row_count, on = on(stream), &callback] { steps_->replay(row_count, on, callback); });
    }
    void enqueue_layout(nb::handle rows, nb::handle stream) {
        in_turn([this, row_count = whole_number(rows, "rows"), on = on(stream)] { steps_->enqueue_layout(row_count, on); });
    }
    void enqueue_layer(nb::handle layer, nb::handle rows, nb::handle stream) {
        in_turn([this, number = whole_number(layer, "layer"), row_count = whole_number(rows, "rows"), on = on(stream)] {
            steps_->enqueue_layer(number, row_count, on);
        });
    }
    std::tuple<uint32_t, uint32_t, uint32_t, uint32_t> status(nb::handle stream) {
        const StepStatus status = in_turn([this, on = on(stream)] { return steps_->read_status(on); });
        return {status.invalid_slots, status.invalid_blocks, status.clamped_bounds, status.dropped_rows};
    }
    void reset_status(nb::handle stream) {
        in_turn([this, on = on(stream)] { steps_->reset_status(on); });
    }

private:
    template <typename Call>
    std::invoke_result_t<Call> in_turn(Call call) {
        const nb::gil_scoped_release released;
        const std::lock_guard turn(turn_);
        return call();
    }
    [[nodiscard]] cudaStream_t on(nb::handle stream) const { return stream_from(stream, memory_ == Memory::device); }

    Memory memory_;
    std::unique_ptr<Steps> steps_;
    std::vector<nb::ndarray<nb::ro>> tensors_;
    std::recursive_mutex turn_;  // a callback may call what Pipeline allows there
};

}  // namespace
}  // namespace stepgraph::python

NB_MODULE(_core, m) {
    using namespace stepgraph;
    using namespace stepgraph::python;
    using namespace nb::literals;
    m.doc() = "Of the package itself: use stepgraph.";
    nb::register_exception_translator(translate);

    nb::enum_<CacheFormat>(m, "CacheFormat", "How a page of the key cache is laid out; stated, never inferred.")
        .value("fp8", CacheFormat::fp8, "E4M3 payload, an FP32 scale a token")
        .value("fp8_mx", CacheFormat::fp8_mx, "E4M3 payload, four equal UE8M0 bytes a token")
        .value("mxfp4", CacheFormat::mxfp4, "E2M1 payload token by token, a UE8M0 scale per 32 columns")
        .value("mxfp4_rowgroup", CacheFormat::mxfp4_rowgroup, "E2M1 payload by groups of 32 columns, their scales likewise");
    nb::enum_<Memory>(m, "Memory").value("host", Memory::host).value("device", Memory::device);

    m.def("geometry_defaults", [] { return geometry_to_dict(Geometry{}); });
    // What is None is refused by the functions themselves, by name.
    nb::class_<Core>(m, "Core")
        .def(nb::init<nb::handle, Memory, bool, bool, bool, nb::handle>(), "geometry"_a, "memory"_a, "programmatic_edges"_a,
             "portable_scorer"_a, "portable_select"_a, "tile_rows"_a.none())
        .def_prop_ro("geometry", &Core::geometry)
        .def_prop_ro("tile_rows", &Core::tile_rows)
        .def_prop_ro("workspace_bytes", &Core::workspace_bytes)
        .def_prop_ro("buckets", &Core::buckets)
        .def("bind", &Core::bind, "step"_a, "layers"_a, "workspace"_a.none())
        .def("capture", &Core::capture, "buckets"_a.none(), "after_layer"_a.none())
        .def("replay", &Core::replay, "rows"_a.none(), "stream"_a.none(), "after_layer"_a.none())
        .def("enqueue_layout", &Core::enqueue_layout, "rows"_a.none(), "stream"_a.none())
        .def("enqueue_layer", &Core::enqueue_layer, "layer"_a.none(), "rows"_a.none(), "stream"_a.none())
        .def("status", &Core::status, "stream"_a.none())
        .def("reset_status", &Core::reset_status, "stream"_a.none());
}
