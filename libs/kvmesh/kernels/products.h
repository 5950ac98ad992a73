// Products of a few rows with weights in panels of 64 outputs, at the speed of memory, which oneDNN
// does not reach.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "prefill.h"
#include "vectors.h"

namespace {

// Maximum number of rows that are computed together: with 512-bit vectors they are faster than
// oneDNN up to this number, measured on Zen 5 (at 96 still a little). host.py uses fewer if oneDNN
// has bf16 tiles.
constexpr int kMostRows = 64;
// Whether more rows are computed here as well, in chunks: if oneDNN has no products of the dtype,
// or another layout of weights.
template <typename T>
constexpr bool kAnyRows = !kManyRegisters || !std::is_same_v<typename Factor<T>::Type, T>;
// Number of rows whose sums fill three quarters of the vector registers.
constexpr int kRowBlock = 6;
constexpr int kPanel = 64;

// Adds the products of some rows with V vectors of weights to their sums, for one step of inputs.
template <int V>
inline void multiply_add(const float* weights, const float* x, int64_t x_stride, int rows,
                         Floats (*sums)[kRowBlock]) {
  for (int v = 0; v < V; ++v) {
    const Floats w = load(weights + v * kWidth);
    for (int row = 0; row < rows; ++row) sums[v][row] += w * x[row * x_stride];
  }
}

inline float widened(Bf16 value) { return bits_as<float>(static_cast<uint32_t>(value) << 16); }

// Splits weights of two inputs, which share a lane.
struct EvenOdd {
  Floats even, odd;

