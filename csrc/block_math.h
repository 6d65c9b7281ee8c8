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

// `dither`: kNearest, or from random bits.
template <bool kSigned>
CHUNKMEM_INLINE uint8_t encode(float x, const Scale& scale, uint32_t dither) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const float c = float_of(Codes<kSigned>::offset << kCodeShift);
  const float ratio = float_of(magnitude) * scale.shrink * scale.inverse;
  const float r = ratio < 1.0f - 0x1p-22f ? ratio : 1.0f;  // the largest element is off by its inverse
  const uint32_t t = bits_of(fused_multiply_add(r, 1.0f - c, c));
  const uint32_t code = ((t + dither) >> kCodeShift) - Codes<kSigned>::offset;
  if (kSigned) {
    return uint8_t(code | ((bits >> 24) & 0x80u));
  }
  return uint8_t(code == 0u && magnitude != 0u ? 1u : code);
}

template <bool kSigned>
CHUNKMEM_INLINE float decode(uint8_t code, float scale) {
  const uint32_t magnitude = kSigned ? code & 0x7fu : code;
  const float c = float_of(Codes<kSigned>::offset << kCodeShift);
  const float t = float_of((magnitude + Codes<kSigned>::offset) << kCodeShift);
  const float x = (t - c) * (1.0f / (1.0f - c)) * scale;  // of the top code exactly 1, times the scale
  return kSigned ? float_of(bits_of(x) ^ (uint32_t(code & 0x80u) << 24)) : x;
}

// 64 bits for a block of elements, from the key of a tensor's update.
CHUNKMEM_INLINE uint64_t block_key(uint64_t key, uint64_t block) {
  uint64_t x = key + (block + 1u) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// 32 bits for an element of a block.
CHUNKMEM_INLINE uint32_t random_bits(uint64_t key, uint32_t index) {
  uint32_t x = index + uint32_t(key);
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ uint32_t(key >> 32) ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// 15 random bits for the 19 that are cut off. What is up to 7 units in the last place off a code goes to that one, as
// everything does that was decoded.
CHUNKMEM_INLINE uint32_t code_dither(uint32_t random) { return ((random & 0x7fffu) << (kCodeShift - 15)) + 8u; }

// Rounds stochastically by 16 random bits.
CHUNKMEM_INLINE uint16_t to_bfloat16(float x, uint32_t random) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = magnitude < 0x7f800000u ? bits + (random & 0xffffu) : bits;
  return uint16_t((magnitude > 0x7f800000u ? 0x7fc00000u : rounded) >> 16);
}

}  // namespace chunkmem
