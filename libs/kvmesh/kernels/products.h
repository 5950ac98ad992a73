// Products of a few rows with weights in panels of 64 outputs, as fast as memory delivers them,
// which oneDNN's own products are not.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "prefill.h"
#include "vectors.h"

namespace {

// Rows that are computed together at most: with vectors of 512 bits so many are faster than by oneDNN,
// as measured on Zen 5 (96 still are, by little); host.py asks for fewer where oneDNN has tiles for
// bf16.
constexpr int kMostRows = 64;
// Whether more rows than that are computed here as well, so many after so many: where oneDNN has no
// products of the dtype, or keeps its weights in another form.
template <typename T>
constexpr bool kAnyRows = !kManyRegisters || !std::is_same_v<typename Factor<T>::Type, T>;
// Rows that are computed at once: their sums fill three quarters of the vector registers.
constexpr int kRowBlock = 6;
constexpr int kPanel = 64;

// Adds to the sums of some rows their products with V vectors of weights, over one step of inputs.
template <int V>
inline void multiply_add(const float* weights, const float* x, int64_t x_stride, int rows,
                         Floats (*sums)[kRowBlock]) {
  for (int v = 0; v < V; ++v) {
    const Floats w = load(weights + v * kWidth);
    for (int row = 0; row < rows; ++row) sums[v][row] += w * x[row * x_stride];
  }
}

inline float widened(Bf16 value) { return bits_as<float>(static_cast<uint32_t>(value) << 16); }

// Weights of two inputs lie side by side in each lane.
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
template <typename C>
constexpr int64_t kDepth = 256 / sizeof(C);

// Adds the product of R rows with 64 outputs over some inputs to `sums`; fetches LINES lines of what
// comes next in memory for every lane of inputs.
template <typename C, int R, int LINES>
void panel_rows(const C* x, int64_t x_stride, const C* panel, int64_t count, const char* next,
                float (*sums)[kPanel]) {
  constexpr int kAll = kPanel / kWidth, kAtOnce = kManyRegisters ? kAll : 1;
  for (int first = 0; first < kAll; first += kAtOnce) {
    Floats own[kAtOnce][kRowBlock];
    for (int v = 0; v < kAtOnce; ++v)
      for (int row = 0; row < R; ++row) own[v][row] = load(sums[row] + (first + v) * kWidth);
    const char* line = next + first * 64;
    // Weights that are read once for each sixteen outputs would be driven out of the first cache.
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

// As `panel_rows` of at most a block of rows.
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

// What is multiplied of a panel and of rows over some inputs: they themselves where the CPU multiplies
// their dtype, else widened once for all rows.
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

// Writes sums with the panel's bias where its columns go.
template <typename T>
void finish_panel(const Panel<T>& panel, const float (*sums)[kPanel], int64_t rows,
                  int64_t stride) {
  for (int64_t row = 0; row < rows; ++row)
    for (int v = 0; v < kPanel; v += kWidth) {
      const Floats added = panel.bias == nullptr ? Floats{} : load(panel.bias + v);
      store(panel.out + row * stride + v, load(sums[row] + v) + added);
    }
}

// Product of more rows with one panel. Weights come from memory while those before them are
// multiplied: the first blocks of rows ask for equal shares of what comes next.
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

// As `multiply_panel` of one after the other. Two streams of weights keep more of a core's reads
// under way than one; sums of more rows with both would not fit the registers.
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

// The product, by all threads of the region that calls it. Panels are handed out in runs that grow
// shorter: memory does not serve every core alike, and the last one would be waited for.
template <typename T>
void multiply_rows(const T* x, const Weight<T>& weight, T* out, int64_t rows) {
#pragma omp for schedule(guided)
  for (int64_t number = 0; number < weight.outputs / kPanel; ++number)
    multiply_panel(x, weight.panel(number, out + number * kPanel, number + 1), rows, weight.outputs,
                   weight.inputs);
}

// Of many rows: so many at a time, and so many inputs deep, with which weights of sixteen outputs fill
// half of the first cache and the sums seldom leave the registers.
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

  // Where row 0 begins, and how far it is to the next.
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

// As `multiply_panel` of at most `kChunkRows` rows, in floats.
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

// As `multiply_rows` of any number of rows: a panel is taken from memory once for many of them.
template <typename T>
void multiply_many_rows(const T* x, const Weight<T>& weight, T* out, int64_t rows, int threads) {
  const int64_t panels = weight.outputs / kPanel, chunks = (rows + kChunkRows - 1) / kChunkRows;
  // Few panels are shared among threads.
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
