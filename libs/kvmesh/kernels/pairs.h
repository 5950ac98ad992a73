// Pairs of vectors that act as one vector of twice the lanes, and functions for both kinds of
// vectors. GCC can split vectors that are wider than the CPU's, but that takes ten times as long to
// compile, and the vectors pass through memory.

#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

template <typename V>
struct Pair {
  V low, high;
};

// Type of a lane, and number of lanes.
template <typename V>
struct Lane {
  using Type = std::remove_reference_t<decltype(V{}[0])>;
};
template <typename V>
struct Lane<Pair<V>> : Lane<V> {};
template <typename V>
constexpr int kLanes = static_cast<int>(sizeof(V) / sizeof(typename Lane<V>::Type));

// The lane type is explicit here, so numbers convert as for plain vectors.
#define KVMESH_PAIR_OPERATOR(OP)                                                      \
  template <typename V>                                                               \
  inline auto operator OP(const Pair<V>& a, const Pair<V>& b) {                       \
    return Pair<decltype(a.low OP b.low)>{a.low OP b.low, a.high OP b.high};          \
  }                                                                                   \
  template <typename V>                                                               \
  inline auto operator OP(const Pair<V>& a, typename Lane<V>::Type b) {               \
    return Pair<decltype(a.low OP b)>{a.low OP b, a.high OP b};                       \
  }

KVMESH_PAIR_OPERATOR(+)
KVMESH_PAIR_OPERATOR(-)
KVMESH_PAIR_OPERATOR(*)
KVMESH_PAIR_OPERATOR(/)
KVMESH_PAIR_OPERATOR(&)
KVMESH_PAIR_OPERATOR(|)
KVMESH_PAIR_OPERATOR(<<)
KVMESH_PAIR_OPERATOR(>>)
KVMESH_PAIR_OPERATOR(<)
KVMESH_PAIR_OPERATOR(>)
KVMESH_PAIR_OPERATOR(>=)
#undef KVMESH_PAIR_OPERATOR

template <typename V>
inline Pair<V> operator*(typename Lane<V>::Type a, const Pair<V>& b) {
  return b * a;
}
template <typename V>
inline Pair<V> operator-(const Pair<V>& a) {
  return {-a.low, -a.high};
}
template <typename V, typename Other>
inline Pair<V>& operator+=(Pair<V>& a, const Other& b) {
  return a = a + b;
}
template <typename V, typename Other>
inline Pair<V>& operator*=(Pair<V>& a, const Other& b) {
  return a = a * b;
}
template <typename V>
inline Pair<V>& operator|=(Pair<V>& a, const Pair<V>& b) {
  return a = a | b;
}

// Selects, per lane, the first value if the mask is set, else the second.
template <typename Mask, typename V>
inline V select(const Mask& mask, const V& yes, const V& no) {
  return mask ? yes : no;
}
template <typename Mask, typename V>
inline Pair<V> select(const Pair<Mask>& mask, const Pair<V>& yes, const Pair<V>& no) {
  return {select(mask.low, yes.low, no.low), select(mask.high, yes.high, no.high)};
}

// Vector types with as many lanes of 32 and 16 bits as one of so many bytes has. GCC ignores sizes
// that depend on a template's arguments.
template <int BYTES>
struct Beside;
template <>
struct Beside<16> {
  using Ints = int32_t __attribute__((vector_size(16)));
  using Halves = uint16_t __attribute__((vector_size(8)));
};
template <>
struct Beside<32> {
  using Ints = int32_t __attribute__((vector_size(32)));
  using Halves = uint16_t __attribute__((vector_size(16)));
};
template <>
struct Beside<64> {
  using Ints = int32_t __attribute__((vector_size(64)));
  using Halves = uint16_t __attribute__((vector_size(32)));
};
template <typename V>
using IntsOf = typename Beside<sizeof(V)>::Ints;
template <typename V>
using HalvesOf = typename Beside<sizeof(V)>::Halves;

// Consecutive numbers, one per lane.
template <typename V>
struct Counted {
  static V from(int first) {
    if constexpr (kLanes<V> == 4) return V{0, 1, 2, 3} + first;
    else if constexpr (kLanes<V> == 8) return V{0, 1, 2, 3, 4, 5, 6, 7} + first;
    else return V{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first;
  }
};
template <typename V>
struct Counted<Pair<V>> {
  static Pair<V> from(int first) {
    return {Counted<V>::from(first), Counted<V>::from(first + kLanes<V>)};
  }
};

template <int BIT, typename V>
inline float sum_of_lanes(V value) {
  value += __builtin_shuffle(value, Counted<IntsOf<V>>::from(0) ^ BIT);
  if constexpr (BIT > 1) return sum_of_lanes<BIT / 2>(value);
  else return value[0];
}
template <typename V>
inline float sum(const V& value) {
  return sum_of_lanes<kLanes<V> / 2>(value);
}
template <typename V>
inline float sum(const Pair<V>& value) {
  return sum(value.low + value.high);
}

template <typename V>
inline float first_of(const V& value) {
  return value[0];
}
template <typename V>
inline float first_of(const Pair<V>& value) {
  return first_of(value.low);
}

template <typename V>
inline float highest_of(const V& value) {
  float peak = value[0];
  for (int i = 1; i < kLanes<V>; ++i) peak = value[i] > peak ? value[i] : peak;
  return peak;
}
template <typename V>
inline float highest_of(const Pair<V>& value) {
  return highest_of(select(value.low > value.high, value.low, value.high));
}

// Whether any lane of a comparison's result is set.
template <typename V>
inline bool any_set(const V& mask) {
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) {
    __m256i bits;
    std::memcpy(&bits, &mask, sizeof bits);
    return !_mm256_testz_si256(bits, bits);
  }
#endif
  int32_t any = 0;
  for (int i = 0; i < kLanes<V>; ++i) any |= mask[i];
  return any != 0;
}
template <typename V>
inline bool any_set(const Pair<V>& mask) {
  return any_set(mask.low | mask.high);
}

