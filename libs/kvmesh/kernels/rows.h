// Row-wise operations of a layer between its matrix products: norms, activations, and rotary
// embedding with the KV write. Twins: reference.py.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "prefill.h"
#include "vectors.h"

namespace {

// Called by all threads of a parallel region.
template <typename T>
inline void add_rms_norm_rows(T* x, const T* delta, const T* weight, T* out, int64_t rows,
                              int64_t dim, float eps) {
#pragma omp for schedule(static)
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
inline void silu_and_mul_row(const T* gate, const T* up, T* out, int64_t dim) {
  for (int64_t i = 0; i < dim; i += kWidth) {
    const Floats g = load(gate + i);
    store(out + i, g / (exponential(-g) + 1.0f) * load(up + i));
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

// Rotation of a layer's heads, and places of their keys and values.
template <typename T>
struct Rope {
  // [heads + kv_heads][dim] or null, with its epsilon.
  const T* qk_norm;
  float eps;
  // [rows][dim].
  const T *cos, *signed_sin;
  T* kv;
  const int64_t* slots;
  int64_t heads;
  int dim;
  Pool pool;
};

// `own` has the row's queries, keys and values; rotates and writes those of some KV heads.
template <typename T>
inline void rope_and_write_row(const Rope<T>& rope, T* own, int64_t row, KvHeads those) {
  const Pool& pool = rope.pool;
  const int64_t turned = rope.heads + pool.kv_heads;
  const int dim = rope.dim;
  const auto turn = [&](int64_t first, int64_t last) {
    for (int64_t head = first; head < last; ++head)
      norm_rope_head(own + head * dim, rope.qk_norm == nullptr ? nullptr : rope.qk_norm + head * dim,
                     rope.eps, rope.cos + row * dim, rope.signed_sin + row * dim, dim);
  };
  turn(those.first * rope.heads / pool.kv_heads, those.last * rope.heads / pool.kv_heads);
  turn(rope.heads + those.first, rope.heads + those.last);
  const int64_t slot = rope.slots[row];
  const int64_t block = slot / pool.block_size, offset = slot % pool.block_size;
  const size_t bytes = static_cast<size_t>((those.last - those.first) * dim) * sizeof(T);
  T* const key = rope.kv + block * pool.block_stride + (offset * pool.kv_heads + those.first) * dim;
  std::memcpy(key, own + (rope.heads + those.first) * dim, bytes);
  std::memcpy(key + pool.value_offset, own + (turned + those.first) * dim, bytes);
}

}  // namespace
