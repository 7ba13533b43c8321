// One decode step of one layer from a safetensors file: what `stepgraph run` runs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <cuda_bf16.h>

#include <stepgraph/pipeline/geometry.h>

#include "safetensors.h"

namespace stepgraph::tools {

/// Shapes as in pipeline/buffers.h, with max_rows = R and max_requests = Q of the file.
struct Case {
    Geometry geometry;  // validated

    // Either these two, and the other four are empty, or the other way round.
    std::vector<__nv_bfloat16> iq;
    std::vector<__nv_bfloat16> projected;
    std::vector<__nv_bfloat16> q_c;
    std::vector<__nv_bfloat16> wq_b;
    std::vector<__nv_bfloat16> hidden;
    std::vector<__nv_bfloat16> w_kv;

    std::vector<float> k_norm_weight;
    std::vector<float> k_norm_bias;
    std::vector<int32_t> seq_lens;  // [>= max_requests]
    std::vector<int32_t> query_lens;
    std::vector<int32_t> block_table;
    std::vector<int64_t> slots;  // empty: derived from the block table
    std::vector<uint8_t> cache;  // before the step
};

/// Checks metadata, dtypes, shapes against each other and the geometry. Lengths, blocks and slots are data, which the stages
/// themselves bear, and are not looked at. Tensors and metadata that a case does not know are passed over. Throws CaseError
/// (without the file's name).
Case case_of(const Safetensors& file);

/// Throws CaseError.
Case load_case(const std::filesystem::path& path);

/// The cache format's word in case files and on the command line, and back; none for another word.
const char* format_name(CacheFormat format);
std::optional<CacheFormat> format_named(const std::string& name);

}  // namespace stepgraph::tools
