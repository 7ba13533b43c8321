// The search for the K-th largest key of a row, by the blocks of one cluster.
//
// A range of keys that holds it is narrowed: a histogram over the range names the bin that holds it, which is the next
// range. A block alone counts its keys. The blocks of a cluster guess a range from a sample of the row, the same in each;
// they exchange the keys in the range and how many lie above it, which shows whether the guess was right, and each narrows
// alone.
#pragma once

#include "select_keys.h"

namespace stepgraph::selecting {

/// What wins: keys above `key`, and of those that equal it the first `equal_winners` of the row.
struct Threshold {
    uint32_t key;
    uint32_t equal_winners;
    bool all_win;             // keys from `key` on, without counting
    uint32_t winners_before;  // of the blocks before this one: keys above, or keys that win if all do
    uint32_t equal_before;    // keys that equal it; 0 if all win
};

/// Neighbouring bins of a thread, the first thread has the highest.
struct ThreadBins {
    static constexpr int each = bins / threads;

    __device__ __forceinline__ explicit ThreadBins(int which) {
#pragma unroll
        for (int i = 0; i < each; i += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(&shared().histogram[which][highest() - i - 3]);
            counts[i] = four.w;
            counts[i + 1] = four.z;
            counts[i + 2] = four.y;
            counts[i + 3] = four.x;
        }
#pragma unroll
        for (int i = 0; i < each; ++i) {
            sum += counts[i];
        }
    }

    __device__ __forceinline__ static int highest() {
        return bins - 1 - thread() * each;
    }

