/* The pipeline for callers in C, and for any language that calls C. What each number and buffer means is told in geometry.h,
 * buffers.h and pipeline.h; here stands what is different.
 *
 * Every function that can fail returns a result, and where it fails leaves a sentence that names the operand, what it was
 * and what it must be: stepgraph_last_message(). No exception comes out, and none of a callback goes through.
 *
 * Structs begin with their size in bytes, set by the caller: sizeof of the struct as the caller was compiled. They grow at
 * the end; a library takes every size from that of the struct's first version on up to its own, and what a caller does not
 * have keeps its default. A larger one, of a caller newer than the library, is refused.
 *
 * A handle is a number that is never given twice: one that was destroyed is refused, not followed.
 */
#ifndef STEPGRAPH_PIPELINE_STEPGRAPH_H
#define STEPGRAPH_PIPELINE_STEPGRAPH_H

#include <stddef.h>
#include <stdint.h>

#define STEPGRAPH_VERSION_MAJOR 0
#define STEPGRAPH_VERSION_MINOR 1
#define STEPGRAPH_VERSION_PATCH 0

#if defined(STEPGRAPH_BUILDING)
#define STEPGRAPH_C_API __attribute__((visibility("default")))
#else
#define STEPGRAPH_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct stepgraph_pipeline stepgraph_pipeline;

/* A cudaStream_t; null is the legacy default stream. */
typedef struct CUstream_st* stepgraph_stream;

typedef enum stepgraph_result {
    STEPGRAPH_OK = 0,
    STEPGRAPH_INVALID_GEOMETRY = 1,    /* a number of the geometry or of the options */
    STEPGRAPH_INVALID_BUFFER = 2,      /* a null, misaligned, host or contradictory device pointer */
    STEPGRAPH_WORKSPACE_TOO_SMALL = 3, /* fewer bytes than stepgraph_workspace_bytes() says */
    STEPGRAPH_WRONG_ORDER = 4,         /* a call before the one it builds on */
    STEPGRAPH_INVALID_ROWS = 5,        /* a row count or bucket outside what was made ready */
    STEPGRAPH_INVALID_LAYER = 6,       /* a layer that was not bound */
    STEPGRAPH_INVALID_CAPTURE = 7,     /* what was captured is not what a replay could run */
    STEPGRAPH_CUDA = 8,                /* a CUDA call failed */
    STEPGRAPH_CUBLAS = 9,              /* a cuBLASLt call failed */
    STEPGRAPH_INVALID_ARGUMENT = 10,   /* a null pointer, a handle that is none, a size of another version */
    STEPGRAPH_CALLBACK_FAILED = 11,    /* after_layer returned something else than 0, or threw */
    STEPGRAPH_OUT_OF_MEMORY = 12,      /* of the host */
    STEPGRAPH_INTERNAL = 13            /* anything else */
} stepgraph_result;

typedef enum stepgraph_cache_format {
    STEPGRAPH_FP8 = 0,
    STEPGRAPH_FP8_MX = 1,
    STEPGRAPH_MXFP4 = 2,
    STEPGRAPH_MXFP4_ROWGROUP = 3
} stepgraph_cache_format;

/* stepgraph::Geometry and its ContextParallel. */
typedef struct stepgraph_geometry {
    size_t size;
    int32_t heads;
    int32_t top_k;
    int32_t max_rows;
    int32_t max_requests;
    int64_t max_model_len;
    int64_t block_table_stride;
    int64_t pages;
    int64_t page_stride_bytes;
    int32_t block_table_columns;
    int32_t cache_format; /* stepgraph_cache_format */
    int32_t q_lora_rank;
    int32_t hidden_size;
    int32_t projected_columns;
    int32_t key_column;
    int32_t weight_column;
    float k_norm_eps;
    int32_t dcp_world_size;
    int32_t dcp_rank;
    int32_t dcp_interleave;
    int32_t reserved; /* 0 */
} stepgraph_geometry;

/* stepgraph::Options; 1 is true and 0 false. */
typedef struct stepgraph_options {
    size_t size;
    int32_t programmatic_edges;
    int32_t portable_scorer;
    int32_t portable_select;
    int32_t tile_rows;
} stepgraph_options;

/* Device pointers: stepgraph::StepBuffers. */
typedef struct stepgraph_step_buffers {
    size_t size;
    const int32_t* seq_lens;
    const int32_t* query_lens;
    const int32_t* num_requests;
    const int32_t* block_table;
    const int64_t* slots;
} stepgraph_step_buffers;

