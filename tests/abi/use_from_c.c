/* Uses every function of the C interface, from C99. Without a GPU: what needs none, and every refusal. Returns 77 where there
 * was no GPU for the rest, 1 where something was wrong. */
#include <stdio.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include <stepgraph/pipeline/stepgraph.h>

static int failures = 0;

static void expect(int right, const char* what, int line) {
    if (!right) {
        printf("line %d: %s; the last message: \"%s\"\n", line, what, stepgraph_last_message());
        ++failures;
    }
}
#define EXPECT(condition) expect(condition, #condition, __LINE__)
/* The call must return `result` and leave a sentence that holds `part`. */
#define EXPECT_REFUSED(call, result, part)                              \
    do {                                                                \
        EXPECT((call) == (result));                                     \
        EXPECT(strstr(stepgraph_last_message(), (part)) != NULL);       \
    } while (0)
#define EXPECT_OK(call)                                 \
    do {                                                \
        EXPECT((call) == STEPGRAPH_OK);                 \
        EXPECT(strcmp(stepgraph_last_message(), "") == 0); \
    } while (0)

enum { rows = 4, requests = 2, columns = 4, heads = 16, top_k = 8, pages = 8, layers = 2 };

static stepgraph_geometry small_geometry(void) {
    stepgraph_geometry geometry;
    memset(&geometry, 0xA5, sizeof geometry);
    geometry.size = sizeof geometry;
    EXPECT_OK(stepgraph_geometry_defaults(&geometry));
    EXPECT(geometry.heads == 32 && geometry.top_k == 2048 && geometry.weight_column == 128);
    EXPECT(geometry.dcp_world_size == 1 && geometry.reserved == 0 && geometry.max_rows == 0);
    geometry.heads = heads;
    geometry.top_k = top_k;
    geometry.max_rows = rows;
    geometry.max_requests = requests;
    geometry.max_model_len = columns * 64;
    geometry.block_table_columns = columns;
    geometry.pages = pages;
    return geometry;
}

static void check_structs(void) {
    stepgraph_geometry geometry = small_geometry();
    stepgraph_pipeline* pipeline = (stepgraph_pipeline*)&geometry;
    geometry.size = 4;
    EXPECT_REFUSED(stepgraph_create(&geometry, NULL, &pipeline), STEPGRAPH_INVALID_ARGUMENT, "geometry.size is 4, must be");
    EXPECT(pipeline == NULL);
    geometry.size = sizeof geometry + 8;
    EXPECT_REFUSED(stepgraph_geometry_defaults(&geometry), STEPGRAPH_INVALID_ARGUMENT, "geometry.size is");
    EXPECT_REFUSED(stepgraph_geometry_defaults(NULL), STEPGRAPH_INVALID_ARGUMENT, "geometry is null");
    EXPECT_REFUSED(stepgraph_options_defaults(NULL), STEPGRAPH_INVALID_ARGUMENT, "options is null");

    geometry = small_geometry();
    EXPECT_REFUSED(stepgraph_create(&geometry, NULL, NULL), STEPGRAPH_INVALID_ARGUMENT, "pipeline is null");
    EXPECT_REFUSED(stepgraph_create(NULL, NULL, &pipeline), STEPGRAPH_INVALID_ARGUMENT, "geometry is null");
    geometry.heads = 17;
    EXPECT_REFUSED(stepgraph_create(&geometry, NULL, &pipeline), STEPGRAPH_INVALID_GEOMETRY, "heads is 17, must be");
    geometry = small_geometry();
    geometry.cache_format = 7;
    EXPECT_REFUSED(stepgraph_create(&geometry, NULL, &pipeline), STEPGRAPH_INVALID_GEOMETRY, "cache_format is 7");
    geometry = small_geometry();
    geometry.reserved = 1;
    EXPECT_REFUSED(stepgraph_create(&geometry, NULL, &pipeline), STEPGRAPH_INVALID_ARGUMENT, "geometry.reserved is 1");

    geometry = small_geometry();
    stepgraph_options options;
    options.size = 1;
    EXPECT_REFUSED(stepgraph_create(&geometry, &options, &pipeline), STEPGRAPH_INVALID_ARGUMENT, "options.size is 1");
    options.size = sizeof options;
    EXPECT_OK(stepgraph_options_defaults(&options));
    EXPECT(options.programmatic_edges == 1 && options.portable_scorer == 0 && options.tile_rows == 0);
    options.portable_scorer = 2;
    EXPECT_REFUSED(stepgraph_create(&geometry, &options, &pipeline), STEPGRAPH_INVALID_ARGUMENT,
                   "options.portable_scorer is 2, must be 0 or 1");
}

