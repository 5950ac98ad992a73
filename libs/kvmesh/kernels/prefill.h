// Attention of prompt chunks over paged KV, with blocks read in place: causal, over a context and
// the chunk itself, or over a part of a context that the whole chunk sees.
//
// Neighbouring queries of one KV head form a tile. For every 64 positions, keys are transposed and
// values interleaved once into the layout of `multiply` (tile.h), and used for all rows of the tile.
// Scores never leave the L1 cache. Tiles of positions begin at multiples of 64 whatever the chunk,
// so a row's result does not depend on how its prompt was split.
//
// Source: FlashAttention-2, arXiv 2307.08691, over the blocks of arXiv 2309.06180.

#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "amx.h"
#include "tile.h"
#include "vectors.h"

namespace {

// Range of KV heads: `first` to before `last`.
struct KvHeads {
  int64_t first, last;
};

constexpr float kLog2E = 1.44269504f;

// Conversion of q·k products to scores times log2(e), since powers of two are cheaper: a factor,
// then soft-capping to -bound..bound unless the bound is 0.
struct Scale {
  float factor, bound;

  // `cap` as in reference.capped.
  static Scale of(float scale, float cap) {
    return cap > 0 ? Scale{scale / cap, cap * kLog2E} : Scale{scale * kLog2E, 0.0f};
  }

  // Applies soft-capping to products that are multiplied by the factor already.
  Floats bend(Floats scores) const { return hyperbolic_tangent(scores) * bound; }
};

struct Prefill {
  // Per sequence: block ids, first row (one more closes the last), positions with its own rows.
  const int64_t *tables, *starts, *lens;
  int64_t table_stride, sequences, heads, window, q_stride;
  Scale scale;
  const float* sinks;
  Pool pool;
  // If false, every query sees all positions of its sequence, and there is no window.
  bool causal;
  // Log of the sum of exponentials per row and head, or null.
  float* lse;
};

constexpr int kVectors = kTile / kWidth;
// Approximate number of query rows that share them.
constexpr int64_t kTileRows = 384;
// Number of rows whose sums fit the registers, with four vectors of each or one at a time.
constexpr int kRows = 6;
// Number of rows that are attended together, and what their products need meanwhile.
template <typename C>
constexpr int kTogether = kRows;
template <typename C>
struct Shapes {};
#ifdef __AMX_BF16__
template <>
constexpr int kTogether<Bf16> = kAmxRows;
template <>
struct Shapes<Bf16> : AmxShapes {
  Shapes() : AmxShapes(kAmxRows) {}
};
#endif
// Power of two by which a peak may rise before sums are rescaled.
constexpr float kSlack = 8.0f;
constexpr float kNothing = -1e30f;
// Before all positions, and still an int32 when a few are added.
constexpr int64_t kFar = -(int64_t{1} << 30);

inline Floats multiply_add(Floats sum, const float* weights, const float* x) {
  return sum + load(weights) * *x;
}

#ifdef __AVX512BF16__
inline Floats multiply_add(Floats sum, const Bf16* weights, const Bf16* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  const __m512i lanes = _mm512_loadu_si512(weights);
  const __m512i same = _mm512_set1_epi32(pair);
  return bits_as<Floats>(_mm512_dpbf16_ps(bits_as<__m512>(sum), bits_as<__m512bh>(lanes),
                                          bits_as<__m512bh>(same)));
}
#endif

// Adds the product of `kRows` rows with [steps][width][kLane] weights, V vectors of the width, to
// the sums, or to zeros if they are FRESH.
template <typename C, int V, bool FRESH>
inline void multiply(const C* x, int64_t x_stride, const C* weights, int64_t width, int steps,
                     Floats (&sums)[kRows][V]) {
  constexpr int kAtOnce = kManyRegisters ? V : 1;
  for (int first = 0; first < V; first += kAtOnce) {
    Floats own[kRows][kAtOnce];
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kAtOnce; ++v) own[row][v] = FRESH ? Floats{} : sums[row][first + v];
    for (int step = 0; step < steps; ++step) {
#pragma GCC unroll 8
      for (int v = 0; v < kAtOnce; ++v)
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row)
          own[row][v] = multiply_add(
              own[row][v], weights + (step * width + (first + v) * kWidth) * kLane<C>,
              x + row * x_stride + step * kLane<C>);
    }
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kAtOnce; ++v) sums[row][first + v] = own[row][v];
  }
}

#ifdef __AVX512F__
// Without a mask GCC 12 warns that the unused operand is uninitialised.
constexpr __mmask16 kAllLanes = 0xffff;
#endif