    uint32_t counts[each];  // from the highest bin down
    uint32_t sum = 0;
};

/// Finds the bins of the keys of these ranks, the largest key's being 1, the last's the histogram's number of keys. All
/// threads of the block; two barriers. The histogram must be complete and visible.
template <int ranks>
__device__ __forceinline__ void find_bins(int which, uint32_t first_rank, uint32_t second_rank) {
    const ThreadBins own(which);
    const uint32_t warp_total = __reduce_add_sync(whole_warp, own.sum);
    const uint32_t warps_before = sum_warps(warp_total, shared().warp_words[0]).before;
#pragma unroll
    for (int i = 0; i < ranks; ++i) {
        const uint32_t rank = i == 0 ? first_rank : second_rank;
        if (warps_before < rank && rank <= warps_before + warp_total) {
            const uint32_t up_to = warps_before + inclusive_warp_sum(own.sum);
            const uint32_t before = up_to - own.sum;
            if (before < rank && rank <= up_to) {
                // Of the counts up to each bin, the last below the rank and the first that is not.
                uint32_t passed = 0;
                uint32_t above = before;
                uint32_t with_bin = up_to;
                uint32_t up_to_bin = before;
#pragma unroll
                for (const uint32_t count : own.counts) {
                    up_to_bin += count;
                    passed += up_to_bin < rank ? 1U : 0U;
                    above = max(above, up_to_bin < rank ? up_to_bin : 0U);
                    with_bin = min(with_bin, up_to_bin < rank ? up_to : up_to_bin);
                }
                shared().found[i] = {static_cast<uint32_t>(own.highest()) - passed, above, with_bin - above};
            }
        }
    }
    __syncthreads();  // the bins are found
}

/// Of 64 counts in each block's copy of `counts`, the one in which the wanted-th largest key lies, looked at from the
/// highest down, and what of it and above it belongs to the blocks before. One warp.
inline __device__ __noinline__ FoundBin find_among_64(uint32_t counts, uint32_t wanted, RowBlocks blocks,
                                                      BlocksBefore& before) {
    const uint32_t own = counts + static_cast<uint32_t>(segment_bins - 2 - 2 * lane()) * sizeof(uint32_t);
    uint32_t high = 0;
    uint32_t low = 0;
    uint32_t high_before = 0;
    uint32_t low_before = 0;
#pragma unroll 4
    for (int block = 0; block < blocks.count; ++block) {
        const uint2 pair = load_pair_from_block(address_in_block(own, block));
        high += pair.y;
        low += pair.x;
        high_before += block < blocks.rank ? pair.y : 0;
        low_before += block < blocks.rank ? pair.x : 0;
    }
    const uint32_t above = inclusive_warp_sum(high + low) - high - low;
    const bool here = above < wanted && wanted <= above + high + low;
    const int source = __ffs(static_cast<int>(__ballot_sync(whole_warp, here))) - 1;
    const bool is_high = wanted <= above + high;
    before.inside = __shfl_sync(whole_warp, is_high ? high_before : low_before, source);
    before.above = __reduce_add_sync(whole_warp, lane() < source ? high_before + low_before : 0U) +
                   __shfl_sync(whole_warp, is_high ? 0 : high_before, source);
    FoundBin found;
    found.bin = __shfl_sync(whole_warp, static_cast<uint32_t>(segment_bins - 1 - 2 * lane() - (is_high ? 0 : 1)), source);
    found.above = __shfl_sync(whole_warp, above + (is_high ? 0 : high), source);
    found.count = __shfl_sync(whole_warp, is_high ? high : low, source);
    return found;
}

/// Finds the bin of the wanted-th largest key of all blocks, in shared().found[0] and found_before. All threads of the row's
/// blocks; a barrier of the cluster, behind which the others read sums of 64 bins and then those they need.
__device__ __forceinline__ void find_bin_in_cluster(int which, int round, uint32_t wanted, RowBlocks blocks) {
    static_assert(segments == segment_bins);  // both are searched by the same code
    const ThreadBins own(which);
    constexpr int threads_a_segment = segment_bins / ThreadBins::each;
    uint32_t sum = own.sum;
#pragma unroll
    for (int distance = 1; distance < threads_a_segment; distance *= 2) {
        sum += __shfl_xor_sync(whole_warp, sum, distance);
    }
    uint32_t* segment_sums = shared().segment_sums[round];
    if (thread() % threads_a_segment == 0) {
        segment_sums[own.highest() / segment_bins] = sum;
    }
    cluster_arrive();
    cluster_wait();  // for the sums and the histograms of the other blocks
    if (warp() == 0) {
        BlocksBefore before;
        const FoundBin segment = find_among_64(shared_address(segment_sums), wanted, blocks, before);
        const uint32_t above_before = before.above;
        const uint32_t* counts = &shared().histogram[which][segment.bin * segment_bins];
        const FoundBin found = find_among_64(shared_address(counts), wanted - segment.above, blocks, before);
        if (thread() == 0) {
            shared().found[0] = {segment.bin * segment_bins + found.bin, segment.above + found.above, found.count};
            shared().found_before = {before.inside, above_before + before.above};
        }
    }
    __syncthreads();  // the bin is found
}

/// How many vectors of four keys a thread has of the sample of a row of `end` keys: one for every 2^16 keys or part of them,
/// up to a million. Between the borders of a guess then lie fewer keys than can be exchanged, if the row is like most.
__host__ __device__ constexpr int log_sample_vectors(int end) {
    int log = 0;
    while (log < 4 && end > 1 << (16 + log)) {
        ++log;
    }
    return log;
}

/// Some keys of a row for each thread, in vectors of four that are spread evenly over it; the same in all blocks of the row.
class Sample {
public:
    /// Asks for the first two vectors; rows of 2048 keys or more.
    __device__ __forceinline__ Sample(const RowMemory& row, int end)
        : first_(reinterpret_cast<const float4*>(row.aligned) + (row.skew != 0 ? 1 : 0)),
          row_vectors_((row.skew + end) / vector_keys - (row.skew != 0 ? 1 : 0)),
          log_vectors_(log_sample_vectors(end)),
          first_vector_(vector(0)) {
        if (log_vectors_ > 0) {
            second_vector_ = vector(1);
        }
    }

