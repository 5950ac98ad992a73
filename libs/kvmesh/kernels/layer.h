// Decoder layers, or half of one, in one call for steps of a few rows: attention with its
// projections, an MLP, and the norms before them; also the last norm with the head. One parallel
// region serves the whole call, and nothing returns to Python in between. The parts are those of
// rows.h, products.h and decode.h, so results equal those of separate calls bit for bit.

#pragma once

#include <algorithm>
#include <cstdint>

#include "decode.h"
#include "products.h"
#include "rows.h"
#include "scratch.h"

namespace {

// Structures of host_layer.py, in the same order: weights of a layer, and the rows of a step.
struct AttentionParts {
  const void *qkv, *qkv_bias, *output, *output_bias, *qk_norm;
  const float* sinks;
  int64_t hidden, heads, window;
  float norm_eps, scale, cap;
};

struct MlpParts {
  const void *gate_up, *gate_up_bias, *down, *down_bias;
  int64_t hidden, inner;
};

// `place` is the layer's index in the pool.
struct LayerParts {
  AttentionParts attention;
  MlpParts mlp;
  const void *input_norm, *post_norm;
  float eps;
  int64_t place;
};

struct HeadParts {
  const void *norm, *head, *head_bias;
  int64_t hidden, vocab;
  float eps;
};

struct DecodeRows {
  const int64_t *slots, *tables, *lens;
  int64_t rows, table_stride, dim, layer_stride, block_stride, value_offset, block_size, kv_heads;
};

template <typename T>
Weight<T> weight_of(const void* panels, const void* bias, int64_t outputs, int64_t inputs) {
  return {static_cast<const T*>(panels), static_cast<const T*>(bias), outputs, inputs};
}

// An MLP with its intermediate memory; all threads of a parallel region call `run`.
template <typename T>
struct Mlp {
  Weight<T> gate_up, down;
  // [rows][inner].
  T* active;

  Mlp(const MlpParts& own, T* memory)
      : gate_up(weight_of<T>(own.gate_up, own.gate_up_bias, 2 * own.inner, own.hidden)),
        down(weight_of<T>(own.down, own.down_bias, own.hidden, own.inner)),
        active(memory) {}

  static int64_t size(const MlpParts& own, int64_t rows) { return rows * own.inner; }

  void run(const T* x, T* out, int64_t rows) const {
    const int64_t inner = down.inputs, pairs = inner / kPanel;
    // One thread computes gates and ups of the same columns and activates them at once.
#pragma omp for schedule(guided)
    for (int64_t panel = 0; panel < pairs; ++panel) {
      T gates[kMostRows * kPanel], ups[kMostRows * kPanel];
      const int64_t up = pairs + panel;
      multiply_panels(x, {gate_up.panel(panel, gates, panel + 1), gate_up.panel(up, ups, up + 1)},
                      rows, kPanel, gate_up.inputs);
      for (int64_t row = 0; row < rows; ++row)
        silu_and_mul_row(gates + row * kPanel, ups + row * kPanel,
                         active + row * inner + panel * kPanel, kPanel);
    }
    multiply_rows(active, down, out, rows);
  }
};

// Attention of rows of different sequences, with its intermediate memory.
template <typename T>
struct Attention {
  Rope<T> rope;
  Decode call;
  Weight<T> qkv, output;
  const Parts& parts;
  // [rows][heads and keys and values] and [rows][heads].
  T *heads, *attended;

  Attention(const AttentionParts& own, const DecodeRows& step, const T* cos, const T* signed_sin,
            T* kv, T* memory, const Parts& all_parts)
      : rope{static_cast<const T*>(own.qk_norm), own.norm_eps, cos, signed_sin, kv, step.slots,
             own.heads, static_cast<int>(step.dim), pool_of(step)},
        call{step.tables, step.lens, step.table_stride, step.rows, own.heads, own.window,
             Scale::of(own.scale, own.cap), own.sinks, pool_of(step)},
        qkv(weight_of<T>(own.qkv, own.qkv_bias, width(own, step), own.hidden)),
        output(weight_of<T>(own.output, own.output_bias, own.hidden, own.heads * step.dim)),
        parts(all_parts),
        heads(memory),
        attended(memory + step.rows * qkv.outputs) {}

  static int64_t size(const AttentionParts& own, const DecodeRows& step) {
    return step.rows * (width(own, step) + own.heads * step.dim);
  }

