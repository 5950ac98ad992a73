// Linear attention on the CPU, position by position. A strip of 64 columns of one head's state
// stays in the L1 cache for all positions. That takes less arithmetic than chunks of positions with
// their matrix products and triangular systems, and a row's result does not depend on how its
// prompt was split. Twins: linear_reference.py, lightning_reference.py.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kMostKeys = 256;

// Inputs of one head of one sequence.
struct Carry {
  // Successive positions are `stride` apart; `q` is scaled.
  const float *q, *k, *v;
  int64_t stride;
  // Logarithms, one or `key_dim` per position, and betas; without betas values are only added.
  const float *decay, *share;
  int64_t decay_stride, decay_width, share_stride;
  float* out;
  int64_t out_stride, positions, key_dim, value_dim;
};

inline void factors_of(const Carry& head, int64_t position, float* factors) {
  const float* const decay = head.decay + position * head.decay_stride;
  if (head.decay_width == 1) {
    std::fill(factors, factors + head.key_dim, std::exp(decay[0]));
    return;
  }
  for (int64_t i = 0; i < head.key_dim; i += kWidth)
    store(factors + i, exponential(load(decay + i)));
}

// Runs S vectors of state columns, starting at `state`.
template <int S>
void carry_strip(const Carry& head, float* state, int64_t column) {
  float factors[kMostKeys];
  for (int64_t position = 0; position < head.positions; ++position) {
    const float* const q = head.q + position * head.stride;
    const float* const k = head.k + position * head.stride;
    const float* const v = head.v + position * head.stride + column;
    factors_of(head, position, factors);
    Floats change[S];
    for (int s = 0; s < S; ++s) change[s] = load(v + s * kWidth);
    if (head.share != nullptr) {
      // Moves the decayed state's answer for the key towards the value by beta.
      Floats known[S] = {};
      for (int64_t i = 0; i < head.key_dim; ++i) {
        const float weight = k[i] * factors[i];
        const float* const row = state + i * head.value_dim;
        for (int s = 0; s < S; ++s) known[s] += weight * load(row + s * kWidth);
      }
      const float share = head.share[position * head.share_stride];
      for (int s = 0; s < S; ++s) change[s] = (change[s] - known[s]) * share;
    }
    Floats answer[S] = {};
    for (int64_t i = 0; i < head.key_dim; ++i) {
      float* const row = state + i * head.value_dim;
      for (int s = 0; s < S; ++s) {
        const Floats value = load(row + s * kWidth) * factors[i] + k[i] * change[s];
        store(row + s * kWidth, value);
        answer[s] += q[i] * value;
      }
    }
    float* const out = head.out + position * head.out_stride + column;
    for (int s = 0; s < S; ++s) store(out + s * kWidth, answer[s]);
  }
}

inline void carry(const Carry& head, float* state) {
  constexpr int64_t kStrip = 4 * kWidth;
  int64_t column = 0;
  for (; column + kStrip <= head.value_dim; column += kStrip)
    carry_strip<4>(head, state + column, column);
  for (; column < head.value_dim; column += kWidth) carry_strip<1>(head, state + column, column);
}

// Shape of a call: `positions` successive rows of each of `sequences`, whose states are
// `state_stride` apart.
struct Linear {
  int64_t sequences, positions, key_heads, heads, key_dim, value_dim, state_stride;
};

// Convolves every channel with its latest inputs, then applies silu; leaves the next call's
// previous inputs in `before`, [kernel - 1][channels].
template <typename T>
void convolve(const T* x, int64_t x_stride, const float* taps, float* before, float* out,
              int64_t positions, int64_t channels, int64_t kernel) {
  const int64_t past = kernel - 1;
  std::vector<Floats> inputs(kernel);
  for (int64_t channel = 0; channel < channels; channel += kWidth) {
    for (int64_t tap = 0; tap < past; ++tap) inputs[tap] = load(before + tap * channels + channel);
    for (int64_t position = 0; position < positions; ++position) {
      inputs[past] = load(x + position * x_stride + channel);
      Floats total{};
      for (int64_t tap = 0; tap < kernel; ++tap)
        total += inputs[tap] * load(taps + tap * channels + channel);
      store(out + position * channels + channel, total / (exponential(-total) + 1.0f));
      for (int64_t tap = 0; tap < past; ++tap) inputs[tap] = inputs[tap + 1];
    }
    for (int64_t tap = 0; tap < past; ++tap) store(before + tap * channels + channel, inputs[tap]);
  }
}