    [[nodiscard]] __device__ __forceinline__ int n() const { return vector_keys * threads << log_vectors_; }

    /// Visits this thread's keys: the first two vectors' at once, others from memory.
    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        visit_four(first_vector_, visit);
        if (log_vectors_ > 0) {
            visit_four(second_vector_, visit);
#pragma unroll 1
            for (int i = 2; i < 1 << log_vectors_; ++i) {
                visit_four(vector(i), visit);
            }
        }
    }

private:
    [[nodiscard]] __device__ __forceinline__ float4 vector(int i) const {
        const auto sample = static_cast<uint64_t>((thread() << log_vectors_) + i);
        return __ldcg(first_ + (sample * static_cast<unsigned>(row_vectors_) >> (log_threads + log_vectors_)));
    }
    template <typename Visit>
    __device__ __forceinline__ static void visit_four(const float4& four, Visit visit) {
        visit(order_key(four.x));
        visit(order_key(four.y));
        visit(order_key(four.z));
        visit(order_key(four.w));
    }

    const float4* first_;
    int row_vectors_;
    int log_vectors_;
    float4 first_vector_;
    float4 second_vector_{};
};

/// Least and largest of all threads' values. All threads of the block; one barrier.
__device__ __forceinline__ Range range_of_block(uint32_t least, uint32_t most, WarpWords& first, WarpWords& second) {
    least = __reduce_min_sync(whole_warp, least);
    most = __reduce_max_sync(whole_warp, most);
    if (lane() == 0) {
        first.words[warp()] = least;
        second.words[warp()] = most;
    }
    __syncthreads();  // all warps' values are there
    return {__reduce_min_sync(whole_warp, first.words[lane() % warps]),
            __reduce_max_sync(whole_warp, second.words[lane() % warps]), 0};
}

/// Where the K-th largest key of a row lies if a sample of the row tells the truth.
struct Guess {
    Range range;  // its wanted-th is yet unknown
    // Perhaps it is this key, just below the range, which very many may equal: they are counted and not looked at. 0: none.
    uint32_t heavy;

    /// The least key that may win.
    [[nodiscard]] __device__ __forceinline__ uint32_t bound() const { return heavy != 0 ? heavy : range.low; }
};

/// The same guess in all blocks of the row. All threads of the block. Leaves histogram[0] used.
__device__ __forceinline__ Guess guess_from(const Sample& sample, int end, int top_k) {
    // The K-th of the row is about the expected-th of the sample. Four standard deviations to either side, and some more
    // where few are expected: a wrong guess costs time alone.
    const float expected = __fdividef(static_cast<float>(sample.n()) * static_cast<float>(top_k), static_cast<float>(end));
    const float deviation = __fmaf_rn(4.0F * expected, rsqrtf(expected), 3.0F);  // the same bits wherever it stands
    const auto low_rank = static_cast<uint32_t>(expected + deviation);
    const auto high_rank = static_cast<uint32_t>(max(expected - deviation, 0.0F));

    const auto samples = static_cast<uint32_t>(sample.n());
    uint32_t least = 0xFFFFFFFFU;
    uint32_t most = 0;
    sample.each([&](uint32_t key) {
        least = min(least, key);
        most = max(most, key);
    });
    const Range all = range_of_block(least, most, shared().warp_words[1], shared().warp_words[2]);
    // Most bins to the octaves below the largest key, where the K-th mostly lies; the lowest bin holds all that is smaller.
    constexpr uint32_t octaves = 6;
    Range window{max(all.low, all.high - (octaves << 23U)), all.high, 0};
    for (;;) {
        const int shift = window.shift();
        sample.each(
            [&](uint32_t key) { atomicAdd(&shared().histogram[0][(max(key, window.low) - window.low) >> shift], 1U); });
        __syncthreads();  // the histogram is complete
        find_bins<2>(0, min(low_rank, samples), max(high_rank, 1U));
        const uint32_t low_bin = shared().found[0].bin;
        if (low_bin == 0 && window.low > all.low) {
            clear_histogram(0);
            window.low = all.low;
            __syncthreads();  // the histogram is clear
            continue;
        }
        Range range{low_rank > samples ? 1U : window.low + (low_bin << shift),
                    high_rank < 1 ? 0xFFFFFFFFU : window.low + ((shared().found[1].bin + 1U) << shift) - 1U, 0};
        Guess guess{range, 0};
        if (shared().found[0].count > samples / 8) {
            const Range bin{range.low, range.low + ((1U << shift) - 1U), 0};
            uint32_t least_in_bin = 0xFFFFFFFFU;
            uint32_t most_in_bin = 0;
            sample.each([&](uint32_t key) {
                least_in_bin = bin.holds(key) ? min(least_in_bin, key) : least_in_bin;
                most_in_bin = bin.holds(key) ? max(most_in_bin, key) : most_in_bin;
            });
            const Range in_bin = range_of_block(least_in_bin, most_in_bin, shared().warp_words[3], shared().warp_words[4]);
            if (in_bin.low == in_bin.high) {
                guess = {{in_bin.low + 1, max(range.high, in_bin.low + 1), 0}, in_bin.low};
            }
        }
        return guess;
    }
}

