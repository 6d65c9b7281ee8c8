// Which instruction set runs, and what types of tensors are called there.
#pragma once
#include "../arguments.h"
#include "level.h"

namespace chunkmem {

// Elements a thread takes at least: below that, waking another one takes longer.
constexpr int64_t kGrain = 1 << 14;

// An output of this size does not stay in a cache until it is read.
constexpr int64_t kPastCachesNumel = 1 << 20;

inline int64_t best_level() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma")) {
    return 2;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return 1;
  }
#endif
  return 0;
}

inline const Level& level_at(int64_t level) {
  if (level < 0 || level > best_level()) {
    refuse("level " + std::to_string(level) + " is not one of 0 to " + std::to_string(best_level()) +
           ", what this processor can do");
  }
#if defined(__x86_64__)
  return level == 2 ? avx512 : level == 1 ? avx2 : baseline;
#else
  return baseline;
#endif
}

inline Dtype dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return Dtype::kFloat;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Half: return Dtype::kHalf;
    default: return Dtype::kNone;
  }
}

}  // namespace chunkmem
