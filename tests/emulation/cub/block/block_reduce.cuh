// CUB's BlockReduce for the emulator, as far as the emulated kernels use it.
#pragma once

#include <functional>

#include "../../cuda_runtime.h"

namespace cub {

/// Like CUB's, it is done with its storage only where the caller's next barrier says so.
template <typename Value, int threads>
class BlockReduce {
public:
    struct TempStorage {
        Value values[threads];
    };

    explicit BlockReduce(TempStorage& storage) : values_(storage.values) {}

    /// In thread 0. The others get what nobody may use.
    template <typename Combine>
    Value Reduce(Value value, Combine combine, STEPGRAPH_PLACE) {
        const int thread = stepgraph::emulation::thread();
        values_[thread] = value;
        stepgraph::emulation::block_barrier(place);
        if (thread != 0) {
            return static_cast<Value>(0x5A5A5A5A);
        }
        Value all = values_[0];
        for (int t = 1; t < threads; ++t) {
            all = combine(all, values_[t]);
        }
        return all;
    }
    Value Sum(Value value, STEPGRAPH_PLACE) { return Reduce(value, std::plus<Value>{}, place); }

private:
    Value* values_;
};

}  // namespace cub