// Adds neighbouring lanes of two vectors, `BIT` apart: those of `a` to lanes without the bit, those
// of `b` to the others. Four rounds sum sixteen vectors, one per lane, with a quarter of the
// shuffles of sixteen separate sums.
template <int BIT, typename V>
inline V add_neighbours(const V& a, const V& b) {
  const IntsOf<V> lane = Counted<IntsOf<V>>::from(0);
  const IntsOf<V> from_b = (lane & BIT) / BIT * kLanes<V>;
  return __builtin_shuffle(a, b, lane + from_b) + __builtin_shuffle(a, b, (lane ^ BIT) + from_b);
}
template <int BIT, typename V>
inline Pair<V> add_neighbours(const Pair<V>& a, const Pair<V>& b) {
  if constexpr (BIT == kLanes<V>) return {a.low + a.high, b.low + b.high};
  else return {add_neighbours<BIT>(a.low, b.low), add_neighbours<BIT>(a.high, b.high)};
}

// Interleaves the first halves of two vectors, or the second halves.
template <typename V>
struct Interleaved {
  static V low(const V& a, const V& b) { return of(a, b, 0); }
  static V high(const V& a, const V& b) { return of(a, b, kLanes<V> / 2); }

 private:
  static V of(const V& a, const V& b, int first) {
    const IntsOf<V> lane = Counted<IntsOf<V>>::from(0);
    return __builtin_shuffle(a, b, (lane >> 1) + (lane & 1) * kLanes<V> + first);
  }
};
template <typename V>
struct Interleaved<Pair<V>> {
  using Half = Interleaved<V>;
  static Pair<V> low(const Pair<V>& a, const Pair<V>& b) { return of(a.low, b.low); }
  static Pair<V> high(const Pair<V>& a, const Pair<V>& b) { return of(a.high, b.high); }

 private:
  static Pair<V> of(const V& a, const V& b) { return {Half::low(a, b), Half::high(a, b)}; }
};

// Loads and stores a whole vector; a pair copied as one object would pass through memory.
template <typename V>
struct Whole {
  static V load(const void* from) {
    V out;
    std::memcpy(&out, from, sizeof out);
    return out;
  }
  static void store(void* to, const V& value) { std::memcpy(to, &value, sizeof value); }
};
template <typename V>
struct Whole<Pair<V>> {
  static Pair<V> load(const void* from) {
    const char* const second = static_cast<const char*>(from) + sizeof(V);
    return {Whole<V>::load(from), Whole<V>::load(second)};
  }
  static void store(void* to, const Pair<V>& value) {
    Whole<V>::store(to, value.low);
    Whole<V>::store(static_cast<char*>(to) + sizeof(V), value.high);
  }
};

// Reinterprets the bits with another lane type.
template <typename To, typename From>
struct Bits {
  static To as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
  }
};
template <typename To, typename From>
struct Bits<Pair<To>, Pair<From>> {
  static Pair<To> as(const Pair<From>& from) {
    return {Bits<To, From>::as(from.low), Bits<To, From>::as(from.high)};
  }
};

// Converts 16-bit values to 32-bit lanes and back.
template <typename V>
struct Widened {
  static V load(const uint16_t* from) {
#if defined(__AVX512F__)
    // GCC 12 converts the halves of such a vector one after the other.
    if constexpr (sizeof(V) == 64) {
      __m256i narrow;
      std::memcpy(&narrow, from, sizeof narrow);
      const __m512i wide = _mm512_maskz_cvtepu16_epi32(0xffff, narrow);
      V out;
      std::memcpy(&out, &wide, sizeof out);
      return out;
    }
#endif
    HalvesOf<V> halves;
    std::memcpy(&halves, from, sizeof halves);
    return __builtin_convertvector(halves, V);
  }
  static void store(uint16_t* to, const V& words) {
    const auto halves = __builtin_convertvector(words, HalvesOf<V>);
    std::memcpy(to, &halves, sizeof halves);
  }
};
template <typename V>
struct Widened<Pair<V>> {
  static Pair<V> load(const uint16_t* from) {
    return {Widened<V>::load(from), Widened<V>::load(from + kLanes<V>)};
  }
  static void store(uint16_t* to, const Pair<V>& words) {
    Widened<V>::store(to, words.low);
    Widened<V>::store(to + kLanes<V>, words.high);
  }
};

}  // namespace
