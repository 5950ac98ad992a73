// Decode attention over latents (MLA): all heads of a sequence use the same vectors, which are read
// in place. Twin: latent.py.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

struct Latents {
  const int64_t *tables, *lens;
  int64_t table_stride, sequences, heads, width, rank, block_stride, block_size;
  float scale;
};

// Number of heads that share one load of a vector.
constexpr int kLatentHeads = 4;

// Online softmax of some heads of one sequence.
struct LatentSums {
  const float* q;
  float highest[kLatentHeads], total[kLatentHeads];
  float* acc;
};

// Adds at most sixteen positions of one block.
template <typename T, int H>
void attend_latents(const Latents& call, LatentSums& own, const T* vectors, int64_t count) {
  float scores[H][kWidth];
  for (int h = 0; h < H; ++h) store(scores[h], splat(-std::numeric_limits<float>::infinity()));
  for (int64_t p = 0; p < count; ++p) {
    Floats products[H] = {};
    for (int64_t i = 0; i < call.width; i += kWidth) {
      const Floats vector = load(vectors + p * call.width + i);
      for (int h = 0; h < H; ++h) products[h] += load(own.q + h * call.width + i) * vector;
    }
    for (int h = 0; h < H; ++h) scores[h][p] = sum(products[h]);
  }
  float rescale[H];
  for (int h = 0; h < H; ++h) {
    float peak = own.highest[h];
    for (int64_t p = 0; p < count; ++p) peak = std::max(peak, scores[h][p]);
    rescale[h] = std::exp(own.highest[h] - peak);
    const Floats weights = exponential(load(scores[h]) - peak);
    store(scores[h], weights);
    own.highest[h] = peak;
    own.total[h] = own.total[h] * rescale[h];
    for (int64_t p = 0; p < count; ++p) own.total[h] += scores[h][p];
  }
  for (int64_t i = 0; i < call.rank; i += kWidth) {
    Floats mixed[H];
    for (int h = 0; h < H; ++h) mixed[h] = load(own.acc + h * call.rank + i) * rescale[h];
    for (int64_t p = 0; p < count; ++p) {
      const Floats vector = load(vectors + p * call.width + i);
      for (int h = 0; h < H; ++h) mixed[h] += scores[h][p] * vector;
    }
    for (int h = 0; h < H; ++h) store(own.acc + h * call.rank + i, mixed[h]);
  }
}

template <typename T, int H>
void attend_latent_heads(const Latents& call, const T* q, const T* kv, T* out, int64_t sequence,
                         int64_t head) {
  std::vector<float> scaled(H * call.width), acc(H * call.rank, 0.0f);
  const int64_t row = sequence * call.heads + head;
  for (int64_t i = 0; i < H * call.width; i += kWidth)
    store(&scaled[i], load(q + row * call.width + i) * call.scale);
  LatentSums own{scaled.data(), {}, {}, acc.data()};
  std::fill(own.highest, own.highest + H, -std::numeric_limits<float>::infinity());
  const int64_t* const table = call.tables + sequence * call.table_stride;
  for (int64_t at = 0; at < call.lens[sequence];) {
    const int64_t offset = at % call.block_size;
    const int64_t left = std::min(call.block_size - offset, call.lens[sequence] - at);
    const int64_t count = std::min<int64_t>(left, kWidth);
    const T* const block = kv + table[at / call.block_size] * call.block_stride;
    attend_latents<T, H>(call, own, block + offset * call.width, count);
    at += count;
  }
  for (int h = 0; h < H; ++h)
    for (int64_t i = 0; i < call.rank; i += kWidth)
      store(out + (row + h) * call.rank + i, load(own.acc + h * call.rank + i) / own.total[h]);
}

template <typename T>
void latent_decode(const Latents& call, const T* q, const T* kv, T* out, int threads) {
  const int64_t groups = (call.heads + kLatentHeads - 1) / kLatentHeads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t item = 0; item < call.sequences * groups; ++item) {
    const int64_t sequence = item / groups, head = item % groups * kLatentHeads;
    switch (call.heads - head) {
      case 1: attend_latent_heads<T, 1>(call, q, kv, out, sequence, head); break;
      case 2: attend_latent_heads<T, 2>(call, q, kv, out, sequence, head); break;
      case 3: attend_latent_heads<T, 3>(call, q, kv, out, sequence, head); break;
      default: attend_latent_heads<T, 4>(call, q, kv, out, sequence, head);
    }
  }
}

}  // namespace
