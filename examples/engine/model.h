// The stand-in model: small enough that what it says can be told without floating point.
//
// A token is a word of 24. In each layer a row looks for the earlier tokens of one word (in the first layer its own),
// attends to the 8 that the indexer selects, and from their values makes the word that the next layer looks for; the last
// one's is the prediction. Keys and queries are rows of a Hadamard matrix: two words' product is 128 or exactly 0, in FP8
// too, so that the indexer's choice is known: tokens of the word first, then the others, each by position.
#pragma once

#include <cstddef>
#include <vector>

#if defined(__CUDACC__)
#define MODEL_HD __host__ __device__
#else
#define MODEL_HD
#endif

namespace model {

inline constexpr int words = 24;
inline constexpr int layers = 3;
inline constexpr int heads =
    32;  // their factor is a power of two, so that equal logits are equal in every order of summation
inline constexpr int top_k = 8;

/// Column of a word's row. Row 0 of the matrix is left out: it alone has a mean, which the key's LayerNorm would take away.
MODEL_HD inline float code(int word, int column) {
    unsigned bits = static_cast<unsigned>((word + 1) & column);
    bool odd = false;
    for (; bits != 0; bits &= bits - 1) {
        odd = !odd;
    }
    return odd ? -1.0F : 1.0F;
}

/// What attention reads of a token: enough to tell one position from another.
MODEL_HD inline int value(int word, int position) {
    return 31 * position + word;
}

/// The word that the next layer looks for, from the sum of the values that were attended to.
MODEL_HD inline int next_word(int layer, int sum) {
    return (sum + layer) % words;
}

/// The indexer's choice among the first `end` tokens.
inline std::vector<int> select(const std::vector<int>& tokens, int end, int word) {
    std::vector<int> positions;
    for (const bool matching : {true, false}) {
        for (int position = 0; position < end && static_cast<int>(positions.size()) < top_k; ++position) {
            if ((tokens[static_cast<size_t>(position)] == word) == matching) {
                positions.push_back(position);
            }
        }
    }
    return positions;
}

/// The reference: the word that the model predicts behind the first `end` tokens.
inline int predict(const std::vector<int>& tokens, int end) {
    int word = tokens[static_cast<size_t>(end) - 1];
    for (int layer = 0; layer < layers; ++layer) {
        int sum = 0;
        for (const int position : select(tokens, end, word)) {
            sum += value(tokens[static_cast<size_t>(position)], position);
        }
        word = next_word(layer, sum);
    }
    return word;
}

}  // namespace model
