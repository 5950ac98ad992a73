// Products of bf16 in AMX tiles: a step multiplies sixteen rows of 32 inputs by 32 inputs of
// sixteen outputs. Weights have two inputs to a lane, as for `multiply` (prefill.h), so a tile is
// sixteen lines.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.

#pragma once

#ifdef __AMX_BF16__

#include <immintrin.h>

#include <cstdint>

#include "vectors.h"

namespace {

constexpr int64_t kAmxRows = 16;
// Number of inputs in a step.
constexpr int64_t kAmxInputs = 32;

// Shapes of a thread's tiles while this lives: 0 to 3 hold sums, 4 rows, 6 and 7 weights. Others,
// such as torch, set their own shapes before their products.
class AmxShapes {
 public:
  explicit AmxShapes(int64_t rows) {
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.row_bytes[tile] = 64;
      shapes.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kAmxRows);
    }
    _tile_loadconfig(&shapes);
  }
  ~AmxShapes() { _tile_release(); }
  AmxShapes(const AmxShapes&) = delete;
  AmxShapes& operator=(const AmxShapes&) = delete;
};

// Adds the products of a tile of rows with [inputs / 2][width][2] weights, V vectors of the width,
// to their sums, or to zeros if they are FRESH. Strides and the width count elements.
template <int V, bool FRESH>
inline void add_amx(const Bf16* x, int64_t x_stride, const Bf16* weights, int64_t width,
                    int64_t steps, float* sums, int64_t sums_stride) {
  static_assert(V == 1 || V == 2 || V == 4);
  const int64_t line = width * 4, row = sums_stride * 4;
  if constexpr (FRESH) {
    _tile_zero(0);
    if constexpr (V > 1) _tile_zero(1);
    if constexpr (V > 2) _tile_zero(2);
    if constexpr (V > 2) _tile_zero(3);
  } else {
    _tile_loadd(0, sums, row);
    if constexpr (V > 1) _tile_loadd(1, sums + kWidth, row);
    if constexpr (V > 2) _tile_loadd(2, sums + 2 * kWidth, row);
    if constexpr (V > 2) _tile_loadd(3, sums + 3 * kWidth, row);
  }
  for (int64_t step = 0; step < steps; ++step, x += kAmxInputs, weights += kAmxInputs * width) {
    _tile_loadd(4, x, x_stride * 2);
    _tile_loadd(6, weights, line);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (V > 1) {
      _tile_loadd(7, weights + 2 * kWidth, line);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (V > 2) {
      _tile_loadd(6, weights + 4 * kWidth, line);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, weights + 6 * kWidth, line);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, row);
  if constexpr (V > 1) _tile_stored(1, sums + kWidth, row);
  if constexpr (V > 2) _tile_stored(2, sums + 2 * kWidth, row);
  if constexpr (V > 2) _tile_stored(3, sums + 3 * kWidth, row);
}

}  // namespace

#endif