// 2^x of each lane, relative error about 2e-7; below -126 the result is at most about 1e-38.
inline Floats power_of_two(Floats x) {
#ifdef __AVX512DQ__
  // The fraction above the next lower integer; `scalef` then applies the integer power.
  const auto r = bits_as<Floats>(
      _mm512_maskz_reduce_ps(kAllLanes, bits_as<__m512>(x), _MM_FROUND_TO_NEG_INF));
  Floats p = r * 1.87757658e-3f + 8.98934063e-3f;
  p = p * r + 5.58263175e-2f;
  p = p * r + 2.40153611e-1f;
  p = p * r + 6.93153083e-1f;
  p = p * r + 9.99999940e-1f;
  return bits_as<Floats>(
      _mm512_maskz_scalef_ps(kAllLanes, bits_as<__m512>(p), bits_as<__m512>(x)));
#else
  x = select(x < -126.0f, splat(-126.0f), x);
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low mantissa bits.
  const Floats shifted = x + 12582912.0f;
  const Floats r = x - (shifted - 12582912.0f);
  Floats p = r * 1.32764713e-3f + 9.67554096e-3f;
  p = p * r + 5.55071309e-2f;
  p = p * r + 2.40221202e-1f;
  p = p * r + 6.93146944e-1f;
  p = p * r + 1.00000006f;
  return bits_as<Floats>(bits_as<Ints>(p) + (bits_as<Ints>(shifted) << 23));
#endif
}

inline float power_of_two(float x) { return first_of(power_of_two(splat(x))); }

inline bool any_above(Floats x, float bound) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask(bits_as<__m512>(x), _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#else
  return any_set(x > bound);
#endif
}

// Rows of one tile of queries: row r is query r / group of head r % group.
template <typename C>
struct Rows {
  // Head size, also of `q` with zeros for what a step of products lacks.
  int64_t dim, q_dim, padded = 0;
  std::vector<C> q;
  std::vector<float> acc, totals, peaks;

  explicit Rows(int64_t dim) : dim(dim), q_dim(padded_dim(dim)) {}

  void reset(int64_t count) {
    padded = (count + kTogether<C> - 1) / kTogether<C> * kTogether<C>;
    q.assign(padded * q_dim, C{});
    acc.assign(padded * dim, 0.0f);
    totals.assign(padded * kWidth, 0.0f);
    peaks.assign(padded, kNothing);
  }
};

// Turns scores of one row, V vectors of positions, into weights and updates the row's online
// softmax. The row sees positions from `from` to before `to`, relative to the first one.
template <typename C, int V>
inline void weigh(Rows<C>& rows, int64_t row, Floats (&scores)[V], float scale, int64_t from,
                  int64_t to, C* weights) {
  const bool whole = from <= 0 && to >= V * kWidth;
  Floats peak = splat(kNothing);
  for (int v = 0; v < V; ++v) {
    if (!whole) {
      const Ints at = lanes() + v * kWidth;
      const Ints seen = (at >= static_cast<int32_t>(from)) & (at < static_cast<int32_t>(to));
      scores[v] = select(seen, scores[v], splat(2 * kNothing));
    }
    peak = higher(scores[v], peak);
  }
  Floats total = load(&rows.totals[row * kWidth]);
  if (any_above(peak * scale, rows.peaks[row] + kSlack)) {
    const float risen = highest_of(peak) * scale;
    const float rescale = power_of_two(rows.peaks[row] - risen);
    rows.peaks[row] = risen;
    total *= rescale;
    for (int64_t i = 0; i < rows.dim; i += kWidth) {
      float* const part = &rows.acc[row * rows.dim + i];
      store(part, load(part) * rescale);
    }
  }
  const float highest = rows.peaks[row];
  for (int v = 0; v < V; ++v) {
    Floats weight = power_of_two(scores[v] * scale - highest);
    if (!whole) weight = select(scores[v] > kNothing, weight, Floats{});
    total += weight;
    store(weights + v * kWidth, weight);
  }
  store(&rows.totals[row * kWidth], total);
}

// Products of `kTogether` rows: with V vectors of keys, and of their weights with N vectors of
// values from element `at` on, which are added to the sums.
template <typename C>
struct RowProducts {
  template <int V>
  static void score(const Rows<C>& rows, int64_t row, const C* keys, Floats (&scores)[kRows][V]) {
    multiply<C, V, true>(&rows.q[row * rows.q_dim], rows.q_dim, keys, kTile,
                         static_cast<int>(rows.dim / kLane<C>), scores);
  }

