// The loops over one tile, compiled once for each instruction set: the including file names it in CHUNKMEM_LEVEL. They
// are plain loops over adam_math.h that compilers make vectors of; nothing here may come from a header whose inline
// functions another file could take over, since they would then run with the wrong instruction set.
#include "level.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace chunkmem {
namespace {

// Elements after which results in fp32 are stored past the caches. More at once would fill the buffers through which
// such stores go, and what comes next would wait instead of being computed meanwhile.
constexpr int64_t kPart = 64;

int64_t nbytes_of(Dtype dtype) { return dtype == Dtype::kFloat ? 4 : 2; }

void to_float(const void* from, Dtype dtype, float* __restrict to, int64_t n) {
  const auto* bits = static_cast<const uint16_t*>(from);
  if (dtype == Dtype::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) to[i] = from_bfloat16(bits[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = from_half(bits[i]);
  }
}

// Two loops, since each pointer promises that no other one leads to its memory.
template <Order kOrder>
void update(float* __restrict param, const float* __restrict grad, float* __restrict exp_avg,
            float* __restrict exp_avg_sq, int64_t n, const AdamScalars s) {
  for (int64_t i = 0; i < n; ++i) {
    adam_update<kOrder>(grad[i], param[i], exp_avg[i], exp_avg_sq[i], s);
  }
}

template <Order kOrder>
CHUNKMEM_INLINE void update_into(const float* __restrict param, const float* __restrict grad,
                                 const float* __restrict exp_avg, const float* __restrict exp_avg_sq,
                                 float* __restrict out_param, float* __restrict out_exp_avg,
                                 float* __restrict out_exp_avg_sq, int64_t n, const AdamScalars s) {
  for (int64_t i = 0; i < n; ++i) {
    float p = param[i], m = exp_avg[i], v = exp_avg_sq[i];
    adam_update<kOrder>(grad[i], p, m, v, s);
    out_param[i] = p;
    out_exp_avg[i] = m;
    out_exp_avg_sq[i] = v;
  }
}

void round_nearest(const float* __restrict from, uint16_t* __restrict to, int64_t n, Dtype dtype) {
  if (dtype == Dtype::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat16(from[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = to_half(from[i]);
  }
}

// Writes past the caches: nothing reads the output again before it is copied away, and an ordinary store would first
// fetch the line. `to` is on a line, and `n` a number of whole lines.
template <typename T>
CHUNKMEM_INLINE void store_lines_past_caches(T* to, const T* from, int64_t n) {
#if defined(__AVX512F__)
  for (int64_t i = 0; i < n; i += 64 / int64_t(sizeof *to)) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
  }
#elif defined(__SSE2__)
  for (int64_t i = 0; i < n; i += 16 / int64_t(sizeof *to)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
#else
  __builtin_memcpy(to, from, size_t(n) * sizeof *to);
#endif
}

bool on_a_line(const void* at) { return reinterpret_cast<uintptr_t>(at) % 64 == 0; }

// The same from and to anywhere: what is no whole line is stored as usual.
template <typename T>
void store_past_caches(T* to, const T* from, int64_t n) {
  for (; n > 0 && !on_a_line(to); --n) *to++ = *from++;
  const int64_t num_in_lines = n - n % (64 / int64_t(sizeof *to));
  store_lines_past_caches(to, from, num_in_lines);
  __builtin_memcpy(to + num_in_lines, from + num_in_lines, size_t(n - num_in_lines) * sizeof *to);
}

// Rounds `n` elements of the tile from `begin` on, at most kTile; `param` is the first of them.
void write_lowp(const AdamTile& tile, const float* param, int64_t begin, int64_t n) {
  alignas(64) uint16_t out_tile[kTile];
  uint16_t* to = tile.past_caches ? out_tile : tile.lowp_out + begin;
  round_nearest(param, to, n, tile.out_type);
  if (tile.past_caches) {
    store_past_caches(tile.lowp_out + begin, to, n);
  }
}

// The gradients of `n` elements from `begin` on, at most kTile, in fp32: where they are or in `converted`.
CHUNKMEM_INLINE const float* fp32_gradients(const AdamTile& tile, float* converted, int64_t begin, int64_t n) {
  if (tile.grad_type == Dtype::kFloat) {
    return static_cast<const float*>(tile.grad) + begin;
  }
  to_float(static_cast<const uint16_t*>(tile.grad) + begin, tile.grad_type, converted, n);
  return converted;
}

void adam_in_place(const AdamTile& tile) {
  alignas(64) float grad_tile[kTile];
  const float* grad = fp32_gradients(tile, grad_tile, 0, tile.numel);
  float *param = tile.out_param, *exp_avg = tile.out_exp_avg, *exp_avg_sq = tile.out_exp_avg_sq;
  const int64_t n = tile.num_main;
  const AdamScalars& s = *tile.scalars;
  s.is_cuda_order ? update<Order::kCuda>(param, grad, exp_avg, exp_avg_sq, n, s)
                  : update<Order::kVector>(param, grad, exp_avg, exp_avg_sq, n, s);
  update<Order::kTail>(param + n, grad + n, exp_avg + n, exp_avg_sq + n, tile.numel - n, s);
  if (tile.lowp_out) {
    write_lowp(tile, param, 0, tile.numel);
  }
}

// Updates and stores past the caches as many times kTile elements as there are before torch's tail; returns how many
// elements those are.
template <Order kOrder>
CHUNKMEM_INLINE int64_t stream(const AdamTile& tile, const AdamScalars s) {
  if (!on_a_line(tile.out_param) || !on_a_line(tile.out_exp_avg) || !on_a_line(tile.out_exp_avg_sq)) {
    return 0;
  }
  alignas(64) float grad_tile[kTile], param[kTile], exp_avg[kPart], exp_avg_sq[kPart];
  int64_t begin = 0;
  for (; begin + kTile <= tile.num_main; begin += kTile) {
    const float* grad = fp32_gradients(tile, grad_tile, begin, kTile);
    for (int64_t i = 0; i < kTile; i += kPart) {
      const int64_t at = begin + i;
      update_into<kOrder>(tile.param + at, grad + i, tile.exp_avg + at, tile.exp_avg_sq + at, param + i, exp_avg,
                         exp_avg_sq, kPart, s);
      store_lines_past_caches(tile.out_param + at, param + i, kPart);
      store_lines_past_caches(tile.out_exp_avg + at, exp_avg, kPart);
      store_lines_past_caches(tile.out_exp_avg_sq + at, exp_avg_sq, kPart);
    }
    if (tile.lowp_out) {
      write_lowp(tile, param, begin, kTile);
    }
  }
  return begin;
}

// Updates `n` elements from `begin` on, at most kTile, of which the last may be torch's tail.
template <Order kOrder>
CHUNKMEM_INLINE void update_range(const AdamTile& tile, const AdamScalars s, int64_t begin, int64_t n) {
  alignas(64) float grad_tile[kTile], param_tile[kTile], exp_avg_tile[kTile], exp_avg_sq_tile[kTile];
  const float* grad = fp32_gradients(tile, grad_tile, begin, n);
  const float *old_param = tile.param + begin, *old_exp_avg = tile.exp_avg + begin;
  const float* old_exp_avg_sq = tile.exp_avg_sq + begin;
  float* param = tile.past_caches ? param_tile : tile.out_param + begin;
  float* exp_avg = tile.past_caches ? exp_avg_tile : tile.out_exp_avg + begin;
  float* exp_avg_sq = tile.past_caches ? exp_avg_sq_tile : tile.out_exp_avg_sq + begin;
  const int64_t left = tile.num_main > begin ? tile.num_main - begin : 0, main = left < n ? left : n;
  update_into<kOrder>(old_param, grad, old_exp_avg, old_exp_avg_sq, param, exp_avg, exp_avg_sq, main, s);
  update_into<Order::kTail>(old_param + main, grad + main, old_exp_avg + main, old_exp_avg_sq + main, param + main,
                    exp_avg + main, exp_avg_sq + main, n - main, s);
  if (tile.past_caches) {
    store_past_caches(tile.out_param + begin, param, n);
    store_past_caches(tile.out_exp_avg + begin, exp_avg, n);
    store_past_caches(tile.out_exp_avg_sq + begin, exp_avg_sq, n);
  }
  if (tile.lowp_out) {
    write_lowp(tile, param, begin, n);
  }
}

template <Order kOrder, bool kHasL2, bool kFromExpAvg>
void adam_into(const AdamTile& tile) {
  AdamScalars s = *tile.scalars;
  // Known here, so that the loops have no branches: compilers make vectors of them.
  s.has_l2 = kHasL2;
  s.from_exp_avg = kFromExpAvg;
  int64_t begin = tile.past_caches ? stream<kOrder>(tile, s) : 0;
  for (; begin < tile.numel; begin += kTile) {
    update_range<kOrder>(tile, s, begin, tile.numel - begin < kTile ? tile.numel - begin : kTile);
  }
}

template <Order kOrder, bool kHasL2>
void adam_into(const AdamTile& tile) {
  tile.scalars->from_exp_avg ? adam_into<kOrder, kHasL2, true>(tile) : adam_into<kOrder, kHasL2, false>(tile);
}

template <Order kOrder>
void adam_into(const AdamTile& tile) {
  tile.scalars->has_l2 ? adam_into<kOrder, true>(tile) : adam_into<kOrder, false>(tile);
}

void adam(const AdamTile& tile) {
  if (tile.in_place) {
    adam_in_place(tile);
  } else if (tile.scalars->is_cuda_order) {
    adam_into<Order::kCuda>(tile);
  } else {
    adam_into<Order::kVector>(tile);
  }
}

#include "blocks.h"

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

extern const Level CHUNKMEM_LEVEL{adam, adam_blocks, sum_squares};

}  // namespace chunkmem
