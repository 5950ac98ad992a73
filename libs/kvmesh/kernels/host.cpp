// Steps of a decoder layer on the CPU that cost more in calls and passes over memory than in
// arithmetic: norms, activations, rotary embedding with the KV write, products of a few rows.
// Twins: reference.py. Loaded by host_library.py through a C ABI.
//
// Sums are fp32 whatever the tensors hold, and bf16 results are rounded once (vectors.h). Attention
// of prompts is in prefill.h, that of decode steps in decode.h and over latents in latent.h, linear
// attention in recurrence.h.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "decode.h"
#include "latent.h"
#include "prefill.h"
#include "recurrence.h"
#include "vectors.h"

namespace {

template <typename T>
void add_rms_norm(T* x, const T* delta, const T* weight, T* out, int64_t rows, int64_t dim,
                  float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows >= 8)
  for (int64_t row = 0; row < rows; ++row) {
    T* const own = x + row * dim;
    Floats squares{};
    for (int64_t i = 0; i < dim; i += kWidth) {
      Floats value = load(own + i);
      if (delta != nullptr) {
        store(own + i, value + load(delta + row * dim + i));
        value = load(own + i);
      }
      squares += value * value;
    }
    const Floats factor = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(dim) + eps));
    for (int64_t i = 0; i < dim; i += kWidth)
      store(out + row * dim + i, load(own + i) * factor * load(weight + i));
  }
}

template <typename T>
void silu_and_mul(const T* gate_up, T* out, int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows >= 8)
  for (int64_t row = 0; row < rows; ++row) {
    const T* const gate = gate_up + row * 2 * dim;
    for (int64_t i = 0; i < dim; i += kWidth) {
      const Floats g = load(gate + i);
      store(out + row * dim + i, g / (exponential(-g) + 1.0f) * load(gate + dim + i));
    }
  }
}

// One head: optional norm, then rotation of the pairs (i, i + dim / 2).
template <typename T>
void norm_rope_head(T* head, const T* weight, float eps, const T* cos, const T* signed_sin,
                    int dim) {
  Floats factor = splat(1.0f);
  if (weight != nullptr) {
    Floats squares{};
    for (int i = 0; i < dim; i += kWidth) squares += load(head + i) * load(head + i);
    factor = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(dim) + eps));
  }
  const int half = dim / 2;
  for (int i = 0; i < half; i += kWidth) {
    Floats low = load(head + i) * factor, high = load(head + half + i) * factor;
    if (weight != nullptr) {
      low *= load(weight + i);
      high *= load(weight + half + i);
    }
    store(head + i, low * load(cos + i) + high * load(signed_sin + i));
    store(head + half + i, high * load(cos + half + i) + low * load(signed_sin + half + i));
  }
}

template <typename T>
void rope_and_write(T* qkv, const T* qk_norm, float eps, const T* cos, const T* signed_sin,
                    T* kv, const int64_t* slots, int64_t rows, int64_t heads, int dim, Pool pool,
                    int threads) {
  const int64_t turned = heads + pool.kv_heads, row_size = (turned + pool.kv_heads) * dim;
  const size_t bytes = static_cast<size_t>(pool.kv_heads * dim) * sizeof(T);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows >= 8)
  for (int64_t row = 0; row < rows; ++row) {
    T* const own = qkv + row * row_size;
    for (int64_t head = 0; head < turned; ++head)
      norm_rope_head(own + head * dim, qk_norm == nullptr ? nullptr : qk_norm + head * dim, eps,
                     cos + row * dim, signed_sin + row * dim, dim);
    const int64_t block = slots[row] / pool.block_size, offset = slots[row] % pool.block_size;
    T* const key = kv + block * pool.block_stride + offset * pool.kv_heads * dim;
    std::memcpy(key, own + heads * dim, bytes);
    std::memcpy(key + pool.value_offset, own + turned * dim, bytes);
  }
}