  template <int V, int N>
  static void add_values(Rows<C>& rows, int64_t row, const C* weights, const C* values,
                         int64_t at) {
    Floats sums[kRows][N];
    float* const acc = &rows.acc[row * rows.dim + at];
    for (int i = 0; i < kRows; ++i)
      for (int n = 0; n < N; ++n) sums[i][n] = load(acc + i * rows.dim + n * kWidth);
    multiply<C, N, false>(weights, kTile, values + at * kLane<C>, rows.dim, V * kWidth / kLane<C>,
                          sums);
    for (int i = 0; i < kRows; ++i)
      for (int n = 0; n < N; ++n) store(acc + i * rows.dim + n * kWidth, sums[i][n]);
  }
};
#ifdef __AMX_BF16__
template <>
struct RowProducts<Bf16> {
  template <int V>
  static void score(const Rows<Bf16>& rows, int64_t row, const Bf16* keys,
                    Floats (&scores)[kAmxRows][V]) {
    add_amx<V, true>(&rows.q[row * rows.q_dim], rows.q_dim, keys, kTile, rows.q_dim / kAmxInputs,
                     reinterpret_cast<float*>(scores), V * kWidth);
  }

  template <int V, int N>
  static void add_values(Rows<Bf16>& rows, int64_t row, const Bf16* weights, const Bf16* values,
                         int64_t at) {
    add_amx<N, false>(weights, kTile, values + at * 2, rows.dim, V * kWidth / kAmxInputs,
                      &rows.acc[row * rows.dim + at], rows.dim);
  }
};
#endif

// Positions of a tile that its queries see: query i sees [from + i, to + i) with slope 1, and
// [from, to) with slope 0.
struct Sight {
  int64_t from, to, group, slope;
};

// Attends with `kTogether` rows over the first V vectors of a tile of positions. Inlined, it would
// share its registers with values of the loops around it, and `multiply` needs all of them.
template <typename C, int V>
__attribute__((noinline)) void attend_rows(Rows<C>& rows, int64_t row, const C* keys,
                                           const C* values, const Sight& sight, Scale scale) {
  Floats scores[kTogether<C>][V];
  RowProducts<C>::score(rows, row, keys, scores);
  if (scale.bound > 0) {
    for (auto& row_scores : scores)
      for (Floats& some : row_scores) some = scale.bend(some * scale.factor);
    scale.factor = 1.0f;
  }
  C weights[kTogether<C> * kTile];
  for (int i = 0; i < kTogether<C>; ++i) {
    const int64_t query = (row + i) / sight.group * sight.slope;
    weigh<C, V>(rows, row + i, scores[i], scale.factor, sight.from + query, sight.to + query,
                weights + i * kTile);
  }
  for (int64_t at = 0; at < rows.dim;) {
    if (rows.dim - at >= 4 * kWidth) {
      RowProducts<C>::template add_values<V, 4>(rows, row, weights, values, at);
      at += 4 * kWidth;
    } else {
      RowProducts<C>::template add_values<V, 1>(rows, row, weights, values, at);
      at += kWidth;
    }
  }
}

// Attends with all rows of a query tile over a tile of positions; prefetches the next one, if any,
// meanwhile.
template <typename T, typename C>
void attend_tile(Rows<C>& rows, int64_t count, const C* keys, const C* values, const Sight& sight,
                 const Scale& scale, const Cached<T>* next) {
  // A step of products takes whole lanes of these vectors.
  constexpr int64_t kAtOnce = kTogether<C> == kRows ? 1 : 2;
  for (int64_t row = 0; row < count; row += kTogether<C>) {
    if (next != nullptr) next->prefetch(row / kTogether<C>, rows.padded / kTogether<C>, rows.dim);
    const int64_t last = std::min(row + kTogether<C>, count) - 1;
    const int64_t to = sight.to + last / sight.group * sight.slope;
    if (to <= 0 || sight.from + row / sight.group * sight.slope >= kTile) continue;
    const auto run = [&](auto attend_rows) { attend_rows(rows, row, keys, values, sight, scale); };
    const int64_t vectors = std::min<int64_t>((to + kWidth - 1) / kWidth, kVectors);
    switch ((vectors + kAtOnce - 1) / kAtOnce) {
      case 1: run(attend_rows<C, 1 * kAtOnce>); break;
      case 2: run(attend_rows<C, 2 * kAtOnce>); break;
      case 3: run(attend_rows<C, std::min<int64_t>(3 * kAtOnce, kVectors)>); break;
      default: run(attend_rows<C, kVectors>);
    }
  }
}

// A run of queries of one sequence, with one task per KV head.
struct QueryTile {
  int64_t sequence, first, count;
};

