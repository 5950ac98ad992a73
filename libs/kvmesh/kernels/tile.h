// Tiles of 64 positions of a paged context in the layout that products of several rows take.
//
// Blocks are read in place: keys are transposed and values interleaved. Loads of the next tile are
// prefetched while the rows of a tile are computed, since few rows are faster than memory.

#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

// Shape of the pool for one layer; strides count elements.
struct Pool {
  int64_t block_stride, value_offset, block_size, kv_heads;
};

// Number of positions that are transposed at once.
constexpr int kTile = 64;

// Operand type of products: bf16 if the CPU multiplies pairs of them, else float.
template <typename T>
struct Factor {
  using Type = float;
};
#ifdef __AVX512BF16__
template <>
struct Factor<Bf16> {
  using Type = Bf16;
};
#endif

// Number of values in a lane: the pair or single float that one step of a product takes.
template <typename C>
constexpr int kLane = static_cast<int>(sizeof(float) / sizeof(C));

// Addresses of one KV head's keys and values at the positions of a tile.
template <typename T>
struct Cached {
  const T *keys[kTile], *values[kTile];

  // Prefetches one of some equal parts of them into the L2 cache; the L1 cache holds a tile of
  // positions and its rows already.
  void prefetch(int64_t part, int64_t parts, int64_t dim) const {
    constexpr int64_t kLine = 64 / sizeof(T);
    for (int64_t i = kTile * part / parts; i < kTile * (part + 1) / parts; ++i) {
      for (int64_t at = 0; at < dim; at += kLine) {
        __builtin_prefetch(keys[i] + at, 0, 2);
        __builtin_prefetch(values[i] + at, 0, 2);
      }
    }
  }
};

// Positions from `begin` to before `end` of one sequence, for one KV head.
template <typename T>
struct Context {
  const Pool& pool;
  // The head's first key in block 0 of the pool.
  const T* head;
  const int64_t* table;
  int64_t dim, begin, end;

  // Finds the positions of the tile that starts at `at`; zeros stand for those outside.
  void find(int64_t at, const T* zeros, Cached<T>& found) const {
    const int64_t size = pool.block_size, step = pool.kv_heads * dim;
    const int64_t first = std::max<int64_t>(0, begin - at);
    const int64_t last = std::min<int64_t>(kTile, end - at);
    for (int64_t i = 0; i < kTile; ++i)
      if (i < first || i >= last) found.keys[i] = found.values[i] = zeros;
    int64_t block = (at + first) / size, offset = (at + first) % size;
    for (int64_t i = first; i < last; ++block, offset = 0) {
      const T* key = head + table[block] * pool.block_stride + offset * step;
      for (; i < last && offset < size; ++i, ++offset, key += step) {
        found.keys[i] = key;
        found.values[i] = key + pool.value_offset;
      }
    }
  }
};

// Transposes as many vectors of 32-bit values as each has lanes.
template <typename V>
struct Square {
  static void turn(V (&rows)[kLanes<V>]) {
    constexpr int kCount = kLanes<V>;
    // Perfect shuffles, which interleave the first half of the rows with the second one.
    for (int left = kCount; left > 1; left /= 2) {
      V next[kCount];
      for (int i = 0; i < kCount / 2; ++i) {
        next[2 * i] = Interleaved<V>::low(rows[i], rows[i + kCount / 2]);
        next[2 * i + 1] = Interleaved<V>::high(rows[i], rows[i + kCount / 2]);
      }
      for (int i = 0; i < kCount; ++i) rows[i] = next[i];
    }
  }
};
// By quarters, which fit the registers.
template <typename V>
struct Square<Pair<V>> {
  static void turn(Pair<V> (&rows)[kLanes<Pair<V>>]) {
    constexpr int kHalf = kLanes<V>;
    for (int half = 0; half < 2; ++half) {
      V low[kHalf], high[kHalf];
      for (int i = 0; i < kHalf; ++i) {
        low[i] = half == 0 ? rows[i].low : rows[kHalf + i].low;
        high[i] = half == 0 ? rows[i].high : rows[kHalf + i].high;
      }
      Square<V>::turn(low);
      Square<V>::turn(high);
      for (int i = 0; i < kHalf; ++i) rows[half * kHalf + i] = {low[i], high[i]};
    }
    // The quarters beside the diagonal change places.
    for (int i = 0; i < kHalf; ++i) {
      const V beside = rows[i].high;
      rows[i].high = rows[kHalf + i].low;
      rows[kHalf + i].low = beside;
    }
  }
};

