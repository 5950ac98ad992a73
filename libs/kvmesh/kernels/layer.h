// The halves of a decoder layer in one call each, for steps of a few rows: attention with its
// projections, and an MLP. One region of threads serves all that happens in between, and nothing
// returns to Python. The parts are those of rows.h, products.h and decode.h, so that results are the
// same to the bit as by calls of their own.

#pragma once

#include <cstdint>

#include "decode.h"
#include "products.h"
#include "rows.h"
#include "scratch.h"

namespace {

// Returns 1 for too many rows.
template <typename T>
int gated_mlp(const T* x, const Weight<T>& gate_up, const Weight<T>& down, T* out, int64_t rows,
              int threads) {
  if (rows > kMostRows<T>) return 1;
  const int64_t inner = down.inputs, pairs = inner / kPanel;
  T* const active = scratch<T, Use::kRows>(rows * inner);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    // Gates and ups of the same columns are one thread's, which activates them at once.
#pragma omp for schedule(guided)
    for (int64_t panel = 0; panel < pairs; ++panel) {
      T gates[kMostRows<T> * kPanel], ups[kMostRows<T> * kPanel];
      multiply_panel(x, gate_up, panel, gates, rows, kPanel);
      multiply_panel(x, gate_up, pairs + panel, ups, rows, kPanel);
      for (int64_t row = 0; row < rows; ++row)
        silu_and_mul_row(gates + row * kPanel, ups + row * kPanel,
                         active + row * inner + panel * kPanel, kPanel);
    }
    multiply_rows(active, down, out, rows);
  }
  return 0;
}

// Projects, turns and writes the rows, one of each sequence, attends and projects back. Returns 1
// for too many rows or a head size that is not compiled.
template <typename T>
int attention_layer(const T* x, const Weight<T>& qkv, const Rope<T>& rope, const Decode& call,
                    const Weight<T>& output, T* out, int threads) {
  const int64_t rows = call.sequences, width = qkv.outputs, dim = rope.dim;
  if (rows > kMostRows<T> || !has_decode(dim)) return 1;
  T* const heads = scratch<T, Use::kRows>(rows * (width + output.inputs));
  T* const attended = heads + rows * width;
  const Parts parts(call, dim, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    multiply_rows(x, qkv, heads, rows);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) rope_and_write_row(rope, heads + row * width, row);
    decode_rows(call, dim, heads, width, rope.kv, attended, parts);
    multiply_rows(attended, output, out, rows);
  }
  return 0;
}

}  // namespace