  explicit EvenOdd(const Bf16* weights) {
    const Words pairs = Whole<Words>::load(weights);
    even = bits_as<Floats>(pairs << 16), odd = bits_as<Floats>(pairs & 0xffff0000u);
  }
};

template <int V>
inline void multiply_add(const Bf16* weights, const Bf16* x, int64_t x_stride, int rows,
                         Floats (*sums)[kRowBlock]) {
  for (int v = 0; v < V; ++v) {
#ifdef __AVX512BF16__
    for (int row = 0; row < rows; ++row)
      sums[v][row] = multiply_add(sums[v][row], weights + v * 2 * kWidth, x + row * x_stride);
#else
    const EvenOdd w(weights + v * 2 * kWidth);
    for (int row = 0; row < rows; ++row) {
      sums[v][row] += w.even * widened(x[row * x_stride]);
      sums[v][row] += w.odd * widened(x[row * x_stride + 1]);
    }
#endif
  }
}

// Prefetch distance in weights, by the number of panels read side by side: a core's hardware
// prefetcher has fewer reads in flight than memory can serve.
template <typename T, int PANELS>
constexpr int64_t kAhead = (PANELS == 1 ? 2048 : 1536) / sizeof(T);

// Prefetches one lane of inputs of a panel, which is used once and should not evict cached data.
template <typename T>
inline void fetch_lane(const T* weights) {
  for (int v = 0; v < kPanel / kWidth; ++v)
    __builtin_prefetch(reinterpret_cast<const char*>(weights) + v * 64, 0, 0);
}

// Number of inputs that are multiplied for all rows before the next: their weights, and as many
// prefetched ones, fit the L1 cache.
template <typename C>
constexpr int64_t kDepth = 256 / sizeof(C);

// Adds the product of R rows with 64 outputs over some inputs to `sums`; prefetches LINES lines of
// the following memory per lane of inputs.
template <typename C, int R, int LINES>
void panel_rows(const C* x, int64_t x_stride, const C* panel, int64_t count, const char* next,
                float (*sums)[kPanel]) {
  constexpr int kAll = kPanel / kWidth, kAtOnce = kManyRegisters ? kAll : 1;
  for (int first = 0; first < kAll; first += kAtOnce) {
    Floats own[kAtOnce][kRowBlock];
    for (int v = 0; v < kAtOnce; ++v)
      for (int row = 0; row < R; ++row) own[v][row] = load(sums[row] + (first + v) * kWidth);
    const char* line = next + first * 64;
    // Weights that are read once per sixteen outputs would otherwise be evicted from the L1 cache.
    constexpr int kCache = kManyRegisters ? 3 : 2;
    for (int64_t i = 0; i < count; i += kLane<C>, line += LINES * 64) {
      for (int v = 0; v < kAtOnce; ++v)
        if (first + v < LINES) __builtin_prefetch(line + v * 64, 0, kCache);
      multiply_add<kAtOnce>(panel + i * kPanel + first * kWidth * kLane<C>, x + i, x_stride, R, own);
    }
    for (int v = 0; v < kAtOnce; ++v)
      for (int row = 0; row < R; ++row) store(sums[row] + (first + v) * kWidth, own[v][row]);
  }
}

// Variant of `panel_rows` for any number of rows in a block.
template <typename C, int LINES>
void panel_block(const C* x, int64_t x_stride, const C* panel, int64_t rows, int64_t count,
                 const char* next, float (*sums)[kPanel]) {
  switch (rows) {
    case 1: panel_rows<C, 1, LINES>(x, x_stride, panel, count, next, sums); break;
    case 2: panel_rows<C, 2, LINES>(x, x_stride, panel, count, next, sums); break;
    case 3: panel_rows<C, 3, LINES>(x, x_stride, panel, count, next, sums); break;
    case 4: panel_rows<C, 4, LINES>(x, x_stride, panel, count, next, sums); break;
    case 5: panel_rows<C, 5, LINES>(x, x_stride, panel, count, next, sums); break;
    default: panel_rows<C, 6, LINES>(x, x_stride, panel, count, next, sums);
  }
}

// A panel, its bias or null, the destination of its columns, and the panel that this thread
// multiplies next.
template <typename T>
struct Panel {
  const T *weights, *bias;
  T* out;
  const T* next;
};

// Product of at most one block of rows with one or two panels; the sums stay in registers.
template <typename T, int R, int PANELS>
void few_rows_panels(const T* x, const Panel<T> (&panels)[PANELS], int64_t stride, int64_t inputs) {
  Floats sums[PANELS][kPanel / kWidth][kRowBlock] = {};
  const int64_t size = inputs * kPanel;
  for (int64_t i = 0; i < inputs; i += kLane<T>) {
    const int64_t ahead = i * kPanel + kAhead<T, PANELS>;
    for (int p = 0; p < PANELS; ++p) {
      const Panel<T>& panel = panels[p];
      fetch_lane(ahead < size ? panel.weights + ahead : panel.next + (ahead - size));
      multiply_add<kPanel / kWidth>(panel.weights + i * kPanel, x + i, inputs, R, sums[p]);
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

// Operands of a panel and rows over some inputs: the originals if the CPU multiplies their dtype,
// else copies widened once for all rows.
template <typename T, typename C>
struct Factors {
  alignas(64) C panel[kDepth<C> * kPanel], x[kMostRows * kDepth<C>];

  struct Place {
    const C *panel, *x;
    int64_t x_stride;
  };

  Place of(const T* from, const T* rows_x, int64_t inputs, int64_t rows, int64_t count) {
    for (int64_t i = 0; i < count; i += 2)
      for (int v = 0; v < kPanel; v += kWidth) {
        const EvenOdd w(from + i * kPanel + v * 2);
        store(panel + i * kPanel + v, w.even);
        store(panel + (i + 1) * kPanel + v, w.odd);
      }
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < count; i += kWidth)
        store(x + row * kDepth<C> + i, load(rows_x + row * inputs + i));
    return {panel, x, kDepth<C>};
  }
};
template <typename T>
struct Factors<T, T> {
  struct Place {
    const T *panel, *x;
    int64_t x_stride;
  };

  Place of(const T* from, const T* rows_x, int64_t inputs, int64_t, int64_t) {
    return {from, rows_x, inputs};
  }
};

// Writes sums plus the panel's bias to their destination.
template <typename T>
void finish_panel(const Panel<T>& panel, const float (*sums)[kPanel], int64_t rows,
                  int64_t stride) {
  for (int64_t row = 0; row < rows; ++row)
    for (int v = 0; v < kPanel; v += kWidth) {
      const Floats added = panel.bias == nullptr ? Floats{} : load(panel.bias + v);
      store(panel.out + row * stride + v, load(sums[row] + v) + added);
    }
}

// Product of more rows with one panel. Weights are prefetched while earlier ones are multiplied:
// the first blocks of rows prefetch equal shares of the following memory.
template <typename T>
void more_rows_panel(const T* x, const Panel<T>& panel, int64_t rows, int64_t stride,
                     int64_t inputs) {
  using C = typename Factor<T>::Type;
  constexpr int kLines = kPanel * kLane<C> * static_cast<int>(sizeof(T)) / 64;
  float sums[kMostRows][kPanel];
  Factors<T, C> factors;
  std::fill_n(sums[0], rows * kPanel, 0.0f);
  const int64_t blocks = (rows + kRowBlock - 1) / kRowBlock;
  const int64_t sharers = blocks > 3 && kLines == 4 ? 4 : blocks > 1 ? 2 : 1;
  for (int64_t first = 0; first < inputs; first += kDepth<C>) {
    const int64_t count = std::min(kDepth<C>, inputs - first);
    const T* const part = panel.weights + first * kPanel;
    const char* const following = reinterpret_cast<const char*>(
        first + count < inputs ? part + count * kPanel : panel.next);
    const auto [weights, from, x_stride] = factors.of(part, x + first, inputs, rows, count);
    for (int64_t block = 0, row = 0; block < blocks; ++block) {
      const int64_t size = (rows - row + blocks - block - 1) / (blocks - block);
      const char* const later = following + block * (count / kLane<C> * kLines / sharers * 64);
      const auto run = [&, weights = weights, from = from, x_stride = x_stride](auto panel_block) {
        panel_block(from + row * x_stride, x_stride, weights, size, count, later, sums + row);
      };
      if (block >= sharers) run(panel_block<C, 0>);
      else if (sharers == 4) run(panel_block<C, kLines / 4>);
      else if (sharers == 2) run(panel_block<C, kLines / 2>);
      else run(panel_block<C, kLines>);
      row += size;
    }
  }
  finish_panel(panel, sums, rows, stride);
}

// A weight [outputs / 64][inputs / N][64][N], with N values to a lane, and its bias or null.
template <typename T>
struct Weight {
  const T *panels, *bias;
  int64_t outputs, inputs;

  // Panel `number`, whose columns go to `out`.
  Panel<T> panel(int64_t number, T* out, int64_t next) const {
    return {weights_of(number), bias == nullptr ? nullptr : bias + number * kPanel, out,
            weights_of(next)};
  }

 private:
  const T* weights_of(int64_t number) const { return panels + number * kPanel * inputs; }
};

// Columns of one panel of the product, for at most `kMostRows` rows; `stride` is the distance of
// result rows. A row's sums are taken in the same order whatever the number of rows.
template <typename T>
void multiply_panel(const T* x, const Panel<T>& panel, int64_t rows, int64_t stride,
                    int64_t inputs) {
  const Panel<T> alone[1] = {panel};
  if (rows == 1) return few_rows_panels<T, 1>(x, alone, stride, inputs);
  if constexpr (kManyRegisters) {
    switch (rows) {
      case 2: return few_rows_panels<T, 2>(x, alone, stride, inputs);
      case 3: return few_rows_panels<T, 3>(x, alone, stride, inputs);
      case 4: return few_rows_panels<T, 4>(x, alone, stride, inputs);
      case 5: return few_rows_panels<T, 5>(x, alone, stride, inputs);
      case 6: return few_rows_panels<T, 6>(x, alone, stride, inputs);
    }
  }
  more_rows_panel(x, panel, rows, stride, inputs);
}

// Equals two calls of `multiply_panel`. Two streams of weights keep more of a core's reads in
// flight than one. With more rows, the sums of both panels would not fit the registers.
template <typename T>
void multiply_panels(const T* x, const Panel<T> (&panels)[2], int64_t rows, int64_t stride,
                     int64_t inputs) {
  if constexpr (kManyRegisters) {
    switch (rows) {
      case 1: return few_rows_panels<T, 1>(x, panels, stride, inputs);
      case 2: return few_rows_panels<T, 2>(x, panels, stride, inputs);
      case 3: return few_rows_panels<T, 3>(x, panels, stride, inputs);
    }
  }
  const auto& [first, second] = panels;
  const Panel<T> one{first.weights, first.bias, first.out, second.weights};
  const Panel<T> other{second.weights, second.bias, second.out, first.next};
  multiply_panel(x, one, rows, stride, inputs);
  multiply_panel(x, other, rows, stride, inputs);
}

// The product, by all threads of the calling parallel region. Panels are assigned in runs that get
// shorter, since memory does not serve all cores equally and the slowest would finish late.
template <typename T>
void multiply_rows(const T* x, const Weight<T>& weight, T* out, int64_t rows) {
#pragma omp for schedule(guided)
  for (int64_t number = 0; number < weight.outputs / kPanel; ++number)
    multiply_panel(x, weight.panel(number, out + number * kPanel, number + 1), rows, weight.outputs,
                   weight.inputs);
}

// Chunk of many rows, and its depth in inputs: weights of sixteen outputs fill half of the L1
// cache, and the sums seldom leave the registers.
constexpr int64_t kChunkRows = 96;
constexpr int64_t kChunkDepth = 256;

// Adds the product of R rows with sixteen outputs over `count` inputs to `sums`.
template <int R>
void column_rows(const float* x, int64_t x_stride, const float (*weights)[kWidth], int64_t count,
                 float (*sums)[kPanel]) {
  Floats own[R];
  for (int row = 0; row < R; ++row) own[row] = load(sums[row]);
  for (int64_t i = 0; i < count; ++i) {
    const Floats w = load(weights[i]);
    for (int row = 0; row < R; ++row) own[row] += w * x[row * x_stride + i];
  }
  for (int row = 0; row < R; ++row) store(sums[row], own[row]);
}

inline void column_block(const float* x, int64_t x_stride, int64_t rows,
                         const float (*weights)[kWidth], int64_t count, float (*sums)[kPanel]) {
  switch (rows) {
    case 1: return column_rows<1>(x, x_stride, weights, count, sums);
    case 2: return column_rows<2>(x, x_stride, weights, count, sums);
    case 3: return column_rows<3>(x, x_stride, weights, count, sums);
    case 4: return column_rows<4>(x, x_stride, weights, count, sums);
    case 5: return column_rows<5>(x, x_stride, weights, count, sums);
    default: return column_rows<6>(x, x_stride, weights, count, sums);
  }
}

// A panel over some inputs, by columns of sixteen outputs, and rows of the same inputs, as floats.
template <typename T>
struct Columns {
  alignas(64) float weights[kPanel / kWidth][kChunkDepth][kWidth];
  float x[std::is_same_v<T, float> ? 1 : kChunkRows * kChunkDepth];

  void take(const T* panel, int64_t count) {
    for (int64_t i = 0; i < count; i += kLaneOf)
      for (int v = 0; v < kPanel / kWidth; ++v) {
        const T* const from = panel + i * kPanel + v * kWidth * kLaneOf;
        if constexpr (std::is_same_v<T, float>) {
          store(weights[v][i], load(from));
        } else {
          const EvenOdd both(from);
          store(weights[v][i], both.even);
          store(weights[v][i + 1], both.odd);
        }
      }
  }

  // Address of row 0, and distance to the next row.
  std::pair<const float*, int64_t> rows_of(const T* from, int64_t inputs, int64_t rows,
                                           int64_t count) {
    if constexpr (std::is_same_v<T, float>) return {from, inputs};
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < count; i += kWidth)
        store(x + row * kChunkDepth + i, load(from + row * inputs + i));
    return {x, kChunkDepth};
  }

 private:
  static constexpr int kLaneOf = static_cast<int>(sizeof(float) / sizeof(T));
};

// Variant of `multiply_panel` for at most `kChunkRows` rows, in floats.
template <typename T>
void multiply_columns(const T* x, const Panel<T>& panel, int64_t rows, int64_t stride,
                      int64_t inputs) {
  float sums[kChunkRows][kPanel];
  Columns<T> columns;
  std::fill_n(sums[0], rows * kPanel, 0.0f);
  for (int64_t first = 0; first < inputs; first += kChunkDepth) {
    const int64_t count = std::min(kChunkDepth, inputs - first);
    columns.take(panel.weights + first * kPanel, count);
    const auto [from, x_stride] = columns.rows_of(x + first, inputs, rows, count);
    for (int v = 0; v < kPanel / kWidth; ++v)
      for (int64_t row = 0; row < rows; row += kRowBlock)
        column_block(from + row * x_stride, x_stride, rows - row, columns.weights[v], count,
                     reinterpret_cast<float(*)[kPanel]>(sums[row] + v * kWidth));
  }
  finish_panel(panel, sums, rows, stride);
}

// Variant of `multiply_rows` for any number of rows: a panel is loaded once for many of them.
template <typename T>
void multiply_many_rows(const T* x, const Weight<T>& weight, T* out, int64_t rows, int threads) {
  const int64_t panels = weight.outputs / kPanel, chunks = (rows + kChunkRows - 1) / kChunkRows;
  // If there are few panels, several threads share each.
  const int64_t shares = std::min(chunks, (8 * threads + panels - 1) / panels);
#pragma omp for schedule(dynamic)
  for (int64_t task = 0; task < panels * shares; ++task) {
    const int64_t number = task / shares, share = task % shares;
    const int64_t last = std::min(rows, chunks * (share + 1) / shares * kChunkRows);
    for (int64_t row = chunks * share / shares * kChunkRows; row < last; row += kChunkRows)
      multiply_columns(x + row * weight.inputs,
                       weight.panel(number, out + row * weight.outputs + number * kPanel, number),
                       std::min(kChunkRows, last - row), weight.outputs, weight.inputs);
  }
}

}  // namespace