static void check_handles(void) {
    const stepgraph_geometry geometry = small_geometry();
    stepgraph_options options;
    options.size = sizeof options;
    EXPECT_OK(stepgraph_options_defaults(&options));
    options.tile_rows = 3;
    stepgraph_pipeline* pipeline = NULL;
    stepgraph_pipeline* other = NULL;
    EXPECT_OK(stepgraph_create(&geometry, &options, &pipeline));
    EXPECT_OK(stepgraph_create(&geometry, NULL, &other));
    EXPECT(pipeline != NULL && other != NULL && pipeline != other);

    stepgraph_geometry filled;
    filled.size = sizeof filled;
    EXPECT_OK(stepgraph_get_geometry(pipeline, &filled));
    EXPECT(filled.page_stride_bytes == 8448 && filled.projected_columns == 128 + heads && filled.size == sizeof filled);
    int32_t tile_rows = 0;
    size_t bytes = 0;
    EXPECT_OK(stepgraph_get_tile_rows(pipeline, &tile_rows));
    EXPECT(tile_rows == 3);
    EXPECT_OK(stepgraph_workspace_bytes(pipeline, &bytes));
    EXPECT(bytes > 0);
    EXPECT_REFUSED(stepgraph_get_geometry(pipeline, NULL), STEPGRAPH_INVALID_ARGUMENT, "geometry is null");
    EXPECT_REFUSED(stepgraph_get_tile_rows(pipeline, NULL), STEPGRAPH_INVALID_ARGUMENT, "tile_rows is null");
    EXPECT_REFUSED(stepgraph_workspace_bytes(pipeline, NULL), STEPGRAPH_INVALID_ARGUMENT, "bytes is null");

    /* Calls before the ones they build on. */
    const int32_t bucket = rows;
    stepgraph_status status;
    status.size = sizeof status;
    EXPECT_REFUSED(stepgraph_capture(pipeline, &bucket, 1, NULL, NULL), STEPGRAPH_WRONG_ORDER, "capture was called before bind");
    EXPECT_REFUSED(stepgraph_capture(pipeline, NULL, 1, NULL, NULL), STEPGRAPH_INVALID_ARGUMENT, "buckets is null");
    EXPECT_REFUSED(stepgraph_replay(pipeline, 1, NULL), STEPGRAPH_WRONG_ORDER, "replay was called before bind");
    EXPECT_REFUSED(stepgraph_enqueue_layout(pipeline, 1, NULL), STEPGRAPH_WRONG_ORDER, "enqueue_layout was called before bind");
    EXPECT_REFUSED(stepgraph_enqueue_layer(pipeline, 0, 1, NULL), STEPGRAPH_WRONG_ORDER, "enqueue_layer was called before bind");
    EXPECT_REFUSED(stepgraph_read_status(pipeline, NULL, &status), STEPGRAPH_WRONG_ORDER, "read_status was called before bind");
    EXPECT_REFUSED(stepgraph_reset_status(pipeline, NULL), STEPGRAPH_WRONG_ORDER, "reset_status was called before bind");

    /* Buffers that are none. */
    stepgraph_step_buffers step;
    memset(&step, 0, sizeof step);
    stepgraph_layer_buffers layer[layers];
    memset(layer, 0, sizeof layer);
    EXPECT_REFUSED(stepgraph_bind(pipeline, NULL, layer, 1, NULL, 0), STEPGRAPH_INVALID_ARGUMENT, "step is null");
    EXPECT_REFUSED(stepgraph_bind(pipeline, &step, layer, 1, NULL, 0), STEPGRAPH_INVALID_ARGUMENT, "step.size is 0");
    step.size = sizeof step;
    EXPECT_REFUSED(stepgraph_bind(pipeline, &step, NULL, 1, NULL, 0), STEPGRAPH_INVALID_ARGUMENT, "layers is null");
    EXPECT_REFUSED(stepgraph_bind(pipeline, &step, layer, SIZE_MAX, NULL, 0), STEPGRAPH_INVALID_ARGUMENT,
                   "layer_count is 18446744073709551615, must be at most");
    EXPECT_REFUSED(stepgraph_capture(pipeline, &bucket, SIZE_MAX, NULL, NULL), STEPGRAPH_INVALID_ARGUMENT,
                   "bucket_count is 18446744073709551615, must be at most");
    EXPECT_REFUSED(stepgraph_bind(pipeline, &step, layer, 1, NULL, 0), STEPGRAPH_INVALID_ARGUMENT, "layers[0].size is 0");
    layer[0].size = sizeof layer[0];
    EXPECT_REFUSED(stepgraph_bind(pipeline, &step, layer, 2, NULL, 0), STEPGRAPH_INVALID_ARGUMENT, "layers[1].size is 0");
    EXPECT_REFUSED(stepgraph_bind(pipeline, &step, layer, 1, NULL, 0), STEPGRAPH_INVALID_BUFFER, "is null");
    EXPECT_REFUSED(stepgraph_bind(pipeline, &step, NULL, 0, NULL, 0), STEPGRAPH_INVALID_BUFFER, "layers is empty");
    /* Addresses that nobody follows before they are refused. */
    step.seq_lens = (const int32_t*)4098;
    EXPECT_REFUSED(stepgraph_bind(pipeline, &step, layer, 1, NULL, 0), STEPGRAPH_INVALID_BUFFER,
                   "step buffers: seq_lens is 0x1002, must be aligned to 4 bytes");
    step.seq_lens = step.query_lens = step.block_table = (const int32_t*)4096;
    EXPECT_REFUSED(stepgraph_bind(pipeline, &step, layer, 1, (void*)4224, bytes), STEPGRAPH_INVALID_BUFFER,
                   "workspace is 0x1080, must be aligned to 256 bytes");
    EXPECT_REFUSED(stepgraph_bind(pipeline, &step, layer, 1, (void*)4096, bytes - 1), STEPGRAPH_WORKSPACE_TOO_SMALL,
                   "must be at least");
    layer[0].iq = (const void*)4096;
    EXPECT_REFUSED(stepgraph_bind(pipeline, &step, layer, 1, (void*)4096, bytes), STEPGRAPH_INVALID_BUFFER,
                   "layer 0: projected is null");
    layer[0].hidden = (const void*)8192;
    EXPECT_REFUSED(stepgraph_bind(pipeline, &step, layer, 1, (void*)4096, bytes), STEPGRAPH_INVALID_BUFFER,
                   "layer 0: hidden is 0x2000, must be null where iq and projected are handed over");
    filled.size = 0;
    EXPECT_REFUSED(stepgraph_get_geometry(pipeline, &filled), STEPGRAPH_INVALID_ARGUMENT, "geometry.size is 0");

    EXPECT_OK(stepgraph_destroy(pipeline));
    EXPECT_REFUSED(stepgraph_destroy(pipeline), STEPGRAPH_INVALID_ARGUMENT, "that was not destroyed");
    EXPECT_REFUSED(stepgraph_replay(pipeline, 1, NULL), STEPGRAPH_INVALID_ARGUMENT, "that was not destroyed");
    EXPECT_REFUSED(stepgraph_workspace_bytes(NULL, &bytes), STEPGRAPH_INVALID_ARGUMENT, "pipeline is null");
    EXPECT_REFUSED(stepgraph_workspace_bytes((stepgraph_pipeline*)&step, &bytes), STEPGRAPH_INVALID_ARGUMENT,
                   "must be a handle of stepgraph_create");
    EXPECT_OK(stepgraph_workspace_bytes(other, &bytes));
    EXPECT_OK(stepgraph_destroy(other));
    EXPECT_OK(stepgraph_destroy(NULL));
}

