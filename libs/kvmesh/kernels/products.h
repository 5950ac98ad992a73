// Products of a few rows with weights in panels of 64 outputs, as fast as memory delivers them,
// which oneDNN's own products are not.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "prefill.h"
#include "vectors.h"

namespace {

// Rows that `few_rows` takes at most: so many are computed faster than by oneDNN, as measured on Zen 5
// (96 still are, by little). Without vectors of 512 bits that is while memory delivers weights no
// faster; host.py asks for fewer where oneDNN has tiles for bf16.
template <typename T>
constexpr int kMostRows = 4;
#ifdef __AVX512F__
template <>
constexpr int kMostRows<float> = 64;
#endif
#ifdef __AVX512BF16__
template <>
constexpr int kMostRows<Bf16> = 64;
#endif
// Rows that are computed at once: their sums fill three quarters of the vector registers.
constexpr int kRowBlock = 6;
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
    const Words pairs = Whole<Words>::load(weights + v * 2 * kWidth);
    const Floats even = bits_as<Floats>(pairs << 16), odd = bits_as<Floats>(pairs & 0xffff0000u);
    for (int row = 0; row < rows; ++row)
      sums[v][row] += even * widened(x[row * x_stride]) + odd * widened(x[row * x_stride + 1]);
#endif
  }
}

// Weights are asked for so many values before `multiply_add` reads them, of so many panels side by
// side: a core's own prefetcher has fewer reads under way than memory would answer.
template <typename T, int PANELS>
constexpr int64_t kAhead = (PANELS == 1 ? 2048 : 1536) / sizeof(T);

// Asks for a lane of inputs of a panel. It is used once, and drives nothing out of the caches.
template <typename T>
inline void fetch_lane(const T* weights) {
  for (int v = 0; v < kPanel / kWidth; ++v)
    __builtin_prefetch(reinterpret_cast<const char*>(weights) + v * 64, 0, 0);
}

// Inputs that are multiplied for all rows before the next: weights of so many, and of as many that
// come, lie in the first cache.
template <typename T>
constexpr int64_t kDepth = 256 / sizeof(T);

// Adds the product of R rows with 64 outputs over some inputs to `sums`; fetches LINES lines of what
// comes next in memory for every lane of inputs.
template <typename T, int R, int LINES>
void panel_rows(const T* x, const T* panel, int64_t inputs, int64_t count, const T* next,
                float (*sums)[kPanel]) {
  Floats own[kPanel / kWidth][kRowBlock];
  for (int v = 0; v < kPanel / kWidth; ++v)
    for (int row = 0; row < R; ++row) own[v][row] = load(sums[row] + v * kWidth);
  for (int64_t i = 0; i < count; i += kLane<T>) {
    for (int line = 0; line < LINES; ++line)
      __builtin_prefetch(next + (i * LINES + line * kLane<T>) * kWidth);
    multiply_add(panel + i * kPanel, x + i, inputs, R, own);
  }
  for (int v = 0; v < kPanel / kWidth; ++v)
    for (int row = 0; row < R; ++row) store(sums[row] + v * kWidth, own[v][row]);
}

// As `panel_rows` of at most a block of rows.
template <typename T, int LINES>
void panel_block(const T* x, const T* panel, int64_t rows, int64_t inputs, int64_t count,
                 const T* next, float (*sums)[kPanel]) {
  switch (rows) {
    case 1: panel_rows<T, 1, LINES>(x, panel, inputs, count, next, sums); break;
    case 2: panel_rows<T, 2, LINES>(x, panel, inputs, count, next, sums); break;
    case 3: panel_rows<T, 3, LINES>(x, panel, inputs, count, next, sums); break;
    case 4: panel_rows<T, 4, LINES>(x, panel, inputs, count, next, sums); break;
    case 5: panel_rows<T, 5, LINES>(x, panel, inputs, count, next, sums); break;
    default: panel_rows<T, 6, LINES>(x, panel, inputs, count, next, sums);
  }
}

// A panel, its bias or null, where its columns of the product go, and the panel that this thread
// multiplies with afterwards.
template <typename T>
struct Panel {
  const T *weights, *bias;
  T* out;
  const T* next;
};

// Product of at most a block of rows with one or two panels: their sums never leave the registers.
template <typename T, int R, int PANELS>
void few_rows_panels(const T* x, const Panel<T> (&panels)[PANELS], int64_t stride, int64_t inputs) {
  Floats sums[PANELS][kPanel / kWidth][kRowBlock] = {};
  const int64_t size = inputs * kPanel;
  for (int64_t i = 0; i < inputs; i += kLane<T>) {
    const int64_t ahead = i * kPanel + kAhead<T, PANELS>;
    for (int p = 0; p < PANELS; ++p) {
      const Panel<T>& panel = panels[p];
      fetch_lane(ahead < size ? panel.weights + ahead : panel.next + (ahead - size));
      multiply_add(panel.weights + i * kPanel, x + i, inputs, R, sums[p]);
    }
  }
  for (int p = 0; p < PANELS; ++p)
    for (int v = 0; v < kPanel / kWidth; ++v) {
      const T* const bias = panels[p].bias;
      const Floats added = bias == nullptr ? Floats{} : load(bias + v * kWidth);
      for (int row = 0; row < R; ++row)
        store(panels[p].out + row * stride + v * kWidth, sums[p][v][row] + added);
    }
}

