// Attention of one query per sequence over paged KV, with blocks read in place.
//
// For every 64 positions and each KV head, the code computes scores, weights and weighted sums in a
// row, while keys and values are in the L1 cache; it prefetches those of the next head meanwhile.
// With fewer sequences than threads, KV heads are divided among threads. If that does not come out
// even, contexts are split into parts that are merged at the end, as in Flash-Decoding.
// Twin: attention_reference.py.

#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <utility>

#include "prefill.h"
#include "scratch.h"
#include "vectors.h"

namespace {

struct Decode {
  const int64_t *tables, *lens;
  int64_t table_stride, sequences, heads, window;
  Scale scale;
  const float* sinks;
  Pool pool;
};

// Number of queries that share one load of keys or values.
constexpr int kQueries = 4;
// Type of queries in products.
template <typename T>
using Query = typename Factor<T>::Type;

// Online softmax of all heads of one sequence over a part of its context.
struct Softmax {
  // Per head: an upper bound of its scores, the sum of its weights in sixteen lanes, and the
  // weighted sum of values, not yet normalised.
  float *peaks, *totals, *acc;

  static int64_t size(int64_t heads, int64_t dim) { return heads * (1 + kWidth + dim); }

  static Softmax in(float* memory, int64_t heads) {
    return {memory, memory + heads, memory + heads * (1 + kWidth)};
  }

  // The same state, starting with head `head`.
  Softmax from(int64_t head, int64_t dim) const {
    return {peaks + head, totals + head * kWidth, acc + head * dim};
  }

  void reset(int64_t heads, int64_t dim) const {
    std::fill_n(peaks, heads, kNothing);
    std::fill_n(totals, heads * (kWidth + dim), 0.0f);
  }
};

// Addresses of some positions' keys, for the first KV head.
template <typename T>
struct Positions {
  const T* rows[kTile];
  int count;

  void find(const Decode& call, const T* kv, const int64_t* table, int64_t stride, int64_t first,
            int64_t last) {
    const Pool& pool = call.pool;
    count = static_cast<int>(std::min<int64_t>(kTile, last - first));
    int64_t block = first / pool.block_size, offset = first % pool.block_size;
    for (int i = 0; i < kTile; ++i) {
      // Missing positions repeat the last address, to fill vectors; their weight will be zero.
      rows[i] = i < count ? kv + table[block] * pool.block_stride + offset * stride : rows[i - 1];
      offset = offset + 1 == pool.block_size ? 0 : offset + 1;
      block += offset == 0 && i + 1 < count;
    }
  }

};

// Positions to prefetch while others are computed; `at` is the offset of a KV head's keys.
template <typename T>
struct Ahead {
  const Positions<T>* positions;
  int64_t at;

