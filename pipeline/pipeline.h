// The decode step of a sparse-attention indexer: made ready once, replayed per token.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include <stepgraph/kernels/error.h>
#include <stepgraph/layouts/step_status.h>

#include "buffers.h"
#include "geometry.h"
#include "graph.h"

namespace stepgraph {

/// Device pointers into the workspace: what one stage hands to the next. Valid from bind on; the contents are those of the
/// last layer enqueued (the layout's: of the step).
struct StepState {
    const int32_t* starts;           // [max_requests + 1] first row of each request
    const int32_t* row_request;      // [max_rows] request of each row, -1 for padding
    const int32_t* ends;             // [max_rows] exclusive bound in local positions, 0 for padding
    const int64_t* slots;            // [max_rows] derived or the engine's own
    const __nv_bfloat16* iq;         // [max_rows, heads * 128] made here; null where the geometry does not project
    const __nv_bfloat16* projected;  // [max_rows, projected_columns] likewise
    const uint8_t* query;            // see layouts/query_row.h
    const float* head_weights;       // [max_rows, heads]
    const StepStatus* status;        // [1]
};

/// Stages of use: construct -> workspace_bytes() -> bind -> capture -> replay, or, at any time after bind, enqueue_layout
/// and then enqueue_layer, eagerly or inside the engine's own capture. A call out of order throws Error(wrong_order).
///
/// Rows: a bucket captured for R rows serves every step with at most R rows. Rows that no request takes are padding: their
/// outputs are -1 with count 0, and their inputs are never used.
///
/// Streams: all buckets and layers work in the one workspace. Steps of one pipeline must follow each other, on one stream or
/// ordered by events; two pipelines with a workspace each are independent. Kernels that the engine launches programmatically
/// behind these must wait for them (cudaGridDependencySynchronize) like any other.
/// Threads: one thread at a time. Devices: the one that was current at bind. A moved-from pipeline may only be assigned to
/// or destroyed. The buffers that the engine hands over, and the workspace, must outlive the pipeline's last replay.
class STEPGRAPH_API Pipeline {
public:
    /// Called in capture after each layer of each bucket; enqueues the engine's kernels for `rows` rows (the bucket) on
    /// `stream`. It may fork if it joins again. It may not bind or capture this pipeline, and its kernels may not write the
    /// weights of products: the next layer reads them before they have ended.
    using AfterLayer = std::function<void(int layer, int rows, cudaStream_t stream)>;

    /// Needs no GPU. Throws Error(invalid_geometry).
    explicit Pipeline(const Geometry& geometry, const Options& options = {});
    ~Pipeline();
    Pipeline(Pipeline&&) noexcept;
    Pipeline& operator=(Pipeline&&) noexcept;

    /// The geometry with its defaults filled in, and the rows of a tile.
    [[nodiscard]] const Geometry& geometry() const noexcept;
    [[nodiscard]] int tile_rows() const noexcept;

    /// Bytes of device memory that bind() wants. Needs no GPU.
    [[nodiscard]] size_t workspace_bytes() const noexcept;

    /// Fixes the buffers, loads every kernel, chooses the projections' algorithms and clears the status. Synchronises; not
    /// legal in this thread's capture, and nothing that uses the workspace may be in flight. Binding again drops what was
    /// captured. On an error the pipeline stays as it was. Where cuBLASLt makes products (of depths that
    /// are no multiples of 32 or beyond 24576, on a GPU that is not Hopper, or without code for sm_90a), it must not run
    /// while another thread captures in mode Global: making a cuBLASLt handle breaks that capture. Throws
    /// Error(invalid_buffer), (workspace_too_small), (cuda), (cublas).
    void bind(const StepBuffers& step, std::span<const LayerBuffers> layers, const Workspace& workspace);

    /// Captures one executable graph per bucket, in ascending order, in place of those captured before. Executes nothing and
    /// touches no buffer. An exception of `after_layer`, or a CUDA error that it leaves behind, ends the capture, is passed
    /// on and leaves the pipeline as it was. Throws Error(wrong_order), (invalid_rows), (invalid_capture), (cuda).
    void capture(std::vector<int> buckets, const AfterLayer& after_layer = nullptr);

    /// Enqueues the smallest captured bucket that holds `rows` (1 .. the largest bucket). One CUDA call: no synchronisation,
    /// allocation or reading back. Throws Error(wrong_order), (invalid_rows), (cuda).
    void replay(int rows, cudaStream_t stream) const;

    /// Enqueues the decode layout and the schedule of a step of at most `rows` rows. Once a step, before its layers. The
    /// block table must not change from here until the step's last layer has run: it is read here and in every layer. Legal
    /// in capture; no synchronisation, no allocation. Throws Error(wrong_order), (invalid_rows), (cuda).
    void enqueue_layout(int rows, cudaStream_t stream) const;

    /// Enqueues one layer, projections to indices, for the `rows` that the last layout was enqueued for; behind a replay
    /// that layout has gone. Legal in capture; no synchronisation, no allocation. The weights of the products are read
    /// before the kernels in front of the layer have ended: none of them may write them. Throws Error(wrong_order),
    /// (invalid_layer), (invalid_rows), (cuda), (cublas).
    void enqueue_layer(int layer, int rows, cudaStream_t stream) const;

    /// Captured buckets in ascending order, and the graph of one of them, which lives until the next bind or capture.
    [[nodiscard]] std::vector<int> buckets() const;
    [[nodiscard]] const CapturedGraph& graph(int bucket) const;

    /// Throws Error(wrong_order) before bind.
    [[nodiscard]] StepState state() const;

    /// Reads the counters; synchronises `stream`. Throws Error(wrong_order), (cuda).
    [[nodiscard]] StepStatus read_status(cudaStream_t stream) const;
    /// Enqueues the clearing of the counters; not for use in capture. Throws Error(wrong_order), (cuda).
    void reset_status(cudaStream_t stream) const;

private:
    struct STEPGRAPH_HIDDEN Bound;
    struct STEPGRAPH_HIDDEN Parts;
    class STEPGRAPH_HIDDEN Capturing;
    std::unique_ptr<Parts> parts_;
};

}  // namespace stepgraph
