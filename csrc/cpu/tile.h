// The loops over one tile, compiled once for each instruction set: the including file names it in CHUNKMEM_LEVEL. They
// are plain loops over adam_math.h that compilers make vectors of; nothing here may come from a header whose inline
// functions another file could take over, since they would then run with the wrong instruction set.
#include "level.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace chunkmem {
namespace {

void to_float(const void* from, Dtype dtype, float* __restrict to, int64_t n) {
  const auto* bits = static_cast<const uint16_t*>(from);
  if (dtype == Dtype::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) to[i] = from_bfloat16(bits[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = from_half(bits[i]);
  }
}

template <bool kTail>
void update(float* __restrict param, const float* __restrict grad, float* __restrict exp_avg,
            float* __restrict exp_avg_sq, int64_t n, const AdamScalars s) {
  for (int64_t i = 0; i < n; ++i) {
    adam_update<kTail>(grad[i], param[i], exp_avg[i], exp_avg_sq[i], s);
  }
}

void round_nearest(const float* __restrict from, uint16_t* __restrict to, int64_t n, Dtype dtype) {
  if (dtype == Dtype::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat16(from[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = to_half(from[i]);
  }
}

// `n` elements whose numbers share their upper 32 bits.
void round_stochastic(const float* __restrict from, uint16_t* __restrict to, int64_t n, Dtype dtype, uint32_t key,
                      uint32_t element) {
  if (dtype == Dtype::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = to_bfloat16(from[i], random_bits(key, element + uint32_t(i)) & 0xffffu);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = to_half_stochastic(from[i], random_bits(key, element + uint32_t(i)));
  }
}

// Writes past the caches: nothing reads the output again before it is copied away, and an ordinary store would first
// fetch the line.
void store_past_caches(uint16_t* to, const uint16_t* from, int64_t n) {
#if defined(__SSE2__)
  while (n > 0 && reinterpret_cast<uintptr_t>(to) % 64 != 0) {
    *to++ = *from++;
    --n;
  }
  for (; n >= 32; n -= 32, to += 32, from += 32) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#else
    for (int i = 0; i < 4; ++i) {
      const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
      _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, word);
    }
#endif
  }
#endif
  __builtin_memcpy(to, from, size_t(n) * sizeof *to);
}

void write_lowp(const AdamTile& tile) {
  alignas(64) uint16_t out_tile[kTile];
  uint16_t* to = tile.past_caches ? out_tile : tile.lowp_out;
  if (!tile.stochastic) {
    round_nearest(tile.param, to, tile.numel, tile.out_type);
  } else {
    const uint64_t until_carry = 0x100000000u - (tile.element & 0xffffffffu);
    const int64_t first = uint64_t(tile.numel) < until_carry ? tile.numel : int64_t(until_carry);
    round_stochastic(tile.param, to, first, tile.out_type, random_key(tile.seed, tile.element), uint32_t(tile.element));
    round_stochastic(tile.param + first, to + first, tile.numel - first, tile.out_type,
                     random_key(tile.seed, tile.element + uint64_t(first)), 0);
  }
  if (tile.past_caches) {
    store_past_caches(tile.lowp_out, to, tile.numel);
  }
}

void adam(const AdamTile& tile) {
  alignas(64) float grad_tile[kTile];
  const float* grad = static_cast<const float*>(tile.grad);
  if (tile.grad_type != Dtype::kFloat) {
    to_float(tile.grad, tile.grad_type, grad_tile, tile.numel);
    grad = grad_tile;
  }
  const int64_t n = tile.num_main;
  update<false>(tile.param, grad, tile.exp_avg, tile.exp_avg_sq, n, *tile.scalars);
  update<true>(tile.param + n, grad + n, tile.exp_avg + n, tile.exp_avg_sq + n, tile.numel - n, *tile.scalars);
  if (tile.lowp_out) {
    write_lowp(tile);
  }
}

// [Note: Order of the norm] in registers, as many doubles as an instruction takes. A square of a float is exact in
// double, so adding it in one instruction or in two is the same. fp32 and bfloat16 are read where they are.
#if defined(__AVX512F__)
typedef __m512d Wide;
Wide widen(const float* x, float unscale) { return _mm512_cvtps_pd(_mm256_loadu_ps(x) * unscale); }
Wide widen(const uint16_t* x, float unscale) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)) * unscale);
}
Wide add_square(Wide sum, Wide x) { return _mm512_fmadd_pd(x, x, sum); }
#elif defined(__AVX2__)
typedef __m256d Wide;
Wide widen(const float* x, float unscale) { return _mm256_cvtps_pd(_mm_loadu_ps(x) * unscale); }
Wide widen(const uint16_t* x, float unscale) {
  const __m128i words = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
  return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(words, 16)) * unscale);
}
Wide add_square(Wide sum, Wide x) { return _mm256_fmadd_pd(x, x, sum); }
#else
typedef double Wide __attribute__((vector_size(2 * sizeof(double))));
Wide widen(const float* x, float unscale) { return Wide{double(x[0] * unscale), double(x[1] * unscale)}; }
Wide widen(const uint16_t* x, float unscale) {
  return Wide{double(from_bfloat16(x[0]) * unscale), double(from_bfloat16(x[1]) * unscale)};
}
Wide add_square(Wide sum, Wide x) { return sum + x * x; }
#endif

template <typename T>
double sum_of_lanes(const T* x, float unscale) {
  constexpr int kWidth = sizeof(Wide) / sizeof(double), kNumWide = kNormLanes / kWidth;
  Wide sums[kNumWide] = {};
  for (int i = 0; i < kNormBlock; i += kNormLanes) {
#pragma GCC unroll 16
    for (int j = 0; j < kNumWide; ++j) {
      sums[j] = add_square(sums[j], widen(x + i + j * kWidth, unscale));
    }
  }
  double lanes[kNormLanes];
  __builtin_memcpy(lanes, sums, sizeof lanes);
  return fold_lanes(lanes);
}

double sum_squares(const void* block, Dtype dtype, float unscale) {
  if (dtype == Dtype::kFloat) {
    return sum_of_lanes(static_cast<const float*>(block), unscale);
  }
  if (dtype == Dtype::kBFloat16) {
    return sum_of_lanes(static_cast<const uint16_t*>(block), unscale);
  }
  alignas(64) float converted[kNormBlock];
  to_float(block, dtype, converted, kNormBlock);
  return sum_of_lanes(converted, unscale);
}

}  // namespace

extern const Level CHUNKMEM_LEVEL{adam, sum_squares};

}  // namespace chunkmem