static void* device_zeros(size_t bytes) {
    void* memory = NULL;
    EXPECT(cudaMalloc(&memory, bytes) == cudaSuccess && cudaMemset(memory, 0, bytes) == cudaSuccess);
    return memory;
}
static void* device_copy(const int32_t* values, size_t count) {
    void* memory = device_zeros(count * sizeof *values);
    EXPECT(cudaMemcpy(memory, values, count * sizeof *values, cudaMemcpyHostToDevice) == cudaSuccess);
    return memory;
}

struct calls {
    stepgraph_pipeline* pipeline;
    int count;
    int fail_at;
};
static int after_layer(int32_t layer, int32_t bucket, stepgraph_stream stream, void* user) {
    struct calls* calls = user;
    EXPECT(layer == calls->count % layers && (bucket == 2 || bucket == rows) && stream != NULL);
    EXPECT_REFUSED(stepgraph_destroy(calls->pipeline), STEPGRAPH_WRONG_ORDER, "destroy was called from after_layer");
    EXPECT_REFUSED(stepgraph_capture(calls->pipeline, &bucket, 1, NULL, NULL), STEPGRAPH_WRONG_ORDER, "from after_layer");
    return calls->count++ == calls->fail_at ? 42 : 0;
}

/* With no more keys than top_k every row selects its positions in order: the result is known without a reference. */
static void expect_positions(const int32_t* device_indices, const int32_t* bounds) {
    int32_t indices[rows * top_k];
    EXPECT(cudaMemcpy(indices, device_indices, sizeof indices, cudaMemcpyDeviceToHost) == cudaSuccess);
    for (int row = 0; row < rows; ++row) {
        for (int i = 0; i < top_k; ++i) {
            EXPECT(indices[row * top_k + i] == (i < bounds[row] ? i : -1));
        }
    }
}

