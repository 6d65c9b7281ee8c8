// The arithmetic of states in 8 bits and of stochastic rounding, element by element; [Note: The same bits] in
// adam_math.h holds here, too.
//
// [Note: Codes] A block is 256 elements of a tensor in the order of memory, the last one may be shorter. It has a
// scale, the largest magnitude in it, and a code of 8 bits for each element: r = |x| / scale, moved to t = r + c * (1 -
// r) with a small c, as a float of 4 mantissa bits. So steps are 1/32 to 1/16 of a value, down to c, and of one size
// below. 0 and 1 have a code each: the largest element is exact, and what was decoded is encoded to the same code.
//
//   code of m: sign, 7 bits   c = 17/16 * 2^-8    1 is 127   smallest 2^-12
//   code of v: 8 bits         c = 17/16 * 2^-16   1 is 255   smallest 2^-20
//
// A v above 0 has a code above 0: else m / (sqrt(v) + eps) would be m / eps. A scale that is no finite number becomes
// NaN, and with it the block: a block of infinities would update by 0 from then on.
//
// [Note: Stochastic rounding] Updates round up with the probability of what is cut off. The random bits are a hash of
// (key, index), where the key is of seed, parameter and update: the same wherever, and by however many threads, it is
// done.
#pragma once
#include "adam_math.h"

namespace chunkmem {

constexpr int64_t kCodeBlock = 256;
constexpr int kCodeShift = 19;                    // of float bits: 4 mantissa bits stay
constexpr uint32_t kOneCode = 0x3f800000u >> kCodeShift;
constexpr uint32_t kNearest = 1u << (kCodeShift - 1);  // added before the shift, rounds to nearest
constexpr float kLeastScale = 0x1p-80f;           // of a block that is not 0: all that is decoded is exact and normal

template <bool kSigned>
struct Codes {
  static constexpr uint32_t top = kSigned ? 127u : 255u;
  static constexpr uint32_t offset = kOneCode - top;
};

// By what the elements of a block are multiplied, one after the other, before they are encoded.
struct Scale {
  float value;
  float shrink;
  float inverse;
};

// Of the largest magnitude in a block, as bits, which order floats as numbers do, and NaN after infinity.
CHUNKMEM_INLINE Scale make_scale(uint32_t max_bits) {
  const float most = float_of(max_bits);
  const float normal = most < kLeastScale ? kLeastScale : most;
  const float finite = max_bits == 0u ? 0.0f : normal;
  Scale scale;
  scale.value = max_bits >= 0x7f800000u ? float_of(0x7fc00000u) : finite;
  scale.shrink = normal > 0x1p64f ? 0x1p-64f : 1.0f;
  scale.inverse = 1.0f / (normal * scale.shrink);
  return scale;
}

// `dither`: kNearest, or from random bits. A code of 8 bits, the others are 0. `kShrinks`: `scale.shrink` may not be 1.
template <bool kSigned, bool kShrinks = true, typename F, typename U>
CHUNKMEM_INLINE U encode(F x, const Scale& scale, U dither) {
  const U bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const float c = float_of(Codes<kSigned>::offset << kCodeShift);
  // The largest element may be off by its inverse; what is that close to 1 has the top code anyway.
  const F shrunk = kShrinks ? float_of(magnitude) * scale.shrink : float_of(magnitude);
  const F r = lesser(shrunk * scale.inverse, 1.0f);
  const U t = bits_of(fused_multiply_add(r, 1.0f - c, c));
  const U code = (t - (Codes<kSigned>::offset << kCodeShift) + dither) >> kCodeShift;
  return kSigned ? code | ((bits >> 24) & 0x80u) : greater(code, lesser(magnitude, 1u));
}

template <bool kSigned, typename U>
CHUNKMEM_INLINE auto decode(U code, float scale) {
  const U magnitude = kSigned ? code & 0x7fu : code;
  const float c = float_of(Codes<kSigned>::offset << kCodeShift);
  const auto t = float_of((magnitude + Codes<kSigned>::offset) << kCodeShift);
  const auto x = (t - c) * (1.0f / (1.0f - c)) * scale;  // of the top code exactly 1, times the scale
  return kSigned ? float_of(bits_of(x) ^ ((code << 24) & 0x80000000u)) : x;
}

// 64 bits for a block of elements, from the key of a tensor's update.
CHUNKMEM_INLINE uint64_t block_key(uint64_t key, uint64_t block) {
  uint64_t x = key + (block + 1u) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// 32 bits for an element of a block.
template <typename U>
CHUNKMEM_INLINE U random_bits(uint64_t key, U index) {
  U x = index + uint32_t(key);
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ uint32_t(key >> 32) ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Of a weight; two elements, half a block apart, have the halves of one word.
CHUNKMEM_INLINE uint32_t random_bits_of_weight(uint64_t key, uint32_t index) {
  constexpr uint32_t kHalf = uint32_t(kCodeBlock) / 2;
  return random_bits(key, index % kHalf) >> (index < kHalf ? 0 : 16);
}

// 15 random bits, of the lower half for m and of the upper for v, for the 19 that are cut off. What is up to 7 units in
// the last place off a code goes to that one, as everything does that was decoded.
template <bool kSigned, typename U>
CHUNKMEM_INLINE U code_dither(U random) {
  constexpr int kUp = kCodeShift - 15;
  return ((kSigned ? random << kUp : random >> (16 - kUp)) & (0x7fffu << kUp)) + 8u;
}

// Rounds stochastically by 16 random bits: the upper half of the result.
template <typename F, typename U>
CHUNKMEM_INLINE U stochastic_bfloat16(F x, U random) {
  const U rounded = bits_of(x) + (random & 0xffffu);
  return x != x ? (rounded & 0u) + 0x7fc00000u : rounded;
}

CHUNKMEM_INLINE uint16_t to_bfloat16(float x, uint32_t random) {
  return uint16_t(stochastic_bfloat16(x, random) >> 16);
}

}  // namespace chunkmem
