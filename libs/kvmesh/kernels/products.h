// Products of a few rows with weights in panels of 64 outputs, at the speed of memory, which oneDNN
// does not reach. Panels are read line by line with 512-bit vectors or AMX tiles (amx.h), else by
// columns (columns.h).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx.h"
#include "columns.h"
#include "prefill.h"
#include "vectors.h"

namespace {

// Maximum number of rows that are computed together: with 512-bit vectors they are faster than
// oneDNN up to this number, measured on Zen 5 (at 96 still a little).
constexpr int kMostRows = 64;
// Whether products are computed in AMX tiles.
#ifdef __AMX_BF16__
template <typename T>
constexpr bool kInTiles = std::is_same_v<T, Bf16>;
#else
template <typename T>
constexpr bool kInTiles = false;
#endif
// Whether more rows are computed here as well, in chunks: if oneDNN has no products of the dtype,
// or another layout of weights.
template <typename T>
constexpr bool kAnyRows =
    !kManyRegisters || kInTiles<T> || !std::is_same_v<typename Factor<T>::Type, T>;
// Number of consecutive outputs in a weight's memory.
constexpr int kPanelWidth = kManyRegisters ? kPanel : kWidth;

// Adds the products of some rows with V vectors of weights to their sums, for one step of inputs.
template <int V>
inline void multiply_add(const float* weights, const float* x, int64_t x_stride, int rows,
                         Floats (*sums)[kRowBlock]) {
  for (int v = 0; v < V; ++v) {
    const Floats w = load(weights + v * kWidth);
    for (int row = 0; row < rows; ++row) sums[v][row] += w * x[row * x_stride];
  }
}

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

// Prefetches one lane of inputs of a panel into the L2 cache. If lines pass it (a hint of 0), CPUs of
// Intel reach half of memory's speed: they have fewer reads in flight for the L1 cache.
template <typename T>
inline void fetch_lane(const T* weights) {
  for (int v = 0; v < kColumns; ++v)
    __builtin_prefetch(reinterpret_cast<const char*>(weights) + v * 64, 0, 2);
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
  Floats own[kColumns][kRowBlock];
  for (int v = 0; v < kColumns; ++v)
    for (int row = 0; row < R; ++row) own[v][row] = load(sums[row] + v * kWidth);
  for (int64_t i = 0; i < count; i += kLane<C>, next += LINES * 64) {
    for (int v = 0; v < LINES; ++v) __builtin_prefetch(next + v * 64);
    multiply_add<kColumns>(panel + i * kPanel, x + i, x_stride, R, own);
  }
  for (int v = 0; v < kColumns; ++v)
    for (int row = 0; row < R; ++row) store(sums[row] + v * kWidth, own[v][row]);
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
  Floats sums[PANELS][kColumns][kRowBlock] = {};
  const int64_t size = inputs * kPanel;
  for (int64_t i = 0; i < inputs; i += kLane<T>) {
    const int64_t ahead = i * kPanel + kAhead<T, PANELS>;
    for (int p = 0; p < PANELS; ++p) {
      const Panel<T>& panel = panels[p];
      fetch_lane(ahead < size ? panel.weights + ahead : panel.next + (ahead - size));
      multiply_add<kColumns>(panel.weights + i * kPanel, x + i, inputs, R, sums[p]);
    }
  }
  for (int p = 0; p < PANELS; ++p)
    for (int v = 0; v < kColumns; ++v) {
      const T* const bias = panels[p].bias;
      const Floats added = bias == nullptr ? Floats{} : load(bias + v * kWidth);
      for (int row = 0; row < R; ++row)
        store(panels[p].out + row * stride + v * kWidth, sums[p][v][row] + added);
    }
}

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

#ifdef __AMX_BF16__
// Product of some rows with one panel in AMX tiles. The rows of the last tile overlap those before
// it if there are sixteen or more; they are computed twice, equally. Memory is read in order, which
// prefetchers do best alone.
inline void multiply_in_tiles(const Bf16* x, const Panel<Bf16>& panel, int64_t rows, int64_t stride,
                              int64_t inputs) {
  if (rows == 0) return;  // tiles have a row at least
  // Weights of so many inputs stay in the L1 cache for all rows.
  constexpr int64_t kInCache = 256;
  alignas(64) float sums[kMostRows][kPanel];
  const int64_t tile_rows = std::min(rows, kAmxRows), whole = inputs / kAmxInputs * kAmxInputs;
  const auto for_tiles = [&](auto run) {
    for (int64_t done = 0; done < rows; done += kAmxRows)
      run(std::min(done, rows - tile_rows), sums + done);
  };
  const AmxShapes shapes(tile_rows);
  if (whole == 0) std::fill_n(sums[0], kMostRows * kPanel, 0.0f);
  for (int64_t first = 0; first < whole; first += kInCache) {
    const int64_t steps = std::min(kInCache, whole - first) / kAmxInputs;
    for_tiles([&](int64_t row, float (*own)[kPanel]) {
      const auto add = first == 0 ? add_amx<kColumns, true> : add_amx<kColumns, false>;
      add(x + row * inputs + first, inputs, panel.weights + first * kPanel, kPanel, steps, own[0],
          kPanel);
    });
  }
  for_tiles([&](int64_t row, float (*own)[kPanel]) {
    // Inputs that do not fill a tile.
    for (int64_t some = 0; some < tile_rows && whole < inputs; some += kRowBlock)
      panel_block<Bf16, 0>(x + (row + some) * inputs + whole, inputs,
                           panel.weights + whole * kPanel, tile_rows - some, inputs - whole,
                           nullptr, own + some);
    const Panel<Bf16> place{panel.weights, panel.bias, panel.out + row * stride, panel.next};
    finish_panel(place, own, tile_rows, stride);
  });
}
#endif

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

// A weight [outputs / W][inputs / N][W][N], with `kPanelWidth` outputs and N values to a lane, and
// its bias or null.
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

// Columns of one panel of the product, for at most `kMostRows` rows, without 512-bit vectors
// `kChunkRows`; `stride` is the distance of result rows. A row's sums are taken in the same order
// whatever the number of rows.
template <typename T>
void multiply_panel(const T* x, const Panel<T>& panel, int64_t rows, int64_t stride,
                    int64_t inputs) {
  if constexpr (kInTiles<T>) {
    multiply_in_tiles(x, panel, rows, stride, inputs);
  } else if constexpr (kManyRegisters) {
    const Panel<T> alone[1] = {panel};
    switch (rows) {
      case 1: return few_rows_panels<T, 1>(x, alone, stride, inputs);
      case 2: return few_rows_panels<T, 2>(x, alone, stride, inputs);
      case 3: return few_rows_panels<T, 3>(x, alone, stride, inputs);
      case 4: return few_rows_panels<T, 4>(x, alone, stride, inputs);
      case 5: return few_rows_panels<T, 5>(x, alone, stride, inputs);
      case 6: return few_rows_panels<T, 6>(x, alone, stride, inputs);
      default: return more_rows_panel(x, panel, rows, stride, inputs);
    }
  } else {
    alignas(64) float sums[kChunkRows][kPanel];
    std::fill_n(sums[0], rows * kPanel, 0.0f);
    ColumnPanel<T>{panel.weights, panel.next, inputs}.multiply(x, rows, sums);
    finish_panel(panel, sums, rows, stride);
  }
}

// Equals two calls of `multiply_panel`. Two streams of weights keep more of a core's reads in
// flight than one. With more rows, the sums of both panels would not fit the registers.
template <typename T>
void multiply_panels(const T* x, const Panel<T> (&panels)[2], int64_t rows, int64_t stride,
                     int64_t inputs) {
  if constexpr (kManyRegisters && !kInTiles<T>) {
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

// A panel over some inputs, as columns of floats.
struct WideColumns {
  alignas(64) float weights[kColumns][kChunkDepth][kWidth];

  void take(const Bf16* panel, int64_t count) {
    for (int64_t i = 0; i < count; i += 2)
      for (int v = 0; v < kColumns; ++v) {
        const EvenOdd both(panel + i * kPanel + v * kWidth * 2);
        store(weights[v][i], both.even);
        store(weights[v][i + 1], both.odd);
      }
  }
};

// Variant of `multiply_panel` for at most `kChunkRows` rows, in floats.
inline void multiply_wide(const Bf16* x, const Panel<Bf16>& panel, int64_t rows, int64_t stride,
                          int64_t inputs) {
  alignas(64) float sums[kChunkRows][kPanel];
  WideColumns columns;
  RowsOf<Bf16> copies;
  std::fill_n(sums[0], rows * kPanel, 0.0f);
  for (int64_t first = 0; first < inputs; first += kChunkDepth) {
    const int64_t count = std::min(kChunkDepth, inputs - first);
    columns.take(panel.weights + first * kPanel, count);
    const FloatRows from = copies.take(x + first, inputs, rows, count);
    for (int v = 0; v < kColumns; ++v)
      for (int64_t row = 0; row < rows; row += kRowBlock)
        add_column(rows - row, from.x + row * from.stride, from.stride, columns.weights[v][0],
                   count, Fetch<0>{}, columns_of(sums + row, v));
  }
  finish_panel(panel, sums, rows, stride);
}

// Variant of `multiply_rows` for any number of rows: a panel is loaded once for many of them. AMX
// tiles multiply faster than memory delivers rows, so there all panels are multiplied by as many
// rows as the L2 cache holds, before the next rows.
template <typename T>
void multiply_many_rows(const T* x, const Weight<T>& weight, T* out, int64_t rows, int threads) {
  constexpr int64_t kChunk = kInTiles<T> ? kMostRows : kChunkRows;
  const int64_t panels = weight.outputs / kPanel, chunks = (rows + kChunk - 1) / kChunk;
  constexpr int64_t kInL2 = 1 << 20;
  const int64_t bytes = rows * weight.inputs * static_cast<int64_t>(sizeof(T));
  const int64_t least = kInTiles<T> ? (bytes + kInL2 - 1) / kInL2 : 1;
  // If there are few panels, several threads share each.
  const int64_t shares = std::min(chunks, std::max((8 * threads + panels - 1) / panels, least));
#pragma omp for schedule(dynamic)
  for (int64_t task = 0; task < panels * shares; ++task) {
    const int64_t number = kInTiles<T> ? task % panels : task / shares;
    const int64_t share = kInTiles<T> ? task / panels : task % shares;
    const int64_t last = std::min(rows, chunks * (share + 1) / shares * kChunk);
    for (int64_t row = chunks * share / shares * kChunk; row < last; row += kChunk) {
      const Panel<T> panel =
          weight.panel(number, out + row * weight.outputs + number * kPanel, number);
      const int64_t size = std::min(kChunk, last - row);
      if constexpr (!kManyRegisters || kInTiles<T>)
        multiply_panel(x + row * weight.inputs, panel, size, weight.outputs, weight.inputs);
      else if constexpr (kAnyRows<T>)
        multiply_wide(x + row * weight.inputs, panel, size, weight.outputs, weight.inputs);
    }
  }
}

}  // namespace