std::vector<QueryTile> query_tiles(const Prefill& call) {
  const int64_t group = call.heads / call.pool.kv_heads;
  const int64_t span = std::max<int64_t>(1, kTileRows / group);
  std::vector<QueryTile> tiles;
  for (int64_t sequence = 0; sequence < call.sequences; ++sequence) {
    const int64_t queries = call.starts[sequence + 1] - call.starts[sequence];
    for (int64_t first = 0; first < queries; first += span)
      tiles.push_back({sequence, first, std::min(span, queries - first)});
  }
  return tiles;
}

// Writes the rows of one head, divided by their totals including the sink's share.
template <typename T, typename C>
void finish_rows(const Prefill& call, Rows<C>& rows, T* out, int64_t row, int64_t head) {
  float total = sum(load(&rows.totals[row * kWidth])), factor = 1.0f;
  if (call.sinks != nullptr) {
    const float above = call.sinks[head] * kLog2E - rows.peaks[row];
    factor = above > 0 ? power_of_two(-above) : 1.0f;
    total = total * factor + power_of_two(std::min(above, 0.0f));
  }
  for (int64_t i = 0; i < rows.dim; i += kWidth)
    store(out + i, load(&rows.acc[row * rows.dim + i]) * (factor / total));
}

template <typename T, typename C>
void attend_queries(const Prefill& call, const QueryTile& queries, int64_t kv_head, const T* q,
                    const T* kv, T* out, Tile<T, C>& tile, Rows<C>& rows) {
  const Pool& pool = call.pool;
  const int64_t dim = rows.dim, group = call.heads / pool.kv_heads;
  const int64_t start = call.starts[queries.sequence] + queries.first;
  const int64_t len = call.lens[queries.sequence], count = queries.count * group;
  const int64_t left = call.starts[queries.sequence + 1] - start;
  const int64_t* const table = call.tables + queries.sequence * call.table_stride;
  rows.reset(count);
  for (int64_t row = 0; row < count; ++row) {
    const T* const from = q + (start + row / group) * call.q_stride +
                          (kv_head * group + row % group) * dim;
    for (int64_t i = 0; i < dim; i += kWidth) store(&rows.q[row * rows.q_dim + i], load(from + i));
  }
  // No query sees a position before `begin`.
  const int64_t first = len - left, end = call.causal ? first + queries.count : len;
  const int64_t begin = call.window > 0 ? std::max<int64_t>(0, first + 1 - call.window) : 0;
  const Context<T> context{pool, kv + kv_head * dim, table, dim, begin, end};
  Cached<T> both[2];
  Cached<T>*here = both, *next = both + 1;
  int64_t at = begin / kTile * kTile;
  context.find(at, tile.zeros.data(), *here);
  for (; at < end; at += kTile) {
    tile.fill(*here);
    const bool is_last = at + kTile >= end;
    if (!is_last) context.find(at + kTile, tile.zeros.data(), *next);
    const int64_t from = call.window > 0 ? first + 1 - call.window - at : kFar;
    const int64_t to = (call.causal ? first + 1 : len) - at;
    attend_tile<T, C>(rows, count, tile.keys.data(), tile.values.data(),
                      {from, to, group, call.causal}, call.scale, is_last ? nullptr : next);
    std::swap(here, next);
  }
  for (int64_t row = 0; row < count; ++row) {
    const int64_t head = kv_head * group + row % group;
    const int64_t place = (start + row / group) * call.heads + head;
    finish_rows(call, rows, out + place * dim, row, head);
    if (call.lse != nullptr)
      call.lse[place] =
          (rows.peaks[row] + std::log2(sum(load(&rows.totals[row * kWidth])))) / kLog2E;
  }
}

template <typename T>
void prefill(const Prefill& call, const T* q, const T* kv, T* out, int64_t dim, int threads) {
  using C = typename Factor<T>::Type;
  const std::vector<QueryTile> tiles = query_tiles(call);
  const int64_t kv_heads = call.pool.kv_heads, tasks = static_cast<int64_t>(tiles.size()) * kv_heads;
#pragma omp parallel num_threads(threads) if (threads > 1 && tasks > 1)
  {
    Tile<T, C> tile(dim);
    Rows<C> rows(dim);
    [[maybe_unused]] const Shapes<C> shapes;
    // Late queries see most positions, so they go first and threads end together.
#pragma omp for schedule(dynamic)
    for (int64_t task = tasks - 1; task >= 0; --task)
      attend_queries(call, tiles[task / kv_heads], task % kv_heads, q, kv, out, tile, rows);
  }
}

}  // namespace