static void run_steps(void) {
    const stepgraph_geometry geometry = small_geometry();
    stepgraph_pipeline* pipeline = NULL;
    size_t bytes = 0;
    EXPECT_OK(stepgraph_create(&geometry, NULL, &pipeline));
    EXPECT_OK(stepgraph_workspace_bytes(pipeline, &bytes));
    stepgraph_geometry filled;
    filled.size = sizeof filled;
    EXPECT_OK(stepgraph_get_geometry(pipeline, &filled));

    const int32_t seq_lens[requests] = {5, 7};
    const int32_t query_lens[requests] = {1, 2};
    const int32_t bounds[rows] = {5, 6, 7, 0};
    const int32_t table[requests * columns] = {3, 100, 100, 100, 6, 100, 100, 100}; /* behind the first: never read */
    stepgraph_step_buffers step;
    memset(&step, 0, sizeof step);
    step.size = sizeof step;
    step.seq_lens = device_copy(seq_lens, requests);
    step.query_lens = device_copy(query_lens, requests);
    step.block_table = device_copy(table, requests * columns);
    stepgraph_layer_buffers layer[layers];
    memset(layer, 0, sizeof layer);
    for (int i = 0; i < layers; ++i) {
        layer[i].size = sizeof layer[i];
        layer[i].iq = device_zeros(rows * heads * 128 * 2);
        layer[i].projected = device_zeros((size_t)(rows * filled.projected_columns) * 2);
        layer[i].k_norm_weight = device_zeros(128 * sizeof(float));
        layer[i].k_norm_bias = device_zeros(128 * sizeof(float));
        layer[i].cache = device_zeros((size_t)(filled.pages * filled.page_stride_bytes));
        layer[i].indices = device_zeros(rows * top_k * sizeof(int32_t));
    }
    void* workspace = device_zeros(bytes);
    EXPECT_REFUSED(stepgraph_bind(pipeline, &step, layer, layers, workspace, bytes - 1), STEPGRAPH_WORKSPACE_TOO_SMALL,
                   "must be");
    EXPECT_OK(stepgraph_bind(pipeline, &step, layer, layers, workspace, bytes));

    const int32_t buckets[] = {2, rows};
    struct calls calls = {pipeline, 0, 3};
    EXPECT_REFUSED(stepgraph_capture(pipeline, buckets, 2, after_layer, &calls), STEPGRAPH_CALLBACK_FAILED,
                   "after_layer returned 42 for layer 1 of bucket 4, must return 0");
    EXPECT_REFUSED(stepgraph_replay(pipeline, rows, NULL), STEPGRAPH_WRONG_ORDER, "before capture");
    calls.count = 0;
    calls.fail_at = -1;
    EXPECT_OK(stepgraph_capture(pipeline, buckets, 2, after_layer, &calls));
    EXPECT(calls.count == 2 * layers);
    EXPECT_REFUSED(stepgraph_replay(pipeline, rows + 1, NULL), STEPGRAPH_INVALID_ROWS, "rows is 5");

    cudaStream_t stream = NULL;
    EXPECT(cudaStreamCreate(&stream) == cudaSuccess);
    EXPECT_OK(stepgraph_reset_status(pipeline, stream));
    EXPECT_OK(stepgraph_replay(pipeline, 3, stream));
    EXPECT(cudaStreamSynchronize(stream) == cudaSuccess);
    for (int i = 0; i < layers; ++i) {
        expect_positions(layer[i].indices, bounds);
        EXPECT(cudaMemset(layer[i].indices, 0xA5, rows * top_k * sizeof(int32_t)) == cudaSuccess);
    }
    EXPECT_OK(stepgraph_enqueue_layout(pipeline, rows, stream));
    for (int i = 0; i < layers; ++i) {
        EXPECT_OK(stepgraph_enqueue_layer(pipeline, i, rows, stream));
    }
    EXPECT_REFUSED(stepgraph_enqueue_layer(pipeline, layers, rows, stream), STEPGRAPH_INVALID_LAYER, "layer is 2");
    EXPECT(cudaStreamSynchronize(stream) == cudaSuccess);
    for (int i = 0; i < layers; ++i) {
        expect_positions(layer[i].indices, bounds);
    }
    stepgraph_status status;
    status.size = sizeof status;
    EXPECT_OK(stepgraph_read_status(pipeline, stream, &status));
    EXPECT(status.invalid_slots == 0 && status.invalid_blocks == 0 && status.clamped_bounds == 0 && status.dropped_rows == 0);
    status.size = 0;
    EXPECT_REFUSED(stepgraph_read_status(pipeline, stream, &status), STEPGRAPH_INVALID_ARGUMENT, "status.size is 0");
    EXPECT_OK(stepgraph_destroy(pipeline));
    EXPECT(cudaStreamDestroy(stream) == cudaSuccess);
}

int main(void) {
    EXPECT(stepgraph_version() ==
           STEPGRAPH_VERSION_MAJOR * 10000 + STEPGRAPH_VERSION_MINOR * 100 + STEPGRAPH_VERSION_PATCH);
    check_structs();
    check_handles();
    int devices = 0;
    const int has_gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
    if (has_gpu) {
        run_steps();
    }
    if (failures > 0) {
        return 1;
    }
    if (!has_gpu) {
        printf("needs an NVIDIA GPU for the rest: there is none\n");
        return 77;
    }
    return 0;
}
