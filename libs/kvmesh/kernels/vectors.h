// Vectors of sixteen floats. CPUs with 512-bit vectors have them; others use pairs or quadruples of
// 256-bit or 128-bit vectors (pairs.h). bf16 is widened when loaded and rounded once when stored.

#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "pairs.h"

namespace {

constexpr int kWidth = 16;
using Bf16 = uint16_t;

// Whether the CPU's registers hold many vectors of sixteen; loops keep as many sums as fit.
#if defined(__AVX512F__)
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

#if defined(__AVX512F__)
using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
#elif defined(__AVX2__)
using Floats = Pair<float __attribute__((vector_size(32)))>;
using Ints = Pair<int32_t __attribute__((vector_size(32)))>;
using Words = Pair<uint32_t __attribute__((vector_size(32)))>;
#else
using Floats = Pair<Pair<float __attribute__((vector_size(16)))>>;
using Ints = Pair<Pair<int32_t __attribute__((vector_size(16)))>>;
using Words = Pair<Pair<uint32_t __attribute__((vector_size(16)))>>;
#endif

// Reinterprets the bits as another type.
template <typename To, typename From>
inline To bits_as(const From& from) {
  return Bits<To, From>::as(from);
}

inline Floats splat(float value) { return Floats{} + value; }

// The index of each lane.
inline Ints lanes() { return Counted<Ints>::from(0); }

inline Floats load(const float* from) { return Whole<Floats>::load(from); }

inline Floats load(const Bf16* from) { return bits_as<Floats>(Widened<Words>::load(from) << 16); }

inline void store(float* to, const Floats& value) { Whole<Floats>::store(to, value); }

// Rounds to nearest, ties to even.
inline void store(Bf16* to, const Floats& value) {
#ifdef __AVX512BF16__
  const __m256bh halves = _mm512_cvtneps_pbh(bits_as<__m512>(value));
  std::memcpy(to, &halves, sizeof halves);
#else
  const Words bits = bits_as<Words>(value);
  Widened<Words>::store(to, (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
#endif
}

inline Floats higher(const Floats& a, const Floats& b) { return select(a > b, a, b); }

// exp of each lane, relative error about 2e-7; below -87 the result is about 1e-38.
inline Floats exponential(Floats x) {
  x = select(x < -87.0f, splat(-87.0f), x);
  x = select(x > 88.0f, splat(88.0f), x);
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low mantissa bits.
  const Floats shifted = x * 1.44269504f + 12582912.0f;
  const Ints power = bits_as<Ints>(shifted) - 0x4b400000;
  const Floats whole = shifted - 12582912.0f;
  const Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * bits_as<Floats>((power + 127) << 23);
}

// Absolute error about 1e-7.
inline Floats hyperbolic_tangent(const Floats& x) {
  const Floats squared = exponential(x + x);
  return (squared - 1.0f) / (squared + 1.0f);
}

}  // namespace
