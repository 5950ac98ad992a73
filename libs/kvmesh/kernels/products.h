// Products of a few rows with weights in panels of 64 outputs, as fast as memory delivers them,
// which oneDNN's own products are not.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "prefill.h"
#include "vectors.h"

namespace {

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

// Product of at most a block of rows with one panel: their sums never leave the registers.
template <typename T, int R>
void few_rows_panel(const T* x, const T* panel, const T* bias, T* out, int64_t outputs,
                    int64_t inputs) {
  Floats sums[kPanel / kWidth][kRowBlock] = {};
  for (int64_t i = 0; i < inputs; i += kLane<T>) {
    fetch_ahead<0>(panel + i * kPanel);
    multiply_add(panel + i * kPanel, x + i, inputs, R, sums);
  }
  for (int v = 0; v < kPanel / kWidth; ++v) {
    const Floats added = bias == nullptr ? Floats{} : load(bias + v * kWidth);
    for (int row = 0; row < R; ++row) store(out + row * outputs + v * kWidth, sums[v][row] + added);
  }
}

// Product of more rows with one panel. Its weights come from memory for the first four rows, or
// with the rows before, and from the cache for the rest.
template <typename T>
void more_rows_panel(const T* x, const T* panel, const T* bias, T* out, int64_t rows,
                     int64_t outputs, int64_t inputs) {
  float sums[kMostRows<T>][kPanel] = {};
  for (int64_t first = 0; first < inputs; first += kDepth<T>) {
    const int64_t count = std::min(kDepth<T>, inputs - first);
    const T* const part = panel + first * kPanel;
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
      const Floats added = bias == nullptr ? Floats{} : load(bias + v);
      store(out + row * outputs + v, load(sums[row] + v) + added);
    }
}

// A weight [outputs / 64][inputs / N][64][N], with N values to a lane, and its bias or null.
template <typename T>
struct Weight {
  const T *panels, *bias;
  int64_t outputs, inputs;
};

// Columns of one panel of the product, at most `kMostRows` rows; `stride` leads to the next row of
// `out`. A row's sums are taken in the same order whatever the number of rows.
template <typename T>
void multiply_panel(const T* x, const Weight<T>& weight, int64_t panel, T* out, int64_t rows,
                    int64_t stride) {
  const T* const own = weight.panels + panel * kPanel * weight.inputs;
  const T* const bias = weight.bias == nullptr ? nullptr : weight.bias + panel * kPanel;
  switch (rows) {
    case 1: few_rows_panel<T, 1>(x, own, bias, out, stride, weight.inputs); break;
    case 2: few_rows_panel<T, 2>(x, own, bias, out, stride, weight.inputs); break;
    case 3: few_rows_panel<T, 3>(x, own, bias, out, stride, weight.inputs); break;
    case 4: few_rows_panel<T, 4>(x, own, bias, out, stride, weight.inputs); break;
    default: more_rows_panel(x, own, bias, out, rows, stride, weight.inputs);
  }
}

// The product, by all threads of the region that calls it. Panels are handed out in runs that grow
// shorter: memory does not serve every core alike, and the last one would be waited for.
template <typename T>
void multiply_rows(const T* x, const Weight<T>& weight, T* out, int64_t rows) {
#pragma omp for schedule(guided)
  for (int64_t panel = 0; panel < weight.outputs / kPanel; ++panel)
    multiply_panel(x, weight, panel, out + panel * kPanel, rows, weight.outputs);
}

}  // namespace