  // Projects the rows, rotates their heads, writes keys and values, attends and projects back;
  // called by all threads of a parallel region.
  void run(const T* x, T* out) const {
    const int64_t rows = call.sequences, width = qkv.outputs;
    multiply_rows(x, qkv, heads, rows);
    const auto turn = [&](int64_t row, KvHeads own) {
      rope_and_write_row(rope, heads + row * width, row, own);
    };
    decode_rows(call, rope.dim, heads, width, rope.kv, attended, parts, turn);
    multiply_rows(attended, output, out, rows);
  }

 private:
  static int64_t width(const AttentionParts& own, const DecodeRows& step) {
    return (own.heads + 2 * step.kv_heads) * step.dim;
  }

  static Pool pool_of(const DecodeRows& step) {
    return {step.block_stride, step.value_offset, step.block_size, step.kv_heads};
  }
};

// These, and `head_logits`, return 1 for too many rows or a head size that is not compiled.

template <typename T>
int gated_mlp(const MlpParts& own, const T* x, T* out, int64_t rows, int threads) {
  if (rows > kMostRows) return 1;
  const Mlp<T> mlp(own, scratch<T, Use::kRows>(Mlp<T>::size(own, rows)));
#pragma omp parallel num_threads(threads) if (threads > 1)
  mlp.run(x, out, rows);
  return 0;
}

template <typename T>
int attention_layer(const AttentionParts& own, const DecodeRows& step, const T* x, const T* cos,
                    const T* signed_sin, T* kv, T* out, int threads) {
  if (step.rows > kMostRows || !has_decode(step.dim)) return 1;
  T* const memory = scratch<T, Use::kRows>(Attention<T>::size(own, step));
  const Parts parts(step.rows, own.heads, step.kv_heads, step.dim, threads);
  const Attention<T> attention(own, step, cos, signed_sin, kv, memory, parts);
#pragma omp parallel num_threads(threads) if (threads > 1)
  attention.run(x, out);
  return 0;
}

// Adds `delta` (unless null) and the layers' outputs to the residual stream `x`, except the last
// MLP's output, which goes to `out`. All layers have one head size.
template <typename T>
int decoder_layers(const LayerParts* layers, int64_t count, const DecodeRows& step, T* x,
                   const T* delta, const T* cos, const T* signed_sin, T* kv, T* out, int threads) {
  if (step.rows > kMostRows || !has_decode(step.dim)) return 1;
  const int64_t rows = step.rows, hidden = layers->attention.hidden, stream = rows * hidden;
  int64_t between = 0, heads = 0;
  for (int64_t number = 0; number < count; ++number) {
    const LayerParts& layer = layers[number];
    between = std::max({between, Attention<T>::size(layer.attention, step),
                        Mlp<T>::size(layer.mlp, rows)});
    heads = std::max(heads, layer.attention.heads);
  }
  T* const normed = scratch<T, Use::kRows>(2 * stream + between);
  T* const mixed = normed + stream;
  const Parts parts(rows, heads, step.kv_heads, step.dim, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (int64_t number = 0; number < count; ++number) {
    const LayerParts& layer = layers[number];
    const Attention<T> attention(layer.attention, step, cos, signed_sin,
                                 kv + layer.place * step.layer_stride, mixed + stream, parts);
    const Mlp<T> mlp(layer.mlp, mixed + stream);
    add_rms_norm_rows(x, number == 0 ? delta : out, static_cast<const T*>(layer.input_norm), normed,
                      rows, hidden, layer.eps);
    attention.run(normed, mixed);
    add_rms_norm_rows(x, mixed, static_cast<const T*>(layer.post_norm), normed, rows, hidden,
                      layer.eps);
    mlp.run(normed, out, rows);
  }
  return 0;
}

// Adds `delta` to the stream `x` and computes the logits of its norm, with T's precision.
template <typename T>
int head_logits(const HeadParts& own, T* x, const T* delta, float* logits, int64_t rows,
                int threads) {
  if (rows > kMostRows) return 1;
  const Weight<T> head = weight_of<T>(own.head, own.head_bias, own.vocab, own.hidden);
  T* const normed = scratch<T, Use::kRows>(rows * own.hidden);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    add_rms_norm_rows(x, delta, static_cast<const T*>(own.norm), normed, rows, own.hidden, own.eps);
#pragma omp for schedule(guided)
    for (int64_t number = 0; number < own.vocab / kPanel; ++number) {
      T scores[kMostRows * kPanel];
      multiply_panel(normed, head.panel(number, scores, number + 1), rows, kPanel, own.hidden);
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < kPanel; i += kWidth)
          store(logits + row * own.vocab + number * kPanel + i, load(scores + row * kPanel + i));
    }
  }
  return 0;
}

}  // namespace