// Rows that `few_rows` takes at most: so many are computed faster than by oneDNN. Without vectors of
// 512 bits that is while memory delivers weights no faster; with tiles for bf16 oneDNN is soon ahead.
template <typename T>
constexpr int kMostRows = 4;
#ifdef __AVX512F__
template <>
constexpr int kMostRows<float> = 16;
#endif
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
template <>
constexpr int kMostRows<Bf16> = 32;
#endif
// Rows that are computed at once: their sums fill half of the vector registers.
constexpr int kRowBlock = 4;
constexpr int kPanel = 64;

inline void multiply_add(const float* weights, const float* x, int64_t x_stride, int rows,
                         Floats (*sums)[kRowBlock]) {
  for (int v = 0; v < kPanel / kWidth; ++v) {
    const Floats w = load(weights + v * kWidth);
    for (int row = 0; row < rows; ++row) sums[v][row] += w * x[row * x_stride];
  }
}

inline float widened(Bf16 value) { return bits_as<float>(static_cast<uint32_t>(value) << 16); }

inline void multiply_add(const Bf16* weights, const Bf16* x, int64_t x_stride, int rows,
                         Floats (*sums)[kRowBlock]) {
  for (int v = 0; v < kPanel / kWidth; ++v) {
#ifdef __AVX512BF16__
    for (int row = 0; row < rows; ++row)
      sums[v][row] = multiply_add(sums[v][row], weights + v * 2 * kWidth, x + row * x_stride);
#else
    // Weights of two inputs lie side by side in each lane.
    Words pairs;
    std::memcpy(&pairs, weights + v * 2 * kWidth, sizeof pairs);
    const Floats even = bits_as<Floats>(pairs << 16), odd = bits_as<Floats>(pairs & 0xffff0000u);
    for (int row = 0; row < rows; ++row)
      sums[v][row] += even * widened(x[row * x_stride]) + odd * widened(x[row * x_stride + 1]);
#endif
  }
}

// Asks for the weights that `multiply_add` reads kAheadBytes later: a core's own prefetcher has fewer
// reads under way than memory would answer. KEPT is how near they should stay, as for
// __builtin_prefetch: 0 for what is used once, which then drives nothing else out of the caches.
constexpr int64_t kAheadBytes = 2048;
template <int KEPT, typename T>
inline void fetch_ahead(const T* weights) {
  for (int v = 0; v < kPanel / kWidth; ++v)
    __builtin_prefetch(reinterpret_cast<const char*>(weights) + kAheadBytes + v * 64, 0, KEPT);
}

// Inputs that are multiplied for all rows before the next: weights of so many lie in the second
// cache, whatever the depth of the matrix.
template <typename T>
constexpr int64_t kDepth = 2048 / sizeof(T);

// What rows of a panel fetch on their way: all that they read themselves, a part of what comes next
// in memory, or nothing.
enum class Fetch { kOwn, kPart, kNothing };

// Adds the product of R rows with 64 outputs over some inputs to `sums`.
template <typename T, int R>
void panel_rows(const T* x, const T* panel, int64_t inputs, int64_t count, Fetch fetch,
                const T* part, float (*sums)[kPanel]) {
  Floats own[kPanel / kWidth][kRowBlock];
  for (int v = 0; v < kPanel / kWidth; ++v)
    for (int row = 0; row < R; ++row) own[v][row] = load(sums[row] + v * kWidth);
  for (int64_t i = 0; i < count; i += kLane<T>) {
    if (fetch == Fetch::kPart) __builtin_prefetch(part + i * kWidth, 0, 2);
    if (fetch == Fetch::kOwn) fetch_ahead<2>(panel + i * kPanel);
    multiply_add(panel + i * kPanel, x + i, inputs, R, own);
  }
  for (int v = 0; v < kPanel / kWidth; ++v)
    for (int row = 0; row < R; ++row) store(sums[row] + v * kWidth, own[v][row]);
}

// As `few_rows`, of at most a block of rows: their sums never leave the registers.
template <typename T, int R>
void block_of_rows(const T* x, const T* weights, const T* bias, T* out, int64_t outputs,
                   int64_t inputs, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t panel = 0; panel < outputs / kPanel; ++panel) {
    const T* const own = weights + panel * kPanel * inputs;
    Floats sums[kPanel / kWidth][kRowBlock] = {};
    for (int64_t i = 0; i < inputs; i += kLane<T>) {
      fetch_ahead<0>(own + i * kPanel);
      multiply_add(own + i * kPanel, x + i, inputs, R, sums);
    }
    for (int v = 0; v < kPanel / kWidth; ++v) {
      const int64_t at = panel * kPanel + v * kWidth;
      const Floats added = bias == nullptr ? Floats{} : load(bias + at);
      for (int row = 0; row < R; ++row) store(out + row * outputs + at, sums[v][row] + added);
    }
  }
}

