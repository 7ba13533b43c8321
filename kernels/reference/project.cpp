#include "project.h"

#include <vector>

#include <stepgraph/layouts/number_formats.h>

namespace stepgraph::reference {

void project(const __nv_bfloat16* x, const __nv_bfloat16* w, int rows, int columns, int depth, __nv_bfloat16* out) {
    std::vector<double> activations(static_cast<size_t>(depth));
    for (int64_t row = 0; row < rows; ++row) {
        for (int k = 0; k < depth; ++k) {
            activations[static_cast<size_t>(k)] = float_from_bf16(x[row * depth + k]);
        }
        for (int64_t n = 0; n < columns; ++n) {
            double sum = 0;
            for (int k = 0; k < depth; ++k) {
                sum += activations[static_cast<size_t>(k)] * static_cast<double>(float_from_bf16(w[n * depth + k]));
            }
            out[row * columns + n] = bf16_from_float(static_cast<float>(sum));
        }
    }
}

}  // namespace stepgraph::reference
