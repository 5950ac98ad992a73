// Moves bytes between memories and sockets without the interpreter. Only native.py calls these
// functions, and describes them; each has a Python equivalent.
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "crc32c.h"

namespace {

constexpr int kMaxBuffers = 512;
// Maximum bytes of one call, which ends earlier at the socket's timeout, so that progress shows in
// time. Bytes with a checksum move in pieces that stay in the cache.
constexpr uint64_t kPieceBytes = 1 << 23;
constexpr uint64_t kSummedBytes = 256 << 10;
constexpr uint64_t kScatteredBytes = 512 << 10;
constexpr int kLentBytes = 1 << 20;
constexpr uint64_t kLentRange = 8 << 10;  // copying a shorter range is faster than lending it

// --- ranges ----------------------------------------------------------------------------------

uint64_t size_of(const iovec* buffers, int64_t count) {
  uint64_t size = 0;
  for (int64_t i = 0; i < count; ++i) size += buffers[i].iov_len;
  return size;
}

// A position in a list of ranges.
class Cursor {
 public:
  Cursor(const iovec* ranges, int64_t count) : next_(ranges), end_(ranges + count) { settle(); }

  bool at_end() const { return next_ == end_; }

  // Address, and bytes left in its range; not at the end.
  char* at() const { return static_cast<char*>(next_->iov_base) + done_; }
  uint64_t left() const { return next_->iov_len - done_; }

  // Fills buffers with the next bytes, at most `limit`; returns the number of buffers.
  int batch(iovec* buffers, uint64_t limit) const {
    int count = 0;
    uint64_t skip = done_;
    for (const iovec* range = next_; range != end_ && count < kMaxBuffers && limit; ++range) {
      uint64_t size = range->iov_len - skip;
      if (size > limit) size = limit;
      if (size) buffers[count++] = {static_cast<char*>(range->iov_base) + skip, size};
      limit -= size;
      skip = 0;
    }
    return count;
  }

  void advance(uint64_t size) {
    done_ += size;
    settle();
  }

 private:
  void settle() {
    while (next_ != end_ && done_ >= next_->iov_len) done_ -= (next_++)->iov_len;
  }

  const iovec* next_;
  const iovec* end_;
  uint64_t done_ = 0;
};

uint32_t sum_of(uint32_t value, const iovec* buffers, int count, uint64_t size) {
  for (int i = 0; i < count && size; ++i) {
    const uint64_t part = buffers[i].iov_len < size ? buffers[i].iov_len : size;
    value = crc32c(value, static_cast<const uint8_t*>(buffers[i].iov_base), part);
    size -= part;
  }
  return value;
}

// --- copies ----------------------------------------------------------------------------------

// Minimum bytes of a copy with non-temporal stores. An ordinary store first reads the line that it
// overwrites, which is a third of the memory traffic. glibc also streams large copies, but takes
// its threshold from the cache size, which virtual machines report too large.
constexpr uint64_t kStreamedBytes = 2 << 20;
constexpr uint64_t kSharedBytes = 4 << 20;  // below this, starting a thread costs too much
constexpr uint64_t kLine = 64;
constexpr uint64_t kPage = 4096;
// Number of pages that are copied in parallel, and bytes of each in turn. The hardware prefetcher
// works within a page only, so four streams hide the waits at each new page. AMD's Zen 3 copies
// 3.4 GB/s in turns of 128 bytes, 5.3 in turns of 256, and 14 to 17 in turns of 512.
constexpr uint64_t kPagesAbreast = 4;
constexpr uint64_t kTurnBytes = 512;
constexpr uint64_t kLongBytes = 256 << 10;
constexpr uint64_t kAheadInRun = 2048;

#if defined(__AVX512F__) || defined(__AVX2__)

inline void stream_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#else
  const auto* words = reinterpret_cast<const __m256i*>(from);
  const __m256i low = _mm256_loadu_si256(words), high = _mm256_loadu_si256(words + 1);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, high);
#endif
}

// `size` is a multiple of a line, `to` is aligned to one; `next` is the source of the following
// copy. Prefetches may pass its end.
void stream_run(char* to, const char* from, uint64_t size, const char* next) {
  for (uint64_t at = 0; at < size; at += kLine) {
    const uint64_t ahead = at + kAheadInRun;
    _mm_prefetch(ahead < size ? from + ahead : next + (ahead - size), _MM_HINT_T0);
    stream_line(to + at, from + at);
  }
}

// Variant of `stream_run` with pages in parallel.
void stream_piece(char* to, const char* from, uint64_t size, const char* next) {
  constexpr uint64_t kStep = kPagesAbreast * kPage;
  uint64_t at = 0;
  for (; at + kStep <= size; at += kStep) {
    const char* after = at + 2 * kStep <= size ? from + at + kStep : next;
    for (uint64_t done = 0; done < kPage; done += kTurnBytes) {
      for (uint64_t page = 0; page < kStep; page += kPage) {
        const char* source = from + at + page + done;
        const char* ahead = done + kTurnBytes < kPage ? source + kTurnBytes
                                                      : after + page + done + kTurnBytes - kPage;
        for (uint64_t line = 0; line < kTurnBytes; line += kLine) {
          _mm_prefetch(ahead + line, _MM_HINT_T0);
          stream_line(to + at + page + done + line, source + line);
        }
      }
    }
  }
  stream_run(to + at, from + at, size - at, next);
}

