// Products of rows with columns of sixteen outputs: the sums of six rows take twelve of sixteen
// 256-bit registers.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "vectors.h"

namespace {

// Number of rows whose sums fill three quarters of the vector registers.
constexpr int kRowBlock = 6;
// Number of outputs of a panel, which one thread multiplies.
constexpr int kPanel = 64;
constexpr int kColumns = kPanel / kWidth;

// Number of inputs whose weights are multiplied by all rows before the next ones: those of one
// column, and as many prefetched ones, fit the L1 cache.
constexpr int64_t kChunkDepth = 256;
constexpr int64_t kChunkRows = 96;

inline float widened(Bf16 value) { return bits_as<float>(static_cast<uint32_t>(value) << 16); }

// Splits weights of two inputs, which share a lane.
struct EvenOdd {
  Floats even, odd;

  explicit EvenOdd(const Bf16* weights) {
    const Words pairs = Whole<Words>::load(weights);
    even = bits_as<Floats>(pairs << 16), odd = bits_as<Floats>(pairs & 0xffff0000u);
  }
};

// Number of inputs in a line, which is 64 bytes of a column.
template <typename T>
constexpr int64_t kLineInputs = static_cast<int64_t>(sizeof(float) / sizeof(T));
// Lines per iteration of a loop.
constexpr int kLinesAtOnce = 4;

// Numbers below N. Sums that only constants index stay in registers, which loops do not ensure.
template <int N>
using Below = std::make_integer_sequence<int, N>;

// Adds the products of rows with one line of weights to their sums.
template <int... ROWS>
[[gnu::always_inline]] inline void add_line(const float* line, const float* x, int64_t x_stride,
                                            Floats* sums, std::integer_sequence<int, ROWS...>) {
  const Floats weights = load(line);
  ((sums[ROWS] += weights * x[ROWS * x_stride]), ...);
}
template <int... ROWS>
[[gnu::always_inline]] inline void add_line(const Bf16* line, const float* x, int64_t x_stride,
                                            Floats* sums, std::integer_sequence<int, ROWS...>) {
  const EvenOdd weights(line);
  ((sums[ROWS] += weights.even * x[ROWS * x_stride]), ...);
  ((sums[ROWS] += weights.odd * x[ROWS * x_stride + 1]), ...);
}

// Adds the products of R rows with one line of each column.
template <int R, typename T, int... COLUMNS>
[[gnu::always_inline]] inline void add_lines(const T* line, int64_t apart, const float* x,
                                             int64_t x_stride, Floats (*sums)[R],
                                             std::integer_sequence<int, COLUMNS...>) {
  (add_line(line + COLUMNS * apart, x, x_stride, sums[COLUMNS], Below<R>{}), ...);
}

// Prefetches LINES of the memory at `next` per iteration.
template <int LINES>
struct Fetch {
  const char* next;

  void operator()() {
    for (int line = 0; line < LINES; ++line, next += 64) __builtin_prefetch(next);
  }
};

// Prefetches the columns that are being multiplied.
template <int C>
struct FetchAhead {
  static constexpr int64_t kDistance = 1024;

  // The next line of the first column, and bytes to the next column.
  const char* line;
  int64_t apart;

  void operator()() {
    for (int at = 0; at < kLinesAtOnce; ++at, line += 64)
      for (int column = 0; column < C; ++column)
        __builtin_prefetch(line + column * apart + kDistance);
  }
};

// Adds the products of R rows with C columns, which are `apart` values apart, over some inputs to
// `sums`.
template <int R, int C, typename T, typename F>
void add_columns(const float* x, int64_t x_stride, const T* weights, int64_t apart, int64_t count,
                 F fetch, float (*sums)[kPanel]) {
  Floats own[C][R];
  for (int column = 0; column < C; ++column)
    for (int row = 0; row < R; ++row) own[column][row] = load(sums[row] + column * kWidth);
  for (int64_t line = 0; line < count / kLineInputs<T>; line += kLinesAtOnce) {
    fetch();
    for (int some = 0; some < kLinesAtOnce; ++some)
      add_lines<R>(weights + (line + some) * kLineInputs<T> * kWidth, apart,
                   x + (line + some) * kLineInputs<T>, x_stride, own, Below<C>{});
  }
  for (int column = 0; column < C; ++column)
    for (int row = 0; row < R; ++row) store(sums[row] + column * kWidth, own[column][row]);
}

// Variant of `add_columns` for one column and any number of rows in a block.
template <typename T, typename F>
void add_column(int64_t rows, const float* x, int64_t x_stride, const T* weights, int64_t count,
                F fetch, float (*sums)[kPanel]) {
  switch (rows) {
    case 1: return add_columns<1, 1>(x, x_stride, weights, 0, count, fetch, sums);
    case 2: return add_columns<2, 1>(x, x_stride, weights, 0, count, fetch, sums);
    case 3: return add_columns<3, 1>(x, x_stride, weights, 0, count, fetch, sums);
    case 4: return add_columns<4, 1>(x, x_stride, weights, 0, count, fetch, sums);
    case 5: return add_columns<5, 1>(x, x_stride, weights, 0, count, fetch, sums);
    default: return add_columns<6, 1>(x, x_stride, weights, 0, count, fetch, sums);
  }
}

// The sums of the next columns.
inline float (*columns_of(float (*sums)[kPanel], int column))[kPanel] {
  return reinterpret_cast<float(*)[kPanel]>(sums[0] + column * kWidth);
}

// Adds the products of R rows with a panel over some inputs to `sums`. Its weights are read once; C
// columns side by side keep enough sums and reads in flight.
template <int R, int C, typename T>
void add_panel(const float* x, int64_t x_stride, const T* weights, int64_t apart, int64_t count,
               float (*sums)[kPanel]) {
  for (int column = 0; column < kColumns; column += C) {
    const T* const from = weights + column * apart;
    const FetchAhead<C> fetch{reinterpret_cast<const char*>(from),
                              apart * static_cast<int64_t>(sizeof(T))};
    add_columns<R, C>(x, x_stride, from, apart, count, fetch, columns_of(sums, column));
  }
}

// Rows over some inputs as floats: address of row 0, and distance to the next one.
struct FloatRows {
  const float* x;
  int64_t stride;
};

// Makes them, from copies if need be.
template <typename T>
struct RowsOf {
  alignas(64) float copies[kChunkRows * kChunkDepth];

