// Thread-local memory that stays allocated between layers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

// Each use has its own memory.
enum class Use { kRows, kSoftmax, kQueries };

template <typename T, Use>
inline T* scratch(int64_t size) {
  static thread_local std::vector<T> memory;
  if (memory.size() < static_cast<size_t>(size)) memory.resize(static_cast<size_t>(size));
  return memory.data();
}

}  // namespace