  template <int DIM>
  void fetch(int position, int64_t offset) const {
    if (positions == nullptr) return;
    const T* const from = positions->rows[position] + at + offset;
    for (int i = 0; i < DIM; i += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(from + i);
  }
};

// Number of a key's values in one step of a dot product.
template <typename T, int V>
constexpr int kStep = kWidth;
#ifdef __AVX512BF16__
template <int V>
constexpr int kStep<Bf16, V> = V % 2 == 0 ? 2 * kWidth : kWidth;
#endif

template <int STEP, typename T>
inline Floats add_products(Floats sum, const T* key, const Query<T>* query) {
#ifdef __AVX512BF16__
  if constexpr (STEP == 2 * kWidth)
    return bits_as<Floats>(_mm512_dpbf16_ps(bits_as<__m512>(sum),
                                            bits_as<__m512bh>(_mm512_loadu_si512(key)),
                                            bits_as<__m512bh>(_mm512_loadu_si512(query))));
#endif
  return sum + load(key) * load(query);
}

// Computes scores of H queries with sixteen keys, starting with position `first`.
template <typename T, int V, int H>
inline void score(const Query<T>* q, const Positions<T>& here, int first, int64_t at, float scale,
                  const Ahead<T>& ahead, Floats* scores) {
  constexpr int kDim = V * kWidth, kKeys = kManyRegisters ? 4 : 2;
  Floats quarters[H][4];
  for (int quarter = 0; quarter < 4; ++quarter) {
    Floats pairs[H][2];
    for (int some = 0; some < 4; some += kKeys) {
      // The products of these keys stay in registers until they are summed.
      Floats products[H][kKeys] = {};
      const T* keys[kKeys];
      for (int p = 0; p < kKeys; ++p) {
        ahead.template fetch<kDim>(first + quarter * 4 + some + p, 0);
        keys[p] = here.rows[first + quarter * 4 + some + p] + at;
      }
      for (int i = 0; i < kDim; i += kStep<T, V>)
        for (int p = 0; p < kKeys; ++p)
          for (int h = 0; h < H; ++h)
            products[h][p] =
                add_products<kStep<T, V>, T>(products[h][p], keys[p] + i, q + h * kDim + i);
      for (int h = 0; h < H; ++h)
        for (int p = 0; p < kKeys; p += 2)
          pairs[h][(some + p) / 2] = add_neighbours<1>(products[h][p], products[h][p + 1]);
    }
    for (int h = 0; h < H; ++h) quarters[h][quarter] = add_neighbours<2>(pairs[h][0], pairs[h][1]);
  }
  for (int h = 0; h < H; ++h)
    scores[h * kVectors] = add_neighbours<8>(add_neighbours<4>(quarters[h][0], quarters[h][1]),
                                             add_neighbours<4>(quarters[h][2], quarters[h][3])) *
                           scale;
}

// Turns scores of one query into weights; rescales earlier sums if the bound rises.
template <int V>
inline void weigh(const Floats* scores, int vectors, Softmax own, float* weights) {
  Floats peak = scores[0];
  for (int v = 1; v < vectors; ++v) peak = higher(scores[v], peak);
  Floats total = load(own.totals);
  if (any_above(peak, *own.peaks + kSlack)) {
    const float risen = highest_of(peak), rescale = power_of_two(*own.peaks - risen);
    *own.peaks = risen;
    total *= rescale;
    for (int v = 0; v < V; ++v) store(own.acc + v * kWidth, load(own.acc + v * kWidth) * rescale);
  }
  for (int v = 0; v < vectors; ++v) {
    const Floats weight = power_of_two(scores[v] - *own.peaks);
    total += weight;
    store(weights + v * kWidth, weight);
  }
  store(own.totals, total);
}

// Adds the weighted values of the positions to N vectors of the sums of H queries.
template <typename T, int V, int H, int N>
inline void add_values(const Positions<T>& here, int64_t at, const float* weights, float* acc,
                       const Ahead<T>& ahead, int64_t value_offset) {
  Floats sums[H][N];
  for (int h = 0; h < H; ++h)
    for (int n = 0; n < N; ++n) sums[h][n] = load(acc + (h * V + n) * kWidth);
  for (int p = 0; p < here.count; ++p) {
    ahead.template fetch<V * kWidth>(p, value_offset);
    const T* const value = here.rows[p] + at;
    for (int n = 0; n < N; ++n) {
      const Floats part = load(value + n * kWidth);
      for (int h = 0; h < H; ++h) sums[h][n] += weights[h * kTile + p] * part;
    }
  }
  for (int h = 0; h < H; ++h)
    for (int n = 0; n < N; ++n) store(acc + (h * V + n) * kWidth, sums[h][n]);
}

// Attends with H queries of one KV head over some positions; `at` is the offset of that head's
// keys.
template <typename T, int V, int H>
void attend(const Decode& call, const Query<T>* q, const Positions<T>& here, int64_t at,
            const Ahead<T>& ahead, Softmax own) {
  constexpr int kDim = V * kWidth;
  constexpr int kWide = V % 4 == 0 ? 4 : V % 3 == 0 ? 3 : V;
  constexpr int kSlice = kManyRegisters ? kWide : V % 2 == 0 && H < 4 ? 2 : 1;
  const int vectors = (here.count + kWidth - 1) / kWidth;
  Floats scores[H][kVectors] = {};
  for (int v = 0; v < vectors; ++v)
    score<T, V, H>(q, here, v * kWidth, at, call.scale.factor, ahead, &scores[0][v]);
  if (call.scale.bound > 0)
    for (auto& own_scores : scores)
      for (int v = 0; v < vectors; ++v) own_scores[v] = call.scale.bend(own_scores[v]);
  const Ints seen = lanes() < here.count - (vectors - 1) * kWidth;
  float weights[H * kTile];
  for (int h = 0; h < H; ++h) {
    Floats& last = scores[h][vectors - 1];
    last = select(seen, last, splat(2 * kNothing));
    weigh<V>(scores[h], vectors, own.from(h, kDim), weights + h * kTile);
  }
  const int64_t values = call.pool.value_offset;
  for (int v = 0; v < V; v += kSlice)
    add_values<T, V, H, kSlice>(here, at + values + v * kWidth, weights, own.acc + v * kWidth,
                                v == 0 ? ahead : Ahead<T>{}, values);
}

// Converts queries to the type of products.
template <typename T>
const Query<T>* queries_of(const T* q, int64_t count) {
  if constexpr (std::is_same_v<Query<T>, T>) {
    return q;
  } else {
    Query<T>* const converted = scratch<Query<T>, Use::kQueries>(count);
    for (int64_t i = 0; i < count; i += kWidth) store(converted + i, load(q + i));
    return converted;
  }
}

// Attends with the queries of some KV heads of one sequence over a part of its context.
template <typename T, int V>
void attend_part(const Decode& call, const T* q, const T* kv, const int64_t* table, KvHeads those,
                 int64_t first, int64_t last, Softmax own) {
  constexpr int kDim = V * kWidth;
  const int64_t kv_heads = call.pool.kv_heads, group = call.heads / kv_heads;
  Positions<T> both[2];
  Positions<T>*here = both, *next = both + 1;
  const Query<T>* const queries =
      queries_of(q + those.first * group * kDim, (those.last - those.first) * group * kDim);
  if (first < last) here->find(call, kv, table, kv_heads * kDim, first, last);
  for (int64_t at = first; at < last; at += kTile) {
    const bool is_last = at + kTile >= last;
    if (!is_last) next->find(call, kv, table, kv_heads * kDim, at + kTile, last);
    for (int64_t kv_head = those.first; kv_head < those.last; ++kv_head) {
      Ahead<T> ahead{here, (kv_head + 1) * kDim};
      if (kv_head + 1 == those.last) ahead = {is_last ? nullptr : next, those.first * kDim};
      for (int64_t done = 0; done < group; done += kQueries) {
        const int64_t head = kv_head * group + done;
        const Query<T>* const own_q = queries + (head - those.first * group) * kDim;
        const auto run = [&](auto attend) {
          attend(call, own_q, *here, kv_head * kDim, ahead, own.from(head, kDim));
        };
        switch (group - done) {
          case 1: run(attend<T, V, 1>); break;
          case 2: run(attend<T, V, 2>); break;
          case 3: run(attend<T, V, 3>); break;
          default: run(attend<T, V, kQueries>);
        }
        ahead.positions = nullptr;
      }
    }
    std::swap(here, next);
  }
}

// Merges the parts of one sequence for some KV heads and writes them to their place in its row.
template <typename T, int V>
void join_parts(const Decode& call, float* memory, KvHeads those, int64_t splits, int64_t size,
                T* out) {
  constexpr int kDim = V * kWidth;
  const int64_t heads = call.heads, group = heads / call.pool.kv_heads;
  for (int64_t head = those.first * group; head < those.last * group; ++head) {
    const float sink = call.sinks == nullptr ? 2 * kNothing : call.sinks[head] * kLog2E;
    float peak = sink;
    for (int64_t part = 0; part < splits; ++part)
      peak = std::max(peak, Softmax::in(memory + part * size, heads).peaks[head]);
    // A sink takes a share of the softmax and has no value.
    float total = call.sinks == nullptr ? 0.0f : power_of_two(sink - peak);
    Floats joined[V] = {};
    for (int64_t part = 0; part < splits; ++part) {
      const Softmax own = Softmax::in(memory + part * size, heads).from(head, kDim);
      const float weight = power_of_two(*own.peaks - peak);
      total += sum(load(own.totals)) * weight;
      for (int v = 0; v < V; ++v) joined[v] += load(own.acc + v * kWidth) * weight;
    }
    for (int v = 0; v < V; ++v) store(out + head * kDim + v * kWidth, joined[v] / total);
  }
}

// Division of the work if there are fewer sequences than threads: KV heads are divided as far as
// that comes out even, and contexts are split for the rest. The parts' sums, of at most `heads`
// heads, are in memory of the calling thread.
struct Parts {
  int64_t shares, splits, size;
  float* memory;

