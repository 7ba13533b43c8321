// The C functions: each calls the one of Pipeline that its name tells, and turns what that throws into a result.
#include "stepgraph.h"

#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "pipeline.h"

namespace stepgraph {
namespace {

/// Of an argument that only the C interface has.
class InvalidArgument : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};
class CallbackFailed : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// The sentence of this thread's last call, cut where it is longer. No destructor ends it: a caller may come from one of its
/// own.
thread_local char last_message[1024] = "";

stepgraph_result fail(stepgraph_result result, const char* sentence) noexcept {
    std::snprintf(last_message, sizeof last_message, "%s", sentence);
    return result;
}

stepgraph_result result_of(ErrorCode code) {
    switch (code) {
    case ErrorCode::invalid_geometry:
        return STEPGRAPH_INVALID_GEOMETRY;
    case ErrorCode::invalid_buffer:
        return STEPGRAPH_INVALID_BUFFER;
    case ErrorCode::workspace_too_small:
        return STEPGRAPH_WORKSPACE_TOO_SMALL;
    case ErrorCode::wrong_order:
        return STEPGRAPH_WRONG_ORDER;
    case ErrorCode::invalid_rows:
        return STEPGRAPH_INVALID_ROWS;
    case ErrorCode::invalid_layer:
        return STEPGRAPH_INVALID_LAYER;
    case ErrorCode::invalid_capture:
        return STEPGRAPH_INVALID_CAPTURE;
    case ErrorCode::cuda:
        return STEPGRAPH_CUDA;
    case ErrorCode::cublas:
        return STEPGRAPH_CUBLAS;
    }
    return STEPGRAPH_INTERNAL;
}

template <typename Call>
stepgraph_result guarded(Call call) noexcept {
    try {
        call();
        last_message[0] = '\0';  // behind the call: a callback may have made calls that left a sentence
        return STEPGRAPH_OK;
    } catch (const Error& error) {
        return fail(result_of(error.code()), error.what());
    } catch (const InvalidArgument& error) {
        return fail(STEPGRAPH_INVALID_ARGUMENT, error.what());
    } catch (const CallbackFailed& error) {
        return fail(STEPGRAPH_CALLBACK_FAILED, error.what());
    } catch (const std::bad_alloc&) {
        return fail(STEPGRAPH_OUT_OF_MEMORY, "the host has no memory left");
    } catch (const std::exception& error) {
        return fail(STEPGRAPH_INTERNAL, error.what());
    } catch (...) {
        return fail(STEPGRAPH_INTERNAL, "an exception of a kind that the library does not know");
    }
}

/// The pipelines that live, by handle. A handle is a count, never an address: none comes back.
class Handles {
public:
    stepgraph_pipeline* add(std::shared_ptr<Pipeline> pipeline) {
        const std::lock_guard lock(mutex_);
        const uintptr_t handle = ++last_;
        pipelines_.emplace(handle, std::move(pipeline));
        return reinterpret_cast<stepgraph_pipeline*>(handle);
    }
    std::shared_ptr<Pipeline> get(stepgraph_pipeline* handle) {
        const std::lock_guard lock(mutex_);
        return at(handle)->second;
    }
    std::shared_ptr<Pipeline> take(stepgraph_pipeline* handle) {
        const std::lock_guard lock(mutex_);
        const auto found = at(handle);
        if (capturing_.count(found->first) > 0) {
            throw Error(ErrorCode::wrong_order, "stepgraph_destroy was called from after_layer, must not be");
        }
        std::shared_ptr<Pipeline> pipeline = std::move(found->second);
        pipelines_.erase(found);
        return pipeline;
    }

    /// While a pipeline is captured it is not taken: its callback may ask for that.
    void begin_capture(stepgraph_pipeline* handle) {
        const std::lock_guard lock(mutex_);
        capturing_.insert(at(handle)->first);
    }
    void end_capture(stepgraph_pipeline* handle) noexcept {
        const std::lock_guard lock(mutex_);
        capturing_.erase(capturing_.find(reinterpret_cast<uintptr_t>(handle)));
    }

private:
    using Pipelines = std::map<uintptr_t, std::shared_ptr<Pipeline>>;

    Pipelines::iterator at(stepgraph_pipeline* handle) {
        const auto found = pipelines_.find(reinterpret_cast<uintptr_t>(handle));
        if (found == pipelines_.end()) {
            throw InvalidArgument(handle == nullptr ? "pipeline is null, must be a handle of stepgraph_create"
                                                    : "pipeline is " + std::to_string(reinterpret_cast<uintptr_t>(handle)) +
                                                          ", must be a handle of stepgraph_create that was not destroyed");
        }
        return found;
    }