// Product of more rows with one panel. Weights come from memory while those before them are
// multiplied: each of the first two blocks of rows asks for a half of what comes next, or each of
// the first four for a quarter.
template <typename T>
void more_rows_panel(const T* x, const Panel<T>& panel, int64_t rows, int64_t stride,
                     int64_t inputs) {
  float sums[kMostRows<T>][kPanel];
  std::fill_n(sums[0], rows * kPanel, 0.0f);
  const int64_t blocks = (rows + kRowBlock - 1) / kRowBlock, sharers = blocks > 3 ? 4 : 2;
  for (int64_t first = 0; first < inputs; first += kDepth<T>) {
    const int64_t count = std::min(kDepth<T>, inputs - first);
    const T* const part = panel.weights + first * kPanel;
    const T* const following = first + count < inputs ? part + count * kPanel : panel.next;
    for (int64_t block = 0, row = 0; block < blocks; ++block) {
      const int64_t size = (rows - row + blocks - block - 1) / (blocks - block);
      const T* const later = following + block * (count * kPanel / sharers);
      const T* const from = x + row * inputs + first;
      if (block >= sharers) panel_block<T, 0>(from, part, size, inputs, count, later, sums + row);
      else if (sharers == 4) panel_block<T, 1>(from, part, size, inputs, count, later, sums + row);
      else panel_block<T, 2>(from, part, size, inputs, count, later, sums + row);
      row += size;
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int v = 0; v < kPanel; v += kWidth) {
      const Floats added = panel.bias == nullptr ? Floats{} : load(panel.bias + v);
      store(panel.out + row * stride + v, load(sums[row] + v) + added);
    }
}

// A weight [outputs / 64][inputs / N][64][N], with N values to a lane, and its bias or null.
template <typename T>
struct Weight {
  const T *panels, *bias;
  int64_t outputs, inputs;

  // The panel of that number, whose columns go to `out`.
  Panel<T> panel(int64_t number, T* out, int64_t next) const {
    return {weights_of(number), bias == nullptr ? nullptr : bias + number * kPanel, out,
            weights_of(next)};
  }

 private:
  const T* weights_of(int64_t number) const { return panels + number * kPanel * inputs; }
};

// Columns of one panel of the product, at most `kMostRows` rows; `stride` leads to the next row of
// what comes out. A row's sums are taken in the same order whatever the number of rows.
template <typename T>
void multiply_panel(const T* x, const Panel<T>& panel, int64_t rows, int64_t stride,
                    int64_t inputs) {
  const Panel<T> alone[1] = {panel};
  switch (rows) {
    case 1: few_rows_panels<T, 1>(x, alone, stride, inputs); break;
    case 2: few_rows_panels<T, 2>(x, alone, stride, inputs); break;
    case 3: few_rows_panels<T, 3>(x, alone, stride, inputs); break;
    case 4: few_rows_panels<T, 4>(x, alone, stride, inputs); break;
    default:
      // Where fewer rows are taken there are none of these sums.
      if constexpr (kMostRows<T> > kRowBlock) {
        if (rows == 5) few_rows_panels<T, 5>(x, alone, stride, inputs);
        else if (rows == 6) few_rows_panels<T, 6>(x, alone, stride, inputs);
        else more_rows_panel(x, panel, rows, stride, inputs);
      }
  }
}

// As `multiply_panel` of one after the other. Two streams of weights keep more of a core's reads
// under way than one; sums of more rows with both would not fit the registers.
template <typename T>
void multiply_panels(const T* x, const Panel<T> (&panels)[2], int64_t rows, int64_t stride,
                     int64_t inputs) {
  switch (rows) {
    case 1: few_rows_panels<T, 1>(x, panels, stride, inputs); break;
    case 2: few_rows_panels<T, 2>(x, panels, stride, inputs); break;
    case 3: few_rows_panels<T, 3>(x, panels, stride, inputs); break;
    default: {
      const auto& [first, second] = panels;
      const Panel<T> one{first.weights, first.bias, first.out, second.weights};
      const Panel<T> other{second.weights, second.bias, second.out, first.next};
      multiply_panel(x, one, rows, stride, inputs);
      multiply_panel(x, other, rows, stride, inputs);
    }
  }
}

// The product, by all threads of the region that calls it. Panels are handed out in runs that grow
// shorter: memory does not serve every core alike, and the last one would be waited for.
template <typename T>
void multiply_rows(const T* x, const Weight<T>& weight, T* out, int64_t rows) {
#pragma omp for schedule(guided)
  for (int64_t number = 0; number < weight.outputs / kPanel; ++number)
    multiply_panel(x, weight.panel(number, out + number * kPanel, number + 1), rows, weight.outputs,
                   weight.inputs);
}

}  // namespace
