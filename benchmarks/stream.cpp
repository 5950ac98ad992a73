// Reads memory as weights are read: every thread one range after the other, nothing left out.
// The bound of `benchmarks.engine`; built by `benchmarks/engine_floor.py`.
#include <cstdint>

typedef int64_t Line __attribute__((vector_size(64)));

namespace {
// Streams that a thread reads side by side: one alone does not keep all of a core's misses busy.
template <int STREAMS, int AHEAD>
Line read_range(const Line* lines, int64_t count) {
  Line sums[4] = {};
  const int64_t part = count / STREAMS;
  for (int64_t i = 0; i + 4 <= part; i += 4) {
    for (int s = 0; s < STREAMS; ++s) {
      const Line* from = lines + s * part + i;
      for (int j = 0; j < 4; ++j) {
        if (AHEAD) __builtin_prefetch(from + AHEAD + j);
        sums[j] ^= from[j];
      }
    }
  }
  return sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
}
}  // namespace

// Returns a number that depends on every byte, so that no read can be left out.
extern "C" int64_t stream(const void* memory, int64_t bytes, int way, int threads) {
  const Line* lines = static_cast<const Line*>(memory);
  const int64_t each = bytes / 64 / threads;
  int64_t total = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(^ : total)
  for (int thread = 0; thread < threads; ++thread) {
    const Line* own = lines + thread * each;
    Line sum = {};
    switch (way) {
      case 0: sum = read_range<1, 0>(own, each); break;
      case 1: sum = read_range<1, 32>(own, each); break;
      case 2: sum = read_range<4, 0>(own, each); break;
      default: sum = read_range<4, 16>(own, each); break;
    }
    for (int i = 0; i < 8; ++i) total ^= sum[i];
  }
  return total;
}
