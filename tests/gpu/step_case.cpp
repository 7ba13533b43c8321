#include "step_case.h"

#include <algorithm>
#include <cstring>
#include <iostream>
#include <limits>
#include <numeric>

#include <stepgraph/tools/reference_shape.h>

namespace stepgraph::test {
namespace {

std::vector<__nv_bfloat16> random_bf16(size_t n, float deviation, Random& random) {
    std::normal_distribution<float> normal(0.0F, deviation);
    std::vector<__nv_bfloat16> values(n);
    for (auto& value : values) {
        value = bf16_from_float(normal(random));
    }
    return values;
}

/// Keys that an earlier step might have written: random codes, scales around 1.
void fill_cache(const Geometry& g, std::vector<uint8_t>& cache, Random& random) {
    std::uniform_int_distribution<int> byte(0, 255);
    std::uniform_int_distribution<int> exponent(-3, 3);
    for (auto& b : cache) {
        b = static_cast<uint8_t>(byte(random));
    }
    for (int64_t p = 0; p < g.pages; ++p) {
        uint8_t* page = page_address(cache.data(), p, g.page_stride_bytes);
        for (int t = 0; t < page_tokens; ++t) {
            for (int c = 0; c < head_dim && !is_mxfp4(g.cache_format); ++c) {
                uint8_t& code = page[payload_offset(g.cache_format, t, c)];
                code = (code & 0x7FU) == 0x7FU ? 0 : code;  // no NaN
            }
            const int token_exponent = exponent(random) - 8;
            for (int block = 0; block < 4; ++block) {
                const int e = is_mxfp4(g.cache_format) ? exponent(random) : token_exponent;
                page[scale_offset(g.cache_format, t, block)] = ue8m0_byte(e);
            }
            if (g.cache_format == CacheFormat::fp8) {
                const float scale = power_of_two(token_exponent);
                std::memcpy(page + scale_offset(g.cache_format, t, 0), &scale, sizeof scale);
            }
        }
    }
}

}  // namespace

Random fresh_random() {
    const uint64_t seed = std::random_device{}();
    std::cout << "seed " << seed << '\n';
    return Random(seed);
}

StepCase make_case(const CaseOptions& o, Random& random) {
    StepCase step;
    step.geometry = validate({.heads = o.heads,
                              .top_k = o.top_k,
                              .max_rows = o.max_rows,
                              .max_requests = o.max_requests,
                              .max_model_len = int64_t{o.columns} * page_tokens * o.dcp.world_size,
                              .block_table_columns = o.columns,
                              .block_table_stride = o.columns + 3,
                              .cache_format = o.format,
                              .pages = int64_t{o.max_requests} * o.columns + 2,
                              .page_stride_bytes = page_bytes(o.format) + o.extra_stride_bytes,
                              .q_lora_rank = o.project ? 128 : 0,
                              .hidden_size = o.project ? o.hidden_size : 0,
                              .projected_columns = o.projected_columns,
                              .key_column = o.key_column,
                              .weight_column = o.weight_column,
                              .dcp = o.dcp});
    const Geometry& g = step.geometry;

    step.pages_of_request.resize(static_cast<size_t>(g.pages));
    std::iota(step.pages_of_request.begin(), step.pages_of_request.end(), 0);
    std::shuffle(step.pages_of_request.begin(), step.pages_of_request.end(), random);

    std::normal_distribution<float> normal(0.0F, 1.0F);
    step.layers.resize(static_cast<size_t>(o.layers));
    for (LayerCase& layer : step.layers) {
        layer.k_norm_weight.resize(head_dim);
        layer.k_norm_bias.resize(head_dim);
        for (size_t c = 0; c < head_dim; ++c) {
            layer.k_norm_weight[c] = 1.0F + 0.1F * normal(random);
            layer.k_norm_bias[c] = 0.1F * normal(random);
        }
        if (o.project) {
            layer.wq_b = random_bf16(static_cast<size_t>(g.heads * head_dim * g.q_lora_rank), 0.1F, random);
            layer.w_kv = random_bf16(static_cast<size_t>(g.projected_columns * g.hidden_size), 0.1F, random);
        }
        layer.cache.resize(static_cast<size_t>(g.pages * g.page_stride_bytes));
        fill_cache(g, layer.cache, random);
    }
    step.draw_activations(random);
    step.draw_lengths(random, g.max_rows);
    return step;
}

void StepCase::draw_activations(Random& random) {
    const auto rows = static_cast<size_t>(geometry.max_rows);
    for (LayerCase& layer : layers) {
        if (geometry.projects()) {
            layer.q_c = random_bf16(rows * static_cast<size_t>(geometry.q_lora_rank), 1.0F, random);
            layer.hidden = random_bf16(rows * static_cast<size_t>(geometry.hidden_size), 1.0F, random);
        } else {
            layer.iq = random_bf16(rows * static_cast<size_t>(geometry.heads * head_dim), 1.0F, random);
            layer.projected = random_bf16(rows * static_cast<size_t>(geometry.projected_columns), 1.0F, random);
        }
    }
}

void StepCase::draw_lengths(Random& random, int rows) {
    const auto requests = static_cast<size_t>(geometry.max_requests);
    const auto longest = static_cast<int32_t>(geometry.width() * geometry.dcp.world_size);
    query_lens.assign(requests, 0);
    seq_lens.assign(requests, 0);
    std::uniform_int_distribution<int32_t> length(1, longest);
    std::uniform_int_distribution<int32_t> few(0, 4);
    int left = rows;
    for (size_t q = 0; q < requests; ++q) {
        query_lens[q] = std::min(few(random), left);
        left -= query_lens[q];
        seq_lens[q] = std::max(query_lens[q], length(random));
    }
    set_table();
}

void StepCase::set_lengths(int32_t seq_len, int32_t query_len) {
    seq_lens.assign(static_cast<size_t>(geometry.max_requests), seq_len);
    query_lens.assign(static_cast<size_t>(geometry.max_requests), query_len);
    set_table();
}

void StepCase::set_table() {
    const int32_t garbage[] = {-1, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()};
    block_table.resize(static_cast<size_t>(geometry.max_requests * geometry.block_table_stride));
    for (size_t i = 0; i < block_table.size(); ++i) {
        block_table[i] = garbage[i % 3];
    }
    for (int q = 0; q < geometry.max_requests; ++q) {
        const int64_t local = std::min(local_bound(seq_lens[static_cast<size_t>(q)], geometry.dcp), geometry.width());
        for (int64_t column = 0; column * page_tokens < local; ++column) {
            block_table[static_cast<size_t>(q * geometry.block_table_stride + column)] =
                pages_of_request[static_cast<size_t>(int64_t{q} * geometry.block_table_columns + column)];
        }
    }
}

reference::StepInputs inputs_of(const StepCase& step) {
    return {.seq_lens = step.seq_lens.data(),
            .query_lens = step.query_lens.data(),
            .num_requests = step.num_requests.empty() ? nullptr : step.num_requests.data(),
            .block_table = step.block_table.data(),
            .slots = step.slots.empty() ? nullptr : step.slots.data()};
}

reference::LayerInputs inputs_of(LayerCase& layer) {
    const auto pointer = [](const std::vector<__nv_bfloat16>& values) { return values.empty() ? nullptr : values.data(); };
    return {.q_c = pointer(layer.q_c),
            .hidden = pointer(layer.hidden),
            .wq_b = pointer(layer.wq_b),
            .w_kv = pointer(layer.w_kv),
            .iq = pointer(layer.iq),
            .projected = pointer(layer.projected),
            .k_norm_weight = layer.k_norm_weight.data(),
            .k_norm_bias = layer.k_norm_bias.data(),
            .cache = layer.cache.data()};
}

ExpectedStep expected_step(StepCase& step, int rows, bool all_logits) {
    const reference::Shape shape = tools::reference_shape(step.geometry, rows);
    ExpectedStep expected;
    expected.layout = reference::decode_layout(shape, inputs_of(step), &expected.status);
    for (LayerCase& layer : step.layers) {
        expected.layers.push_back(
            reference::layer(shape, inputs_of(step), inputs_of(layer), expected.layout, all_logits, &expected.status));
    }
    return expected;
}

}  // namespace stepgraph::test