    std::mutex mutex_;
    Pipelines pipelines_;
    std::multiset<uintptr_t> capturing_;  // one that is captured may be asked to from its callback, and refuse
    uintptr_t last_ = 0;
};

/// Lives as long as the process: pipelines that nobody destroyed are not taken down while CUDA itself goes.
Handles& handles() {
    static auto* const all = new Handles;
    return *all;
}

class Capturing {
public:
    explicit Capturing(stepgraph_pipeline* handle) : handle_(handle) { handles().begin_capture(handle_); }
    ~Capturing() { handles().end_capture(handle_); }
    Capturing(const Capturing&) = delete;
    Capturing& operator=(const Capturing&) = delete;

private:
    stepgraph_pipeline* handle_;
};

// Sizes of the structs' first version: no caller has less.
constexpr size_t first_geometry_size = sizeof(stepgraph_geometry);
constexpr size_t first_options_size = sizeof(stepgraph_options);
constexpr size_t first_step_buffers_size = sizeof(stepgraph_step_buffers);
constexpr size_t first_layer_buffers_size = sizeof(stepgraph_layer_buffers);
constexpr size_t first_status_size = sizeof(stepgraph_status);

/// Refuses null and a size that no version up to this one has.
template <typename Struct>
void check_struct(const Struct* given, const char* name, size_t first_size) {
    if (given == nullptr) {
        throw InvalidArgument(std::string(name) + " is null, must point to a struct");
    }
    if (given->size < first_size || given->size > sizeof(Struct)) {
        throw InvalidArgument(
            std::string(name) + ".size is " + std::to_string(given->size) + ", must be " + std::to_string(first_size) +
            (first_size == sizeof(Struct) ? "" : " to " + std::to_string(sizeof(Struct))) + ": sizeof the struct");
    }
}

void check_count(size_t count, const char* name) {
    if (count > INT32_MAX) {
        throw InvalidArgument(std::string(name) + " is " + std::to_string(count) + ", must be at most " +
                              std::to_string(INT32_MAX));
    }
}

void check_pointer(const void* pointer, const char* name) {
    if (pointer == nullptr) {
        throw InvalidArgument(std::string(name) + " is null, must not be");
    }
}

/// `given` as far as the caller has it, behind it `defaults`.
template <typename Struct>
Struct with_defaults(const void* given, const Struct& defaults) {
    Struct filled = defaults;
    size_t size = 0;
    std::memcpy(&size, given, sizeof size);
    std::memcpy(&filled, given, size);
    return filled;
}

/// Writes to the caller's struct what it has room for.
template <typename Struct>
void hand_out(Struct* to, Struct from) {
    from.size = to->size;
    std::memcpy(to, &from, from.size);
}

stepgraph_geometry to_c(const Geometry& g) {
    return {.size = sizeof(stepgraph_geometry),
            .heads = g.heads,
            .top_k = g.top_k,
            .max_rows = g.max_rows,
            .max_requests = g.max_requests,
            .max_model_len = g.max_model_len,
            .block_table_stride = g.block_table_stride,
            .pages = g.pages,
            .page_stride_bytes = g.page_stride_bytes,
            .block_table_columns = g.block_table_columns,
            .cache_format = static_cast<int32_t>(g.cache_format),
            .q_lora_rank = g.q_lora_rank,
            .hidden_size = g.hidden_size,
            .projected_columns = g.projected_columns,
            .key_column = g.key_column,
            .weight_column = g.weight_column,
            .k_norm_eps = g.k_norm_eps,
            .dcp_world_size = g.dcp.world_size,
            .dcp_rank = g.dcp.rank,
            .dcp_interleave = g.dcp.interleave,
            .reserved = 0};
}

Geometry from_c(const stepgraph_geometry* given) {
    check_struct(given, "geometry", first_geometry_size);
    const auto g = with_defaults(given, to_c({}));
    if (g.reserved != 0) {
        throw InvalidArgument("geometry.reserved is " + std::to_string(g.reserved) + ", must be 0");
    }
    return {.heads = g.heads,
            .top_k = g.top_k,
            .max_rows = g.max_rows,
            .max_requests = g.max_requests,
            .max_model_len = g.max_model_len,
            .block_table_columns = g.block_table_columns,
            .block_table_stride = g.block_table_stride,
            .cache_format = static_cast<CacheFormat>(g.cache_format),
            .pages = g.pages,
            .page_stride_bytes = g.page_stride_bytes,
            .q_lora_rank = g.q_lora_rank,
            .hidden_size = g.hidden_size,
            .projected_columns = g.projected_columns,
            .key_column = g.key_column,
            .weight_column = g.weight_column,
            .k_norm_eps = g.k_norm_eps,
            .dcp = {.world_size = g.dcp_world_size, .rank = g.dcp_rank, .interleave = g.dcp_interleave}};
}

stepgraph_options to_c(const Options& o) {
    return {.size = sizeof(stepgraph_options),
            .programmatic_edges = o.programmatic_edges ? 1 : 0,
            .portable_scorer = o.portable_scorer ? 1 : 0,
            .portable_select = o.portable_select ? 1 : 0,
            .tile_rows = o.tile_rows};
}

bool to_bool(int32_t value, const char* name) {
    if (value != 0 && value != 1) {
        throw InvalidArgument("options." + std::string(name) + " is " + std::to_string(value) + ", must be 0 or 1");
    }
    return value == 1;
}

Options from_c(const stepgraph_options* given) {
    if (given == nullptr) {
        return {};
    }
    check_struct(given, "options", first_options_size);
    const auto o = with_defaults(given, to_c(Options{}));
    return {.programmatic_edges = to_bool(o.programmatic_edges, "programmatic_edges"),
            .portable_scorer = to_bool(o.portable_scorer, "portable_scorer"),
            .portable_select = to_bool(o.portable_select, "portable_select"),
            .tile_rows = o.tile_rows};
}

StepBuffers from_c(const stepgraph_step_buffers* given) {
    check_struct(given, "step", first_step_buffers_size);
    const auto s = with_defaults(given, stepgraph_step_buffers{});
    return {.seq_lens = s.seq_lens,
            .query_lens = s.query_lens,
            .num_requests = s.num_requests,
            .block_table = s.block_table,
            .slots = s.slots};
}

LayerBuffers from_c(const stepgraph_layer_buffers& l) {
    const auto bf16 = [](const void* pointer) { return static_cast<const __nv_bfloat16*>(pointer); };
    return {.q_c = bf16(l.q_c),
            .hidden = bf16(l.hidden),
            .wq_b = bf16(l.wq_b),
            .w_kv = bf16(l.w_kv),
            .iq = bf16(l.iq),
            .projected = bf16(l.projected),
            .k_norm_weight = l.k_norm_weight,
            .k_norm_bias = l.k_norm_bias,
            .cache = l.cache,
            .indices = l.indices,
            .counts = l.counts,
            .physical_slots = l.physical_slots,
            .winner_logits = l.winner_logits,
            .logits = l.logits};
}

std::vector<LayerBuffers> from_c(const stepgraph_layer_buffers* layers, size_t count) {
    std::vector<LayerBuffers> converted;
    check_count(count, "layer_count");
    if (count == 0) {
        return converted;  // bind() says what is wrong with it
    }
    check_pointer(layers, "layers");
    check_struct(layers, "layers[0]", first_layer_buffers_size);
    const auto* at = reinterpret_cast<const unsigned char*>(layers);
    for (size_t i = 0; i < count; ++i, at += layers->size) {
        size_t size = 0;
        std::memcpy(&size, at, sizeof size);
        if (size != layers->size) {
            throw InvalidArgument("layers[" + std::to_string(i) + "].size is " + std::to_string(size) +
                                  ", must be that of layers[0], " + std::to_string(layers->size));
        }
        converted.push_back(from_c(with_defaults(at, stepgraph_layer_buffers{})));
    }
    return converted;
}

/// The callback as Pipeline takes it. What it throws ends the capture as what it returns does.
Pipeline::AfterLayer from_c(stepgraph_after_layer after_layer, void* user) {
    if (after_layer == nullptr) {
        return nullptr;
    }
    return [after_layer, user](int layer, int rows, cudaStream_t stream) {
        const std::string where = " for layer " + std::to_string(layer) + " of bucket " + std::to_string(rows);
        int returned = 0;
        try {
            returned = after_layer(layer, rows, stream, user);
        } catch (const std::exception& error) {
            throw CallbackFailed("after_layer threw" + where + ": " + error.what());
        } catch (...) {
            throw CallbackFailed("after_layer threw" + where);
        }
        if (returned != 0) {
            throw CallbackFailed("after_layer returned " + std::to_string(returned) + where + ", must return 0");
        }
    };
}

}  // namespace
}  // namespace stepgraph