// Product of a few rows with a weight in panels of 64 outputs, [outputs / 64][inputs / N][64][N]
// with N values to a lane: as fast as memory delivers, which oneDNN's own product is not. Weights
// come from memory for the first four rows, or with the rows before, and from the cache for the
// rest. A row's sums are taken in the same order whatever the number of rows.
template <typename T>
int few_rows(const T* x, const T* weights, const T* bias, T* out, int64_t rows, int64_t outputs,
             int64_t inputs, int threads) {
  if (rows > kMostRows<T>) return 1;
  switch (rows) {
    case 1: block_of_rows<T, 1>(x, weights, bias, out, outputs, inputs, threads); return 0;
    case 2: block_of_rows<T, 2>(x, weights, bias, out, outputs, inputs, threads); return 0;
    case 3: block_of_rows<T, 3>(x, weights, bias, out, outputs, inputs, threads); return 0;
    case 4: block_of_rows<T, 4>(x, weights, bias, out, outputs, inputs, threads); return 0;
  }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t panel = 0; panel < outputs / kPanel; ++panel) {
    const T* const own = weights + panel * kPanel * inputs;
    float sums[kMostRows<T>][kPanel] = {};
    for (int64_t first = 0; first < inputs; first += kDepth<T>) {
      const int64_t count = std::min(kDepth<T>, inputs - first);
      const T* const part = own + first * kPanel;
      for (int64_t row = 0; row < rows; row += kRowBlock) {
        // The first block of rows fetches, or a quarter of the next weights each of the first four.
        const bool in_parts = rows >= 4 * kRowBlock;
        const bool fetches = row < (in_parts ? 4 * kRowBlock : kRowBlock);
        const Fetch fetch = !fetches ? Fetch::kNothing : in_parts ? Fetch::kPart : Fetch::kOwn;
        const T* const next = part + count * (kPanel + row / kRowBlock * kWidth);
        const T* const from = x + row * inputs + first;
        switch (rows - row) {
          case 1: panel_rows<T, 1>(from, part, inputs, count, fetch, next, sums + row); break;
          case 2: panel_rows<T, 2>(from, part, inputs, count, fetch, next, sums + row); break;
          case 3: panel_rows<T, 3>(from, part, inputs, count, fetch, next, sums + row); break;
          default: panel_rows<T, 4>(from, part, inputs, count, fetch, next, sums + row);
        }
      }
    }
    for (int64_t row = 0; row < rows; ++row)
      for (int v = 0; v < kPanel; v += kWidth) {
        const Floats added = bias == nullptr ? Floats{} : load(bias + panel * kPanel + v);
        store(out + row * outputs + panel * kPanel + v, load(sums[row] + v) + added);
      }
  }
  return 0;
}

}  // namespace

