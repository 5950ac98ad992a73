// crc32c of the data channel's payloads, by the CPU's crc32 instruction.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE4_2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace {

#if defined(__SSE4_2__) || defined(__ARM_FEATURE_CRC32)
#define KVMESH_HAS_CRC32C 1

inline uint32_t step8(uint32_t crc, uint64_t word) {
#if defined(__SSE4_2__)
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
#else
  return __crc32cd(crc, word);
#endif
}

inline uint32_t step1(uint32_t crc, uint8_t byte) {
#if defined(__SSE4_2__)
  return _mm_crc32_u8(crc, byte);
#else
  return __crc32cb(crc, byte);
#endif
}

inline uint64_t word_at(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// The instruction has a latency of three cycles and a throughput of one, so three parts of a stripe
// are summed in parallel. To merge them, a sum is advanced over zeros in place of the next part.
// That is linear in its bits, so four tables, one per byte, suffice. The rest after long stripes
// uses short ones.
constexpr uint64_t kLongPart = 2048;
constexpr uint64_t kShortPart = 256;

struct ZeroTables {
  uint32_t entry[4][256];

  explicit ZeroTables(uint64_t zeros) {
    for (int byte = 0; byte < 4; ++byte) {
      for (uint32_t value = 0; value < 256; ++value) {
        uint32_t crc = value << (8 * byte);
        for (uint64_t i = 0; i < zeros; i += 8) crc = step8(crc, 0);
        entry[byte][value] = crc;
      }
    }
  }

  uint32_t over_zeros(uint32_t crc) const {
    return entry[0][crc & 255] ^ entry[1][crc >> 8 & 255] ^ entry[2][crc >> 16 & 255] ^
           entry[3][crc >> 24];
  }

  uint32_t joined(uint32_t first, uint32_t second, uint32_t third) const {
    return over_zeros(over_zeros(first) ^ second) ^ third;
  }
};

const ZeroTables long_zeros(kLongPart), short_zeros(kShortPart);

// Prefetch distance in each part of a stripe, in bytes: the hardware prefetcher does not follow
// three streams across pages.
constexpr uint64_t kSumAhead = 3 * kLongPart;

// Sums one line of each of three parts, and passes its offset to `each`.
template <uint64_t PART, typename Each>
inline uint32_t sum_stripe(uint32_t crc, const uint8_t* at, const ZeroTables& zeros, Each each) {
  uint32_t second = 0, third = 0;
  for (uint64_t i = 0; i < PART; i += 64) {
    for (uint64_t part = 0; part < 3; ++part) {
      __builtin_prefetch(at + kSumAhead + part * PART + i);
      each(part * PART + i);
    }
    for (uint64_t word = i; word < i + 64; word += 8) {
      crc = step8(crc, word_at(at + word));
      second = step8(second, word_at(at + PART + word));
      third = step8(third, word_at(at + 2 * PART + word));
    }
  }
  return zeros.joined(crc, second, third);
}

// Sums whole stripes and passes their lines to `each`; returns the number of remaining bytes, which
// are neither summed nor passed.
template <typename Each>
inline uint64_t sum_lines(uint32_t& crc, const uint8_t* at, uint64_t size, Each each) {
  const uint8_t* const begin = at;
  const auto from = [&](uint64_t offset) { each(static_cast<uint64_t>(at - begin) + offset); };
  for (; size >= 3 * kLongPart; at += 3 * kLongPart, size -= 3 * kLongPart)
    crc = sum_stripe<kLongPart>(crc, at, long_zeros, from);
  for (; size >= 3 * kShortPart; at += 3 * kShortPart, size -= 3 * kShortPart)
    crc = sum_stripe<kShortPart>(crc, at, short_zeros, from);
  return size;
}

inline uint32_t sum_rest(uint32_t crc, const uint8_t* at, uint64_t size) {
  for (; size >= 8; at += 8, size -= 8) crc = step8(crc, word_at(at));
  for (; size > 0; ++at, --size) crc = step1(crc, *at);
  return crc;
}

uint32_t crc32c(uint32_t value, const uint8_t* at, uint64_t size) {
  uint32_t crc = ~value;
  const uint64_t rest = sum_lines(crc, at, size, [](uint64_t) {});
  return ~sum_rest(crc, at + (size - rest), rest);
}

#else
#define KVMESH_HAS_CRC32C 0
uint32_t crc32c(uint32_t value, const uint8_t*, uint64_t) { return value; }
#endif

}  // namespace