void stream(char* to, const char* from, uint64_t size, const char* next) {
  const uint64_t head = -reinterpret_cast<uintptr_t>(to) % kLine;
  if (size < head + kLine) {
    std::memcpy(to, from, size);
    return;
  }
  std::memcpy(to, from, head);
  to += head, from += head, size -= head;
  const uint64_t lines = size - size % kLine;
  if (lines < kLongBytes) {
    stream_piece(to, from, lines, next);
  } else {
    stream_run(to, from, lines, next);
  }
  std::memcpy(to + lines, from + lines, size - lines);
}

void end_streams() { _mm_sfence(); }

#else
void stream(char* to, const char* from, uint64_t size, const char*) { std::memcpy(to, from, size); }
void end_streams() {}
#endif

// Copies and sums in one pass, with non-temporal stores if `to` is aligned.
uint32_t copy_summed(uint32_t value, char* to, const char* from, uint64_t size) {
#if (defined(__AVX512F__) || defined(__AVX2__)) && KVMESH_HAS_CRC32C
  if (reinterpret_cast<uintptr_t>(to) % kLine == 0) {
    uint32_t crc = ~value;
    const auto* const at = reinterpret_cast<const uint8_t*>(from);
    const auto line = [&](uint64_t offset) { stream_line(to + offset, from + offset); };
    const uint64_t rest = sum_lines(crc, at, size, line), done = size - rest;
    std::memcpy(to + done, from + done, rest);
    return ~sum_rest(crc, at + done, rest);
  }
#endif
  std::memcpy(to, from, size);
  return crc32c(value, reinterpret_cast<const uint8_t*>(to), size);
}

// Copies bytes `begin` to `end` between two lists of ranges.
void copy_part(Cursor target, Cursor source, uint64_t begin, uint64_t end, bool streams) {
  target.advance(begin), source.advance(begin);
  while (begin < end) {
    char* to = target.at();
    const char* from = source.at();
    uint64_t size = target.left() < source.left() ? target.left() : source.left();
    if (size > end - begin) size = end - begin;
    begin += size;
    target.advance(size), source.advance(size);
    if (streams) {
      stream(to, from, size, source.at_end() ? from : source.at());
    } else {
      std::memcpy(to, from, size);
    }
  }
  if (streams) end_streams();
}

// The kernel's receive copy stalls at each page for its translation and first bytes. For many small
// ranges, prefetching all of them before the call makes these stalls overlap.
bool is_scattered(const iovec* ranges, int64_t count) {
  return count > 1 && size_of(ranges, count) / count < kLongBytes;
}

void fetch_pages(const iovec* buffers, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const char* begin = static_cast<const char*>(buffers[i].iov_base);
    for (uint64_t at = 0; at < buffers[i].iov_len; at += kPage) {
      __builtin_prefetch(begin + at, 1);
      __builtin_prefetch(begin + at + kLine, 1);
    }
  }
}

// Shared with the interpreter, which reads `moved` and writes `stop` during a call.
struct State {
  int64_t moved;
  int64_t stop;

  bool is_stopped() const { return __atomic_load_n(&stop, __ATOMIC_RELAXED) != 0; }
  void add_moved(int64_t bytes) { __atomic_add_fetch(&moved, bytes, __ATOMIC_RELAXED); }
};

// Zero-copy sends through a pipe, which holds references to pages. The socket may read lent pages
// until the peer has all of them, so they may change only after the peer has confirmed that.
class Lender {
 public:
  explicit Lender(bool wanted) {
    if (!wanted || pipe2(ends_, O_CLOEXEC) != 0) return;
    // A user with many pipes gets small ones; copying is then faster than many calls.
    if (fcntl(ends_[1], F_SETPIPE_SZ, kLentBytes) < kLentBytes) end();
  }
  ~Lender() { end(); }
  Lender(const Lender&) = delete;
  Lender& operator=(const Lender&) = delete;

  bool is_open() const { return ends_[0] >= 0; }

  // Sends some of `left` bytes, like sendmsg; returns -1 without errno if the kernel cannot lend
  // these pages.
  ssize_t send(int fd, const iovec* buffers, int count, uint64_t left) {
    if (held_ == 0) {
      const ssize_t held = vmsplice(ends_[1], buffers, count, 0);
      if (held <= 0) {
        end();
        errno = 0;
        return -1;
      }
      held_ = held;
    }
    const unsigned flags = held_ < left ? SPLICE_F_MORE : 0;
    const ssize_t sent = splice(ends_[0], nullptr, fd, nullptr, held_, flags);
    if (sent > 0) held_ -= sent;
    if (sent < 0 && (errno == EINVAL || errno == ENOSYS || errno == EPERM)) {
      end();  // the pipe's content was not sent; the caller sends it by copying
      errno = 0;
    }
    return sent;
  }