inline Words load_words(const float* from, float) { return bits_as<Words>(load(from)); }
inline Words load_words(const Bf16* from, float) { return bits_as<Words>(load(from)); }
inline Words load_words(const Bf16* from, Bf16) { return Whole<Words>::load(from); }

// Head size that products take: AMX multiplies at least 32 inputs, and others may be zero.
inline int64_t padded_dim(int64_t dim) { return std::max<int64_t>(dim, 32); }

// Keys and values of 64 positions in the layout of `multiply`.
template <typename T, typename C>
struct Tile {
  int64_t dim;
  // [padded dim / lane][64][lane] and [64 / lane][dim][lane].
  std::vector<C> keys, values;
  // A key or value of a position that is not there.
  std::vector<T> zeros;

  explicit Tile(int64_t dim)
      : dim(dim), keys(padded_dim(dim) * kTile), values(dim * kTile), zeros(dim) {}

  void fill(const Cached<T>& from) {
    constexpr int64_t kStep = kWidth * kLane<C>;
    for (int first = 0; first < kTile; first += kWidth) {
      int64_t at = 0;
      for (; at + kStep <= dim; at += kStep) fill_keys<kWidth>(&from.keys[first], first, at);
      if (at < dim) fill_keys<kWidth / kLane<C>>(&from.keys[first], first, at);
    }
    for (int i = 0; i < kTile; i += kLane<C>) fill_values(&from.values[i], i);
  }

 private:
  // Takes `COUNT` lanes of sixteen keys.
  template <int COUNT>
  void fill_keys(const T* const* rows, int first, int64_t at) {
    Words words[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      if constexpr (COUNT == kWidth) {
        words[i] = load_words(rows[i] + at, C{});
      } else {
        words[i] = Words{};
        std::memcpy(&words[i], rows[i] + at, COUNT * sizeof(float));
      }
    }
    Square<Words>::turn(words);
    C* const to = &keys[at * kTile + first * kLane<C>];
    for (int i = 0; i < COUNT; ++i) Whole<Words>::store(to + i * kLane<C> * kTile, words[i]);
  }

  void fill_values(const T* const* rows, int first) {
    C* const to = &values[first * dim];
    int64_t at = 0;
    if constexpr (kLane<C> == 1) {
      for (; at < dim; at += kWidth) store(to + at, load(rows[0] + at));
    } else {
#ifdef __AVX512BF16__
      const Words low = bits_as<Words>(lanes()) * 0x10001u + (32u << 16), high = low + 0x100010u;
      for (; at + 2 * kWidth <= dim; at += 2 * kWidth) {
        const __m512i even = _mm512_loadu_si512(rows[0] + at);
        const __m512i odd = _mm512_loadu_si512(rows[1] + at);
        _mm512_storeu_si512(to + 2 * at, _mm512_permutex2var_epi16(even, bits_as<__m512i>(low), odd));
        _mm512_storeu_si512(to + 2 * at + 2 * kWidth,
                            _mm512_permutex2var_epi16(even, bits_as<__m512i>(high), odd));
      }
#endif
      // A widened bf16 has its bits in the upper half.
      for (; at < dim; at += kWidth)
        Whole<Words>::store(to + 2 * at, bits_as<Words>(load(rows[0] + at)) >> 16 |
                                             bits_as<Words>(load(rows[1] + at)));
    }
  }
};

}  // namespace