  FloatRows take(const T* x, int64_t inputs, int64_t rows, int64_t count) {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < count; i += kWidth)
        store(copies + row * kChunkDepth + i, load(x + row * inputs + i));
    return {copies, kChunkDepth};
  }
};
template <>
struct RowsOf<float> {
  FloatRows take(const float* x, int64_t inputs, int64_t, int64_t) { return {x, inputs}; }
};

// A column of bf16 over some inputs as floats.
struct WideColumn {
  alignas(64) float weights[kChunkDepth][kWidth];

  void take(const Bf16* column, int64_t count) {
    for (int64_t i = 0; i < count; i += 2) {
      const EvenOdd both(column + i * kWidth);
      store(weights[i], both.even);
      store(weights[i + 1], both.odd);
    }
  }
};

// A panel by columns, [4][inputs / N][16][N] with N values to a lane, and the panel that this
// thread multiplies next.
template <typename T>
struct ColumnPanel {
  // Most rows that split bf16 as they read it, and rows of a block then: splitting takes four
  // registers. For more rows it is widened once.
  static constexpr int64_t kSplitRows = 8;
  static constexpr int kSplitBlock = 4;

  const T *weights, *next;
  int64_t inputs;

  // Distance of its columns.
  int64_t apart() const { return inputs * kWidth; }

  // Adds the products of at most `kChunkRows` rows to zeroed sums. A row's sums are taken in the
  // same order whatever the number of rows.
  void multiply(const T* x, int64_t rows, float (*sums)[kPanel]) const {
    RowsOf<T> copies;
    for (int64_t first = 0; first < inputs; first += kChunkDepth) {
      const int64_t count = std::min(kChunkDepth, inputs - first);
      const FloatRows from = copies.take(x + first, inputs, rows, count);
      const T* const part = weights + first * kWidth;
      switch (rows) {
        case 1: add_panel<1, 4>(from.x, from.stride, part, apart(), count, sums); break;
        case 2: add_panel<2, 2>(from.x, from.stride, part, apart(), count, sums); break;
        case 3: add_panel<3, 2>(from.x, from.stride, part, apart(), count, sums); break;
        case 4: add_panel<4, 1>(from.x, from.stride, part, apart(), count, sums); break;
        default: more_rows(from, rows, part, first, count, sums);
      }
    }
  }

 private:
  // Weights are prefetched while those before them are multiplied.
  void more_rows(const FloatRows& from, int64_t rows, const T* part, int64_t first, int64_t count,
                 float (*sums)[kPanel]) const {
    for (int column = 0; column < kColumns; ++column) {
      const T* const own = part + column * apart();
      const T* const later = column + 1 < kColumns    ? own + apart()
                             : first + count < inputs ? part + count * kWidth
                                                      : next;
      const auto to = columns_of(sums, column);
      if constexpr (std::is_same_v<T, float>) {
        add_blocks<kRowBlock, kLinesAtOnce>(from, rows, own, count, later, to);
      } else if (rows <= kSplitRows) {
        add_blocks<kSplitBlock, kLinesAtOnce>(from, rows, own, count, later, to);
      } else {
        WideColumn wide;
        wide.take(own, count);
        add_blocks<kRowBlock, kLinesAtOnce / 2>(from, rows, wide.weights[0], count, later, to);
      }
    }
  }

  // Adds the products with a column, by blocks of at most MOST rows. The first two blocks, or four
  // of more, prefetch equal shares of `next_part`: LINES per iteration in all.
  template <int MOST, int LINES, typename W>
  static void add_blocks(const FloatRows& from, int64_t rows, const W* column, int64_t count,
                         const T* next_part, float (*sums)[kPanel]) {
    const int64_t blocks = (rows + MOST - 1) / MOST;
    const int64_t sharers = blocks == 1 ? 1 : LINES == 4 && blocks >= 4 ? 4 : 2;
    const int64_t share = count / kLineInputs<T> / sharers * 64;
    const char* later = reinterpret_cast<const char*>(next_part);
    for (int64_t block = 0, row = 0; block < blocks; ++block, later += share) {
      const int64_t size = (rows - row + blocks - block - 1) / (blocks - block);
      const auto run = [&](auto fetch) {
        add_column(size, from.x + row * from.stride, from.stride, column, count, fetch, sums + row);
      };
      if (block >= sharers) run(Fetch<0>{later});
      else if (sharers == 4) run(Fetch<LINES / 4>{later});
      else if (sharers == 2) run(Fetch<LINES / 2>{later});
      else run(Fetch<LINES>{later});
      row += size;
    }
  }
};

}  // namespace
