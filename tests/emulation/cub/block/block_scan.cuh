// CUB's BlockScan for the emulator, as far as the emulated kernels use it.
#pragma once

#include <functional>

#include "../../cuda_runtime.h"

namespace cub {

/// Like CUB's, it is done with its storage only where the caller's next barrier says so.
template <typename Value, int threads>
class BlockScan {
public:
    struct TempStorage {
        Value values[threads];
    };

    explicit BlockScan(TempStorage& storage) : values_(storage.values) {}

    /// `result`: of `initial` and the values of the threads before this one; `all`: of all values, without `initial`.
    template <typename Combine>
    void ExclusiveScan(Value value, Value& result, Value initial, Combine combine, Value& all, STEPGRAPH_PLACE) {
        values_[stepgraph::emulation::thread()] = value;
        stepgraph::emulation::block_barrier(place);
        Value before = initial;
        for (int t = 0; t < stepgraph::emulation::thread(); ++t) {
            before = combine(before, values_[t]);
        }
        all = values_[0];
        for (int t = 1; t < threads; ++t) {
            all = combine(all, values_[t]);
        }
        result = before;
    }
    void ExclusiveSum(Value value, Value& result, Value& all, STEPGRAPH_PLACE) {
        ExclusiveScan(value, result, Value{}, std::plus<Value>{}, all, place);
    }
    void ExclusiveSum(Value value, Value& result, STEPGRAPH_PLACE) {
        Value all;
        ExclusiveSum(value, result, all, place);
    }
    void InclusiveSum(Value value, Value& result, Value& all, STEPGRAPH_PLACE) {
        ExclusiveSum(value, result, all, place);
        result += value;
    }

private:
    Value* values_;
};

}  // namespace cub