// Scales a vector to length `length`.
inline void normalize(float* x, int64_t dim, float length) {
  Floats squares{};
  for (int64_t i = 0; i < dim; i += kWidth) squares += load(x + i) * load(x + i);
  const float factor = length / std::sqrt(sum(squares) + 1e-6f);
  for (int64_t i = 0; i < dim; i += kWidth) store(x + i, load(x + i) * factor);
}

// The gated delta rule on the projections' outputs. A state is the heads' matrices, then the inputs
// of the convolution; `active` is scratch memory of [rows][channels].
template <typename T>
void delta_rule(const Linear& call, const T* mixed, int64_t mixed_stride, const float* taps,
                int64_t kernel, const float* decay, int64_t decay_width, const float* share,
                float* states, float* active, float* out, int threads) {
  const int64_t keys = call.key_heads * call.key_dim, values = call.heads * call.value_dim;
  const int64_t channels = 2 * keys + values, rows = call.sequences * call.positions;
  const int64_t matrix = call.key_dim * call.value_dim;
#pragma omp parallel for num_threads(threads) if (threads > 1 && call.sequences > 1)
  for (int64_t sequence = 0; sequence < call.sequences; ++sequence) {
    const int64_t row = sequence * call.positions;
    convolve(mixed + row * mixed_stride, mixed_stride, taps,
             states + sequence * call.state_stride + call.heads * matrix, active + row * channels,
             call.positions, channels, kernel);
  }
  const float length = 1.0f / std::sqrt(static_cast<float>(call.key_dim));
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < 2 * call.key_heads; ++head)
      normalize(active + row * channels + head * call.key_dim, call.key_dim,
                head < call.key_heads ? length : 1.0f);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t item = 0; item < call.sequences * call.heads; ++item) {
    const int64_t sequence = item / call.heads, head = item % call.heads;
    const int64_t row = sequence * call.positions, place = row * call.heads + head;
    const float* const q =
        active + row * channels + head / (call.heads / call.key_heads) * call.key_dim;
    const Carry one{q,
                    q + keys,
                    active + row * channels + 2 * keys + head * call.value_dim,
                    channels,
                    decay + place * decay_width,
                    share + place,
                    call.heads * decay_width,
                    decay_width,
                    call.heads,
                    out + place * call.value_dim,
                    values,
                    call.positions,
                    call.key_dim,
                    call.value_dim};
    carry(one, states + sequence * call.state_stride + head * matrix);
  }
}

// Lightning attention: `heads` has queries, keys and values of each head, [rows][heads][3 * dim];
// `decay` has one logarithm per head.
inline void lightning(const Linear& call, const float* heads, const float* decay, float* states,
                      float* out, int threads) {
  const int64_t width = 2 * call.key_dim + call.value_dim;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t item = 0; item < call.sequences * call.heads; ++item) {
    const int64_t sequence = item / call.heads, head = item % call.heads;
    const int64_t place = sequence * call.positions * call.heads + head;
    const float* const q = heads + place * width;
    const Carry one{q,
                    q + call.key_dim,
                    q + 2 * call.key_dim,
                    call.heads * width,
                    decay + head,
                    nullptr,
                    0,
                    1,
                    0,
                    out + place * call.value_dim,
                    call.heads * call.value_dim,
                    call.positions,
                    call.key_dim,
                    call.value_dim};
    carry(one, states + sequence * call.state_stride + head * call.key_dim * call.value_dim);
  }
}

}  // namespace
