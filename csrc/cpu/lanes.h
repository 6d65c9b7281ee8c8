// Vectors of floats and of 32-bit integers, as wide as the level's registers, for templates of adam_math.h and
// block_math.h, which include this first. Operators are the compiler's. A level that has no CHUNKMEM_LANES uses floats.
#pragma once
#include <cstdint>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>

namespace chunkmem {

#if defined(__AVX512F__)
#define CHUNKMEM_LANES 16
#else
#define CHUNKMEM_LANES 8
#endif

typedef float Floats __attribute__((vector_size(4 * CHUNKMEM_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * CHUNKMEM_LANES)));

#define CHUNKMEM_LANES_INLINE static inline __attribute__((always_inline))

CHUNKMEM_LANES_INLINE Floats all_lanes(float x) { return x - Floats{}; }
CHUNKMEM_LANES_INLINE Words all_lanes(uint32_t x) { return x - Words{}; }
CHUNKMEM_LANES_INLINE Words bits_of(Floats x) { return reinterpret_cast<Words>(x); }
CHUNKMEM_LANES_INLINE Floats float_of(Words x) { return reinterpret_cast<Floats>(x); }

#if defined(__AVX512F__)
CHUNKMEM_LANES_INLINE Floats fused_multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
CHUNKMEM_LANES_INLINE Floats square_root(Floats x) { return _mm512_sqrt_ps(x); }
// `b` where they do not compare.
CHUNKMEM_LANES_INLINE Floats lesser(Floats a, Floats b) { return _mm512_min_ps(a, b); }
CHUNKMEM_LANES_INLINE Words lesser(Words a, Words b) {
  return reinterpret_cast<Words>(_mm512_min_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
CHUNKMEM_LANES_INLINE Words greater(Words a, Words b) {
  return reinterpret_cast<Words>(_mm512_max_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
#else
CHUNKMEM_LANES_INLINE Floats fused_multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
CHUNKMEM_LANES_INLINE Floats square_root(Floats x) { return _mm256_sqrt_ps(x); }
CHUNKMEM_LANES_INLINE Floats lesser(Floats a, Floats b) { return _mm256_min_ps(a, b); }
CHUNKMEM_LANES_INLINE Words lesser(Words a, Words b) {
  return reinterpret_cast<Words>(_mm256_min_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
CHUNKMEM_LANES_INLINE Words greater(Words a, Words b) {
  return reinterpret_cast<Words>(_mm256_max_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
#endif
CHUNKMEM_LANES_INLINE Floats fused_multiply_add(float a, Floats b, Floats c) {
  return fused_multiply_add(all_lanes(a), b, c);
}
CHUNKMEM_LANES_INLINE Floats fused_multiply_add(Floats a, float b, Floats c) {
  return fused_multiply_add(a, all_lanes(b), c);
}
CHUNKMEM_LANES_INLINE Floats fused_multiply_add(Floats a, float b, float c) {
  return fused_multiply_add(a, all_lanes(b), all_lanes(c));
}
CHUNKMEM_LANES_INLINE Floats lesser(Floats a, float b) { return lesser(a, all_lanes(b)); }
CHUNKMEM_LANES_INLINE Words lesser(Words a, uint32_t b) { return lesser(a, all_lanes(b)); }

CHUNKMEM_LANES_INLINE Words lane_numbers() {
#if defined(__AVX512F__)
  return Words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  return Words{0, 1, 2, 3, 4, 5, 6, 7};
#endif
}
CHUNKMEM_LANES_INLINE uint32_t largest_lane(Words x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32(reinterpret_cast<__m512i>(x));
#else
  uint32_t lanes[CHUNKMEM_LANES], most = 0;
  __builtin_memcpy(lanes, &x, sizeof lanes);
  for (const uint32_t lane : lanes) most = lane > most ? lane : most;
  return most;
#endif
}

// From and to any address. Narrower types are loaded with zeros above.
CHUNKMEM_LANES_INLINE Floats load_lanes(const float* from) {
  Floats value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
CHUNKMEM_LANES_INLINE Words load_lanes(const uint32_t* from) {
  Words value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
CHUNKMEM_LANES_INLINE void store_lanes(uint32_t* to, Words value) { __builtin_memcpy(to, &value, sizeof value); }
CHUNKMEM_LANES_INLINE void store_lanes(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof value); }
#if defined(__AVX512F__)
CHUNKMEM_LANES_INLINE Words load_lanes(const uint8_t* from) {
  return reinterpret_cast<Words>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
CHUNKMEM_LANES_INLINE Words load_lanes(const uint16_t* from) {
  return reinterpret_cast<Words>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
// Of numbers below 256.
CHUNKMEM_LANES_INLINE void store_bytes(uint8_t* to, Words a, Words b, Words c, Words d) {
  const __m512i ab = _mm512_packus_epi32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b));
  const __m512i cd = _mm512_packus_epi32(reinterpret_cast<__m512i>(c), reinterpret_cast<__m512i>(d));
  const Words order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(reinterpret_cast<__m512i>(order), _mm512_packus_epi16(ab, cd)));
}
CHUNKMEM_LANES_INLINE void store_upper_halves(uint16_t* to, Words a, Words b) {
  typedef uint16_t Halves __attribute__((vector_size(64)));
  const Halves odd = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(odd),
                                                       reinterpret_cast<__m512i>(b)));
}
#else
CHUNKMEM_LANES_INLINE Words load_lanes(const uint8_t* from) {
  return reinterpret_cast<Words>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
CHUNKMEM_LANES_INLINE Words load_lanes(const uint16_t* from) {
  return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
CHUNKMEM_LANES_INLINE void store_bytes(uint8_t* to, Words a, Words b, Words c, Words d) {
  const __m256i ab = _mm256_packus_epi32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b));
  const __m256i cd = _mm256_packus_epi32(reinterpret_cast<__m256i>(c), reinterpret_cast<__m256i>(d));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order));
}
CHUNKMEM_LANES_INLINE void store_upper_halves(uint16_t* to, Words a, Words b) {
  const __m256i packed = _mm256_packus_epi32(reinterpret_cast<__m256i>(a >> 16), reinterpret_cast<__m256i>(b >> 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}
#endif

}  // namespace chunkmem
#endif