/// Narrows `range` until it tells what wins, of `n` keys at word `at` of the area, that histogram `which` counts. All
/// threads of the block. Whether all keys in the range win; else the range is one key.
__device__ __forceinline__ bool narrow(Range& range, int at, int n, int which) {
    for (;;) {
        const int shift = range.shift();
        find_bins<1>(which, range.wanted, 0);
        const FoundBin found = shared().found[0];
        range.narrow(found, shift);
        if (found.count == range.wanted) {
            return true;
        }
        if (shift == 0) {
            return false;
        }
        if (found.count <= few_keys) {
            each_key(at, n, [&](uint32_t key) {
                if (range.holds(key)) {
                    shared().few[atomicAdd(&shared().few_count, 1U)] = key;
                }
            });
            __syncthreads();  // the few are there
            const uint32_t key = lane() < static_cast<int>(found.count) ? shared().few[lane()] : 0;
            uint32_t above = 0;
            uint32_t equal = 0;
#pragma unroll 1
            for (uint32_t i = 0; i < found.count; ++i) {
                const uint32_t other = __shfl_sync(whole_warp, key, static_cast<int>(i));
                above += other > key ? 1U : 0U;
                equal += other == key ? 1U : 0U;
            }
            const bool is_last = key != 0 && above < range.wanted && range.wanted <= above + equal;
            const int source = __ffs(static_cast<int>(__ballot_sync(whole_warp, is_last))) - 1;
            range.low = __shfl_sync(whole_warp, key, source);
            range.wanted -= __shfl_sync(whole_warp, above, source);
            return __shfl_sync(whole_warp, equal, source) == range.wanted;
        }
        clear_histogram(which);
        __syncthreads();  // the histogram is clear
        const int next_shift = range.shift();
        each_key(at, n, [&](uint32_t key) { range.count(which, key, next_shift); });
        __syncthreads();  // the histogram is complete
    }
}

/// Of the keys that a thread, a block or the blocks before have: how many lie where a guess divides them.
struct KeyCounts {
    uint32_t above = 0;   // the range
    uint32_t inside = 0;  // the range
    uint32_t heavy = 0;   // are the heavy key

    __device__ __forceinline__ void see(const Guess& guess, uint32_t key) {
        above += key > guess.range.high ? 1U : 0U;
        inside += guess.range.holds(key) ? 1U : 0U;
        heavy += key == guess.heavy ? 1U : 0U;
    }
};

