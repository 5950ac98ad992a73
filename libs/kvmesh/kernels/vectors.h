// Vectors of sixteen floats for the kernels of host.cpp: GCC's own, so that what the CPU lacks the
// compiler splits. bf16 is widened when loaded and rounded once when stored.

#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace {

constexpr int kWidth = 16;
using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));
using Bf16 = uint16_t;

// The same bits as another type.
template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline Floats splat(float value) { return Floats{} + value; }

inline Floats load(const float* from) {
  Floats out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline Floats load(const Bf16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return bits_as<Floats>(__builtin_convertvector(halves, Words) << 16);
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

// Rounds to nearest, ties to even.
inline void store(Bf16* to, Floats value) {
#ifdef __AVX512BF16__
  const auto halves = bits_as<Halves>(_mm512_cvtneps_pbh(bits_as<__m512>(value)));
  std::memcpy(to, &halves, sizeof halves);
#else
  const Words bits = bits_as<Words>(value);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Halves halves = __builtin_convertvector(rounded, Halves);
  std::memcpy(to, &halves, sizeof halves);
#endif
}

inline float sum(Floats value) {
  value += __builtin_shuffle(value, Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  value += __builtin_shuffle(value, Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  value += __builtin_shuffle(value, Ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  value += __builtin_shuffle(value, Ints{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
  return value[0];
}

// Adds neighbours of two vectors whose lanes are `kBit` apart: those of `a` to lanes without the bit,
// those of `b` to the others. Four rounds add up sixteen vectors, one in each lane, by a quarter of
// the shuffles that sixteen single sums take.
template <int kBit>
inline Floats add_neighbours(Floats a, Floats b) {
  constexpr Ints kLane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  constexpr Ints kFromB = (kLane & kBit) / kBit * kWidth;
  return __builtin_shuffle(a, b, kLane + kFromB) + __builtin_shuffle(a, b, (kLane ^ kBit) + kFromB);
}

// exp of each lane, relative error about 2e-7; below -87 the result is about 1e-38.
inline Floats exponential(Floats x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  x = x > 88.0f ? splat(88.0f) : x;
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
inline Floats hyperbolic_tangent(Floats x) {
  const Floats squared = exponential(x + x);
  return (squared - 1.0f) / (squared + 1.0f);
}

}  // namespace