#define KVMESH_HOST_OPS(T, NAME)                                                                   \
  extern "C" void add_rms_norm_##NAME(T* x, const T* delta, const T* weight, T* out, int64_t rows, \
                                      int64_t dim, float eps, int threads) {                       \
    add_rms_norm(x, delta, weight, out, rows, dim, eps, threads);                                  \
  }                                                                                                \
  extern "C" void silu_and_mul_##NAME(const T* gate_up, T* out, int64_t rows, int64_t dim,         \
                                      int threads) {                                               \
    silu_and_mul(gate_up, out, rows, dim, threads);                                                \
  }                                                                                                \
  extern "C" void rope_and_write_##NAME(                                                           \
      T* qkv, const T* qk_norm, float eps, const T* cos, const T* signed_sin, T* kv,               \
      const int64_t* slots, int64_t rows, int64_t heads, int64_t dim, int64_t block_stride,        \
      int64_t value_offset, int64_t block_size, int64_t kv_heads, int threads) {                   \
    const Pool pool{block_stride, value_offset, block_size, kv_heads};                             \
    rope_and_write(qkv, qk_norm, eps, cos, signed_sin, kv, slots, rows, heads,                     \
                   static_cast<int>(dim), pool, threads);                                          \
  }                                                                                                \
  extern "C" int decode_attention_##NAME(                                                          \
      const T* q, int64_t q_stride, const T* kv, T* out, const int64_t* tables,                    \
      const int64_t* lens, const float* sinks, int64_t table_stride, int64_t sequences,            \
      int64_t heads, int64_t dim, int64_t window, float scale, int64_t block_stride,               \
      int64_t value_offset, int64_t block_size, int64_t kv_heads, int threads) {                   \
    const Pool pool{block_stride, value_offset, block_size, kv_heads};                             \
    const Decode call{tables, lens, table_stride, sequences, heads, window, scale * kLog2E, sinks, \
                      pool};                                                                       \
    return decode_any(call, q, q_stride, kv, out, dim, threads);                                   \
  }                                                                                                \
  extern "C" void prefill_attention_##NAME(                                                        \
      const T* q, int64_t q_stride, const T* kv, T* out, const int64_t* tables,                    \
      const int64_t* starts, const int64_t* lens, const float* sinks, int64_t table_stride,        \
      int64_t sequences, int64_t heads, int64_t dim, int64_t window, float scale,                  \
      int64_t block_stride, int64_t value_offset, int64_t block_size, int64_t kv_heads,            \
      int causal, float* lse, int threads) {                                                       \
    const Pool pool{block_stride, value_offset, block_size, kv_heads};                             \
    const Prefill call{tables, starts, lens,     table_stride,   sequences, heads,                 \
                       window, q_stride, scale * kLog2E, sinks, pool, causal != 0, lse};           \
    prefill(call, q, kv, out, dim, threads);                                                       \
  }                                                                                                \
  extern "C" int prefill_pays_##NAME() { return kPrefillPays<T>; }                                  \
  extern "C" int few_rows_##NAME(const T* x, const T* weights, const T* bias, T* out,              \
                                 int64_t rows, int64_t outputs, int64_t inputs, int threads) {     \
    return few_rows(x, weights, bias, out, rows, outputs, inputs, threads);                        \
  }                                                                                                \
  extern "C" int most_rows_##NAME() { return kMostRows<T>; }                                        \
  extern "C" void latent_decode_##NAME(                                                            \
      const T* q, const T* kv, T* out, const int64_t* tables, const int64_t* lens,                 \
      int64_t table_stride, int64_t sequences, int64_t heads, int64_t width, int64_t rank,         \
      int64_t block_stride, int64_t block_size, float scale, int threads) {                        \
    const Latents call{tables, lens, table_stride, sequences,  heads,                              \
                       width,  rank, block_stride, block_size, scale};                             \
    latent_decode(call, q, kv, out, threads);                                                      \
  }                                                                                                \
  extern "C" void delta_rule_##NAME(                                                               \
      const T* mixed, int64_t mixed_stride, const float* taps, int64_t kernel, const float* decay, \
      int64_t decay_width, const float* share, float* states, float* active, float* out,           \
      int64_t sequences, int64_t positions, int64_t key_heads, int64_t heads, int64_t key_dim,     \
      int64_t value_dim, int64_t state_stride, int threads) {                                      \
    const Linear call{sequences, positions, key_heads, heads, key_dim, value_dim, state_stride};   \
    delta_rule(call, mixed, mixed_stride, taps, kernel, decay, decay_width, share, states, active, \
               out, threads);                                                                      \
  }

KVMESH_HOST_OPS(float, f32)
KVMESH_HOST_OPS(Bf16, bf16)

extern "C" void lightning_f32(const float* heads, const float* decay, float* states, float* out,
                              int64_t sequences, int64_t positions, int64_t num_heads,
                              int64_t key_dim, int64_t value_dim, int64_t state_stride,
                              int threads) {
  const Linear call{sequences, positions, num_heads, num_heads, key_dim, value_dim, state_stride};
  lightning(call, heads, decay, states, out, threads);
}