/// Publishes this block's counts, and its keys in the range, those that each_key() shows of `n` keys. `seen`: the same by
/// thread. All threads of the block.
__device__ __forceinline__ void keep(const Guess& guess, int n, const KeyCounts& seen) {
    const uint32_t up_to = inclusive_warp_sum(seen.inside);
    const uint32_t above = __reduce_add_sync(whole_warp, seen.above);
    const uint32_t heavy = __reduce_add_sync(whole_warp, seen.heavy);
    uint32_t at = 0;
    if (lane() == lanes - 1) {
        at = atomicAdd(&shared().kept[1], up_to);
        atomicAdd(&shared().kept[0], above);
        atomicAdd(&shared().kept[2], guess.heavy != 0 ? heavy : 0);
    }
    at = __shfl_sync(whole_warp, at, lanes - 1) + up_to - seen.inside;
    if (at + seen.inside <= exchanged_keys) {  // else nobody will ask for them
        each_key(0, n, [&](uint32_t key) {
            const bool inside = guess.range.holds(key);
            if (inside) {
                shared().area[kept_at + at] = key;
            }
            at += inside ? 1U : 0U;
        });
    }
}

/// Fetches the keys that each block kept, `counts` a lane of block `lane`, and counts them in histogram[1].
__device__ __forceinline__ void gather(const Range& range, uint32_t inside, uint32_t inside_up_to, RowBlocks blocks) {
    const int warps_a_block = warps / blocks.count;
    const int source = warp() / warps_a_block;
    const auto n = static_cast<int>(__shfl_sync(whole_warp, inside, source));
    const auto to = gathered_at + static_cast<int>(__shfl_sync(whole_warp, inside_up_to - inside, source));
    const uint32_t from = address_in_block(shared_address(&shared().area[kept_at]), source);
    const int shift = range.shift();
    const int step = warps_a_block * lanes;
    constexpr int batch = 4;
#pragma unroll 1
    for (int i = warp() % warps_a_block * lanes + lane(); i < n; i += batch * step) {
        uint32_t keys[batch];
#pragma unroll
        for (int k = 0; k < batch; ++k) {
            keys[k] = load_from_block(from + static_cast<uint32_t>(min(i + k * step, n - 1)) * sizeof(uint32_t));
        }
#pragma unroll
        for (int k = 0; k < batch; ++k) {
            if (i + k * step < n) {
                shared().area[to + i + k * step] = keys[k];
                range.count(1, keys[k], shift);
            }
        }
    }
}

/// Where the search goes on when all counts are known: the K-th largest key is the heavy one, or lies in the range, or
/// neither.
enum class Outcome { wrong, heavy, range };

/// `total`: of all blocks of the row. Sets range.wanted, or the threshold where the heavy key is it.
__device__ __forceinline__ Outcome outcome_of(Guess& guess, int top_k, const KeyCounts& total, const KeyCounts& before,
                                              Threshold& threshold) {
    const auto k = static_cast<uint32_t>(top_k);
    if (total.above >= k || total.above + total.inside + total.heavy < k) {
        return Outcome::wrong;
    }
    threshold.winners_before = before.above;
    guess.range.wanted = k - total.above;
    if (guess.range.wanted <= total.inside) {
        return Outcome::range;
    }
    threshold.key = guess.heavy;
    threshold.equal_winners = guess.range.wanted - total.inside;
    threshold.all_win = false;
    threshold.winners_before += before.inside;
    threshold.equal_before = before.heavy;
    return Outcome::heavy;
}