using namespace stepgraph;

int32_t stepgraph_version() {
    return STEPGRAPH_VERSION_MAJOR * 10000 + STEPGRAPH_VERSION_MINOR * 100 + STEPGRAPH_VERSION_PATCH;
}

const char* stepgraph_last_message() {
    return last_message;
}

stepgraph_result stepgraph_geometry_defaults(stepgraph_geometry* geometry) {
    return guarded([&] {
        check_struct(geometry, "geometry", first_geometry_size);
        hand_out(geometry, to_c(Geometry{}));
    });
}

stepgraph_result stepgraph_options_defaults(stepgraph_options* options) {
    return guarded([&] {
        check_struct(options, "options", first_options_size);
        hand_out(options, to_c(Options{}));
    });
}

stepgraph_result stepgraph_create(const stepgraph_geometry* geometry, const stepgraph_options* options,
                                  stepgraph_pipeline** pipeline) {
    return guarded([&] {
        check_pointer(pipeline, "pipeline");
        *pipeline = nullptr;
        const Geometry numbers = from_c(geometry);
        *pipeline = handles().add(std::make_shared<Pipeline>(numbers, from_c(options)));
    });
}

stepgraph_result stepgraph_destroy(stepgraph_pipeline* pipeline) {
    return guarded([&] {
        if (pipeline != nullptr) {
            handles().take(pipeline);
        }
    });
}