/* Device pointers: stepgraph::LayerBuffers. BF16 where nothing else is said. */
typedef struct stepgraph_layer_buffers {
    size_t size;
    const void* q_c;
    const void* hidden;
    const void* wq_b;
    const void* w_kv;
    const void* iq;
    const void* projected;
    const float* k_norm_weight;
    const float* k_norm_bias;
    uint8_t* cache;
    int32_t* indices;
    int32_t* counts;
    int64_t* physical_slots;
    float* winner_logits;
    float* logits;
} stepgraph_layer_buffers;

/* stepgraph::StepStatus. */
typedef struct stepgraph_status {
    size_t size;
    uint32_t invalid_slots;
    uint32_t invalid_blocks;
    uint32_t clamped_bounds;
    uint32_t dropped_rows;
} stepgraph_status;

/* Called in capture after each layer of each bucket, with `user` as it was handed over. Enqueues the engine's kernels for
 * `rows` rows on `stream` and returns 0; anything else ends the capture, which then fails with STEPGRAPH_CALLBACK_FAILED.
 * It may not bind, capture or destroy this pipeline, and it must return: no longjmp, no pthread_exit. */
typedef int (*stepgraph_after_layer)(int32_t layer, int32_t rows, stepgraph_stream stream, void* user);

/* The library's version, major * 10000 + minor * 100 + patch: perhaps not that of this header. */
STEPGRAPH_C_API int32_t stepgraph_version(void);

/* The sentence of this thread's last call that returned a result; empty after STEPGRAPH_OK, cut behind 1023 bytes. Lives
 * until the thread's next call. Never null. */
STEPGRAPH_C_API const char* stepgraph_last_message(void);

/* Sets every number behind `size`, which the caller has set, to its default. */
STEPGRAPH_C_API stepgraph_result stepgraph_geometry_defaults(stepgraph_geometry* geometry);
STEPGRAPH_C_API stepgraph_result stepgraph_options_defaults(stepgraph_options* options);

/* Makes a pipeline. Needs no GPU. `options` may be null: the defaults. On an error *pipeline is null. */
STEPGRAPH_C_API stepgraph_result stepgraph_create(const stepgraph_geometry* geometry, const stepgraph_options* options,
                                                  stepgraph_pipeline** pipeline);
/* Frees it; null is none and no error. No call of another thread may be in it. */
STEPGRAPH_C_API stepgraph_result stepgraph_destroy(stepgraph_pipeline* pipeline);

/* The geometry with its defaults filled in. The caller has set geometry->size. */
STEPGRAPH_C_API stepgraph_result stepgraph_get_geometry(stepgraph_pipeline* pipeline, stepgraph_geometry* geometry);
STEPGRAPH_C_API stepgraph_result stepgraph_get_tile_rows(stepgraph_pipeline* pipeline, int32_t* tile_rows);
/* Bytes of device memory that stepgraph_bind() wants. */
STEPGRAPH_C_API stepgraph_result stepgraph_workspace_bytes(stepgraph_pipeline* pipeline, size_t* bytes);

/* Pipeline::bind(). `layers` are layer_count structs one behind the other, all of layers[0].size. */
STEPGRAPH_C_API stepgraph_result stepgraph_bind(stepgraph_pipeline* pipeline, const stepgraph_step_buffers* step,
                                                const stepgraph_layer_buffers* layers, size_t layer_count, void* workspace,
                                                size_t workspace_bytes);

/* Pipeline::capture(). `after_layer` may be null. */
STEPGRAPH_C_API stepgraph_result stepgraph_capture(stepgraph_pipeline* pipeline, const int32_t* buckets, size_t bucket_count,
                                                   stepgraph_after_layer after_layer, void* user);

/* Pipeline::replay(), enqueue_layout(), enqueue_layer(): no synchronisation, no allocation of device memory. */
STEPGRAPH_C_API stepgraph_result stepgraph_replay(stepgraph_pipeline* pipeline, int32_t rows, stepgraph_stream stream);
STEPGRAPH_C_API stepgraph_result stepgraph_enqueue_layout(stepgraph_pipeline* pipeline, int32_t rows,
                                                          stepgraph_stream stream);
STEPGRAPH_C_API stepgraph_result stepgraph_enqueue_layer(stepgraph_pipeline* pipeline, int32_t layer, int32_t rows,
                                                         stepgraph_stream stream);

/* Pipeline::read_status(), which synchronises the stream, and reset_status(). The caller has set status->size. */
STEPGRAPH_C_API stepgraph_result stepgraph_read_status(stepgraph_pipeline* pipeline, stepgraph_stream stream,
                                                       stepgraph_status* status);
STEPGRAPH_C_API stepgraph_result stepgraph_reset_status(stepgraph_pipeline* pipeline, stepgraph_stream stream);

#ifdef __cplusplus
}
#endif

#endif