/// Finds what wins of the row; false if the guess is wrong or too many keys lie in its range, the same in all blocks. `n`:
/// this block's keys, among them all from guess.bound() on, of the heavy one at least K; < 0 if they could not be had.
/// `seen` as for keep(). All threads of the row's blocks; where it succeeds, cluster_wait() must follow once.
__device__ __forceinline__ bool search_in_cluster(Guess guess, int n, const KeyCounts& seen, int top_k, RowBlocks blocks,
                                                  Threshold& threshold) {
    if (n >= 0) {
        keep(guess, n, seen);
    } else if (thread() == 0) {
        shared().kept[0] = static_cast<uint32_t>(most_winners);  // above: wrong
    }
    cluster_arrive();
    cluster_wait();  // for the other blocks' counts and keys
    KeyCounts block;
    if (lane() < blocks.count) {
        const uint32_t kept = address_in_block(shared_address(shared().kept), lane());
        const uint2 pair = load_pair_from_block(kept);
        block = {pair.x, pair.y, load_from_block(kept + 2 * sizeof(uint32_t))};
    }
    const uint32_t up_to = inclusive_warp_sum(block.inside);
    const KeyCounts total{__reduce_add_sync(whole_warp, block.above), __shfl_sync(whole_warp, up_to, lanes - 1),
                          __reduce_add_sync(whole_warp, block.heavy)};
    const bool earlier = lane() < blocks.rank;
    const KeyCounts before{__reduce_add_sync(whole_warp, earlier ? block.above : 0),
                           __shfl_sync(whole_warp, up_to - block.inside, blocks.rank),
                           __reduce_add_sync(whole_warp, earlier ? block.heavy : 0)};
    const Outcome outcome = outcome_of(guess, top_k, total, before, threshold);
    if (outcome == Outcome::heavy) {
        cluster_arrive();  // this block reads no other one's memory any more
        return true;
    }
    if (outcome == Outcome::wrong || total.inside > exchanged_keys) {
        return false;
    }
    Range range = guess.range;
    gather(range, block.inside, up_to, blocks);
    if (thread() < vector_keys) {
        shared().area[gathered_at + static_cast<int>(total.inside) + thread()] = 0;
    }
    cluster_arrive();  // this block reads no other one's memory any more
    __syncthreads();   // the gathered keys and their histogram are complete
    threshold.all_win = narrow(range, gathered_at, static_cast<int>(total.inside), 1);
    // The winners among the keys of the blocks before, which come first.
    const uint32_t last = threshold.all_win ? range.low - 1 : range.low;
    uint32_t sums = 0;
#pragma unroll 1
    for (int i = thread(); i < static_cast<int>(before.inside); i += threads) {
        const uint32_t key = shared().area[gathered_at + i];
        sums += (key > last ? 1U : 0U) + (key == last ? 1U << 16U : 0U);
    }
    sums = sum_warps(__reduce_add_sync(whole_warp, sums), shared().warp_words[5]).total;
    threshold.key = range.low;
    threshold.equal_winners = range.wanted;
    threshold.winners_before += sums & 0xFFFFU;
    threshold.equal_before = threshold.all_win ? 0 : sums >> 16U;
    return true;
}

/// As search_in_cluster(), for the one block of a row.
__device__ __forceinline__ bool search_alone(Guess guess, int n, int top_k, Threshold& threshold) {
    if (n < 0) {
        return false;
    }
    KeyCounts seen;
    const int shift = guess.range.shift();
    each_key(0, n, [&](uint32_t key) {
        seen.see(guess, key);
        guess.range.count(1, key, shift);
    });
    // Two counts in a word: a block has fewer than 2^16 keys.
    const uint32_t sums = __reduce_add_sync(whole_warp, seen.above | seen.inside << 16U);
    const uint32_t total = sum_warps(sums, shared().warp_words[5]).total;
    const uint32_t heavy =
        guess.heavy == 0 ? 0 : sum_warps(__reduce_add_sync(whole_warp, seen.heavy), shared().warp_words[4]).total;
    const Outcome outcome = outcome_of(guess, top_k, {total & 0xFFFFU, total >> 16U, heavy}, {}, threshold);
    if (outcome == Outcome::range) {
        Range range = guess.range;
        threshold.all_win = narrow(range, 0, n, 1);
        threshold.key = range.low;
        threshold.equal_winners = range.wanted;
        threshold.equal_before = 0;
    }
    return outcome != Outcome::wrong;
}

}  // namespace stepgraph::selecting
