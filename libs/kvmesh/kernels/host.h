// Operations of a decoder layer on the CPU that cost more in calls and memory passes than in
// arithmetic. Twins: reference.py, attention_reference.py. Loaded by host_library.py through a C
// ABI. Each dtype is compiled separately (host_f32.cpp, host_bf16.cpp), for several instruction
// levels.
//
// Sums are fp32 whatever the tensors' dtype, and bf16 results are rounded once (vectors.h). rows.h
// has row-wise operations, products.h products of a few rows (by columns.h and amx.h), prefill.h
// attention of prompts over tiles of positions (tile.h), decode.h of decode steps, latent.h over
// latents, recurrence.h linear attention, and layer.h combines several of them in one call.

#pragma once

#include <cmath>
#include <cstdint>

#include "decode.h"
#include "latent.h"
#include "layer.h"
#include "prefill.h"
#include "products.h"
#include "recurrence.h"
#include "rows.h"
#include "vectors.h"

namespace {

template <typename T>
void add_rms_norm(T* x, const T* delta, const T* weight, T* out, int64_t rows, int64_t dim,
                  float eps, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && rows >= 8)
  add_rms_norm_rows(x, delta, weight, out, rows, dim, eps);
}

template <typename T>
void silu_and_mul(const T* gate_up, T* out, int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows >= 8)
  for (int64_t row = 0; row < rows; ++row)
    silu_and_mul_row(gate_up + row * 2 * dim, gate_up + (row * 2 + 1) * dim, out + row * dim, dim);
}

template <typename T>
void rope_and_write(const Rope<T>& rope, T* qkv, int64_t rows, int threads) {
  const int64_t width = (rope.heads + 2 * rope.pool.kv_heads) * rope.dim;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows >= 8)
  for (int64_t row = 0; row < rows; ++row)
    rope_and_write_row(rope, qkv + row * width, row, {0, rope.pool.kv_heads});
}

template <typename T>
int few_rows(const T* x, const Weight<T>& weight, T* out, int64_t rows, int threads) {
  if (rows > kMostRows && !kAnyRows<T>) return 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  if (rows > kMostRows) multiply_many_rows(x, weight, out, rows, threads);
  else multiply_rows(x, weight, out, rows);
  return 0;
}

// Returns 1 if the head size is not compiled.
template <typename T>
int decode_attention(const Decode& call, int64_t dim, const T* q, int64_t q_stride, const T* kv,
                     T* out, int threads) {
  if (!has_decode(dim)) return 1;
  const Parts parts(call.sequences, call.heads, call.pool.kv_heads, dim, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  decode_rows(call, dim, q, q_stride, kv, out, parts, [](int64_t, KvHeads) {});
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
    const Rope<T> rope{qk_norm, eps, cos, signed_sin, kv, slots, heads, static_cast<int>(dim), pool}; \
    rope_and_write(rope, qkv, rows, threads);                                                      \
  }                                                                                                \
  extern "C" int decode_attention_##NAME(                                                          \
      const T* q, int64_t q_stride, const T* kv, T* out, const int64_t* tables,                    \
      const int64_t* lens, const float* sinks, int64_t table_stride, int64_t sequences,            \
      int64_t heads, int64_t dim, int64_t window, float scale, float cap, int64_t block_stride,    \
      int64_t value_offset, int64_t block_size, int64_t kv_heads, int threads) {                   \
    const Pool pool{block_stride, value_offset, block_size, kv_heads};                             \
    const Decode call{tables, lens,  table_stride, sequences, heads, window, Scale::of(scale, cap), \
                      sinks,  pool};                                                               \
    return decode_attention(call, dim, q, q_stride, kv, out, threads);                             \
  }                                                                                                \
  extern "C" void prefill_attention_##NAME(                                                        \
      const T* q, int64_t q_stride, const T* kv, T* out, const int64_t* tables,                    \
      const int64_t* starts, const int64_t* lens, const float* sinks, int64_t table_stride,        \
      int64_t sequences, int64_t heads, int64_t dim, int64_t window, float scale, float cap,       \
      int64_t block_stride, int64_t value_offset, int64_t block_size, int64_t kv_heads,            \
      int causal, float* lse, int threads) {                                                       \
    const Pool pool{block_stride, value_offset, block_size, kv_heads};                             \
    const Prefill call{tables, starts, lens,     table_stride,   sequences, heads,                 \
                       window, q_stride, Scale::of(scale, cap), sinks, pool, causal != 0, lse};    \
    prefill(call, q, kv, out, dim, threads);                                                       \
  }                                                                                                \
  extern "C" int few_rows_##NAME(const T* x, const T* weights, const T* bias, T* out,              \
                                 int64_t rows, int64_t outputs, int64_t inputs, int threads) {     \
    return few_rows(x, {weights, bias, outputs, inputs}, out, rows, threads);                      \
  }                                                                                                \
  extern "C" int gated_mlp_##NAME(const MlpParts* own, const T* x, T* out, int64_t rows,           \
                                  int threads) {                                                   \
    return gated_mlp(*own, x, out, rows, threads);                                                 \
  }                                                                                                \
  extern "C" int attention_layer_##NAME(const AttentionParts* own, const DecodeRows* step,         \
                                        const T* x, const T* cos, const T* signed_sin, T* kv,      \
                                        T* out, int threads) {                                     \
    return attention_layer(*own, *step, x, cos, signed_sin, kv, out, threads);                     \
  }                                                                                                \
  extern "C" int decoder_layers_##NAME(                                                            \
      const LayerParts* layers, int64_t count, const DecodeRows* step, T* x, const T* delta,       \
      const T* cos, const T* signed_sin, T* kv, T* out, int threads) {                             \
    return decoder_layers(layers, count, *step, x, delta, cos, signed_sin, kv, out, threads);      \
  }                                                                                                \
  extern "C" int head_logits_##NAME(const HeadParts* own, T* x, const T* delta, float* logits,       \
                                    int64_t rows, int threads) {                                   \
    return head_logits(*own, x, delta, logits, rows, threads);                                     \
  }                                                                                                \
  extern "C" int most_rows_##NAME() { return kMostRows; }                                          \
  extern "C" int any_rows_##NAME() { return kAnyRows<T>; }                                         \
  extern "C" int panel_width_##NAME() { return kPanelWidth; }                                      \
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