stepgraph_result stepgraph_get_geometry(stepgraph_pipeline* pipeline, stepgraph_geometry* geometry) {
    return guarded([&] {
        const auto owned = handles().get(pipeline);
        check_struct(geometry, "geometry", first_geometry_size);
        hand_out(geometry, to_c(owned->geometry()));
    });
}

stepgraph_result stepgraph_get_tile_rows(stepgraph_pipeline* pipeline, int32_t* tile_rows) {
    return guarded([&] {
        const auto owned = handles().get(pipeline);
        check_pointer(tile_rows, "tile_rows");
        *tile_rows = owned->tile_rows();
    });
}

stepgraph_result stepgraph_workspace_bytes(stepgraph_pipeline* pipeline, size_t* bytes) {
    return guarded([&] {
        const auto owned = handles().get(pipeline);
        check_pointer(bytes, "bytes");
        *bytes = owned->workspace_bytes();
    });
}

stepgraph_result stepgraph_bind(stepgraph_pipeline* pipeline, const stepgraph_step_buffers* step,
                                const stepgraph_layer_buffers* layers, size_t layer_count, void* workspace,
                                size_t workspace_bytes) {
    return guarded([&] {
        const auto owned = handles().get(pipeline);
        const StepBuffers step_buffers = from_c(step);
        owned->bind(step_buffers, from_c(layers, layer_count), {workspace, workspace_bytes});
    });
}

stepgraph_result stepgraph_capture(stepgraph_pipeline* pipeline, const int32_t* buckets, size_t bucket_count,
                                   stepgraph_after_layer after_layer, void* user) {
    return guarded([&] {
        const auto owned = handles().get(pipeline);
        check_count(bucket_count, "bucket_count");
        if (bucket_count > 0) {
            check_pointer(buckets, "buckets");
        }
        const Capturing capturing(pipeline);
        owned->capture({buckets, buckets + bucket_count}, from_c(after_layer, user));
    });
}

stepgraph_result stepgraph_replay(stepgraph_pipeline* pipeline, int32_t rows, stepgraph_stream stream) {
    return guarded([&] { handles().get(pipeline)->replay(rows, stream); });
}

stepgraph_result stepgraph_enqueue_layout(stepgraph_pipeline* pipeline, int32_t rows, stepgraph_stream stream) {
    return guarded([&] { handles().get(pipeline)->enqueue_layout(rows, stream); });
}

stepgraph_result stepgraph_enqueue_layer(stepgraph_pipeline* pipeline, int32_t layer, int32_t rows,
                                         stepgraph_stream stream) {
    return guarded([&] { handles().get(pipeline)->enqueue_layer(layer, rows, stream); });
}

stepgraph_result stepgraph_read_status(stepgraph_pipeline* pipeline, stepgraph_stream stream, stepgraph_status* status) {
    return guarded([&] {
        const auto owned = handles().get(pipeline);
        check_struct(status, "status", first_status_size);
        const StepStatus read = owned->read_status(stream);
        hand_out(status, {.size = 0,
                          .invalid_slots = read.invalid_slots,
                          .invalid_blocks = read.invalid_blocks,
                          .clamped_bounds = read.clamped_bounds,
                          .dropped_rows = read.dropped_rows});
    });
}

stepgraph_result stepgraph_reset_status(stepgraph_pipeline* pipeline, stepgraph_stream stream) {
    return guarded([&] { handles().get(pipeline)->reset_status(stream); });
}