 private:
  void end() {
    for (int& fd : ends_) {
      if (fd >= 0) close(fd);
      fd = -1;
    }
  }

  int ends_[2] = {-1, -1};
  uint64_t held_ = 0;
};

// Receives into memory that stays in the cache, and computes the sum while copying from there to
// the destination: so both the kernel's copy and ours work in the cache.
int receive_summed(int fd, const iovec* ranges, int64_t count, uint32_t* sum, State* state) {
  alignas(kLine) thread_local char landing[kSummedBytes];
  Cursor cursor(ranges, count);
  for (uint64_t left = size_of(ranges, count); left;) {
    if (state->is_stopped()) return ECANCELED;
    const uint64_t wanted = left < kSummedBytes ? left : kSummedBytes;
    const ssize_t received = recv(fd, landing, wanted, MSG_WAITALL);
    if (received == 0) return ECONNRESET;
    if (received < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      return errno;
    }
    for (uint64_t done = 0; done < static_cast<uint64_t>(received);) {
      uint64_t size = received - done;
      if (size > cursor.left()) size = cursor.left();
      *sum = copy_summed(*sum, cursor.at(), landing + done, size);
      cursor.advance(size);
      done += size;
    }
    left -= received;
    state->add_moved(received);
  }
  end_streams();
  return 0;
}

}  // namespace

extern "C" {

int kvmesh_has_crc32c() { return KVMESH_HAS_CRC32C; }

uint32_t kvmesh_crc32c(const void* at, uint64_t size, uint32_t value) {
  return crc32c(value, static_cast<const uint8_t*>(at), size);
}

// Large copies are shared by several threads, including the caller.
void kvmesh_copy(const iovec* targets, int64_t num_targets, const iovec* sources,
                 int64_t num_sources, int64_t num_threads) {
  const uint64_t size = size_of(targets, num_targets);
  const Cursor target(targets, num_targets), source(sources, num_sources);
  if (num_threads < 2 || size < kSharedBytes) {
    copy_part(target, source, 0, size, size >= kStreamedBytes);
    return;
  }
  const uint64_t part = (size / num_threads + kPage - 1) / kPage * kPage;
  std::vector<std::thread> others;
  uint64_t begin = 0;
  try {
    for (; begin + part < size; begin += part) {
      others.emplace_back(copy_part, target, source, begin, begin + part, true);
    }
  } catch (const std::system_error&) {
    // No more threads are available: the calling thread copies the rest.
  }
  copy_part(target, source, begin, size, true);
  for (std::thread& other : others) other.join();
}

// Polls a socket: 1 as soon as it has bytes, an end or an error, 0 after the given time. Yields the
// CPU in between, since another process may be the one that answers.
int kvmesh_poll(int fd, int64_t nanoseconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::nanoseconds(nanoseconds);
  do {
    char byte;
    if (recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || errno != EAGAIN) return 1;
    sched_yield();
  } while (Clock::now() < end);
  return 0;
}

int kvmesh_send(int fd, const iovec* ranges, int64_t count, int has_sum, int lends, uint32_t* sum,
                State* state) {
  iovec buffers[kMaxBuffers];
  uint64_t summed = 0;  // bytes that are in the sum and not sent yet
  uint64_t left = size_of(ranges, count);
  Lender lender(lends && left >= kLentRange * count);
  for (Cursor cursor(ranges, count); !cursor.at_end();) {
    if (state->is_stopped()) return ECANCELED;
    msghdr message{};
    message.msg_iov = buffers;
    if (has_sum && summed == 0) {
      message.msg_iovlen = cursor.batch(buffers, kSummedBytes);
      summed = size_of(buffers, message.msg_iovlen);
      *sum = sum_of(*sum, buffers, message.msg_iovlen, summed);
    } else {
      message.msg_iovlen = cursor.batch(buffers, has_sum ? summed : kPieceBytes);
    }
    const ssize_t sent = lender.is_open()
                             ? lender.send(fd, buffers, message.msg_iovlen, left)
                             : sendmsg(fd, &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR || errno == EAGAIN || !errno) continue;
      return errno;
    }
    cursor.advance(sent);
    if (has_sum) summed -= sent;
    left -= sent;
    state->add_moved(sent);
  }
  return 0;
}

int kvmesh_receive(int fd, const iovec* ranges, int64_t count, int has_sum, uint32_t* sum,
                   State* state) {
  if (has_sum) return receive_summed(fd, ranges, count, sum, state);
  iovec buffers[kMaxBuffers];
  const bool scattered = is_scattered(ranges, count);
  for (Cursor cursor(ranges, count); !cursor.at_end();) {
    if (state->is_stopped()) return ECANCELED;
    msghdr message{};
    message.msg_iov = buffers;
    const uint64_t limit = scattered ? kScatteredBytes : kPieceBytes;
    message.msg_iovlen = cursor.batch(buffers, limit);
    if (scattered) fetch_pages(buffers, message.msg_iovlen);
    const ssize_t received = recvmsg(fd, &message, MSG_WAITALL);
    if (received == 0) return ECONNRESET;
    if (received < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      return errno;
    }
    cursor.advance(received);
    state->add_moved(received);
  }
  return 0;
}
}