  Parts(int64_t sequences, int64_t heads, int64_t kv_heads, int64_t dim, int threads)
      : shares(std::gcd(each(sequences, threads), kv_heads)),
        splits(each(sequences, threads) / shares),
        size(Softmax::size(heads, dim)),
        memory(splits > 1 ? scratch<float, Use::kSoftmax>(sequences * shares * splits * size)
                          : nullptr) {}

  // KV heads of a share.
  KvHeads heads(int64_t share, int64_t kv_heads) const {
    return {share * kv_heads / shares, (share + 1) * kv_heads / shares};
  }

 private:
  static int64_t each(int64_t sequences, int threads) {
    return sequences >= threads ? 1 : (threads - 1) / sequences + 1;
  }
};

// Attention of all sequences, by all threads of the calling parallel region. `before` is called for
// every sequence and run of KV heads before attention with them.
template <typename T, int V, typename Before>
void decode(const Decode& call, const T* q, int64_t q_stride, const T* kv, T* out,
            const Parts& parts, const Before& before) {
  constexpr int kDim = V * kWidth;
  const int64_t splits = parts.splits, width = call.heads * kDim, shares = parts.shares;
  const int64_t kv_heads = call.pool.kv_heads;
  if (splits > 1) {
#pragma omp for schedule(static)
    for (int64_t sequence = 0; sequence < call.sequences; ++sequence)
      before(sequence, KvHeads{0, kv_heads});
  }
#pragma omp for schedule(dynamic)
  for (int64_t item = 0; item < call.sequences * shares * splits; ++item) {
    const int64_t sequence = item / (shares * splits), share = item / splits % shares;
    const KvHeads own = parts.heads(share, kv_heads);
    const int64_t len = call.lens[sequence];
    const int64_t begin = call.window > 0 && len > call.window ? len - call.window : 0;
    const int64_t each = (len - begin + splits - 1) / splits, first = begin + item % splits * each;
    if (splits == 1) before(sequence, own);
    float* const memory = splits > 1 ? parts.memory + item * parts.size
                                     : scratch<float, Use::kSoftmax>(parts.size);
    const Softmax softmax = Softmax::in(memory, call.heads);
    const int64_t group = call.heads / kv_heads;
    softmax.from(own.first * group, kDim).reset((own.last - own.first) * group, kDim);
    attend_part<T, V>(call, q + sequence * q_stride, kv, call.tables + sequence * call.table_stride,
                      own, first, std::min(first + each, len), softmax);
    if (splits == 1) join_parts<T, V>(call, memory, own, 1, parts.size, out + sequence * width);
  }
  if (splits == 1) return;
#pragma omp for schedule(static)
  for (int64_t item = 0; item < call.sequences * shares; ++item) {
    const int64_t share = item % shares;
    const KvHeads own = parts.heads(share, kv_heads);
    join_parts<T, V>(call, parts.memory + item * splits * parts.size, own, splits, parts.size,
                     out + item / shares * width);
  }
}

inline bool has_decode(int64_t dim) {
  return dim == 16 || dim == 32 || dim == 64 || dim == 128 || dim == 256 || dim == 512;
}

template <typename T, typename Before>
void decode_rows(const Decode& call, int64_t dim, const T* q, int64_t q_stride, const T* kv, T* out,
                 const Parts& parts, const Before& before) {
  switch (dim) {
    case 16: decode<T, 1>(call, q, q_stride, kv, out, parts, before); break;
    case 32: decode<T, 2>(call, q, q_stride, kv, out, parts, before); break;
    case 64: decode<T, 4>(call, q, q_stride, kv, out, parts, before); break;
    case 128: decode<T, 8>(call, q, q_stride, kv, out, parts, before); break;
    case 256: decode<T, 16>(call, q, q_stride, kv, out, parts, before); break;
    default: decode<T, 32>(call, q, q_stride, kv, out, parts, before);
  }
}

}  // namespace
