// The arithmetic of every back end, element by element, or on the CPU a vector of elements at a time: F is float or
// Floats, U uint32_t or Words (cpu/lanes.h).
//
// [Note: The same bits] Each line is one IEEE operation in an order that never changes: a fused multiply-add is written
// as one, and nothing else may become one (-ffp-contract=off, nvcc --fmad=false; division and square root exactly
// rounded, denormals kept). So loops over it give the same bits at any vector width, on any back end, for any cut.
// Only what a NaN's payload is stays open.
//
// The order is the one in which torch's fused CPU kernel on x86 works, as its compiler contracted
// it. That was done in one way in its vector loop and in another in the scalar loop over the last numel % 8 elements of
// a tensor: fma(weight * g, g, beta2 * v) there, fma(v, beta2, (weight * g) * g) here. `kTail` is the latter.
//
// [Note: torch's order on CUDA] torch's fused CUDA kernel works in another order, with other roundings of the scalars.
// `kCuda` is that order, so that fp32 weights have the same bits whether they are updated on the device or on HOST. It
// needs the powers of beta1 and beta2 as the device makes them: its powf is not exactly rounded. Source: torch 2.11,
// ATen/native/cuda/fused_adam_utils.cuh, where nvcc contracts what is written as `param -= lr * weight_decay * param`
// and `grad += param * weight_decay`.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(CHUNKMEM_LEVEL)
#include "cpu/lanes.h"  // before the templates, which otherwise would not find what is made for vectors
#endif

#if defined(__CUDACC__)
#define CHUNKMEM_INLINE static __host__ __device__ __forceinline__
#else
#define CHUNKMEM_INLINE static inline __attribute__((always_inline))
#endif

namespace chunkmem {

enum class Order { kVector, kTail, kCuda };

// What is the same for all elements of a tensor; made once on the host (arguments.h).
struct AdamScalars {
  float grad_scale;
  float decay;  // of the parameter: 1 - lr * weight_decay if decoupled, else 1; in the order of CUDA that less 1
  float l2;     // weight decay that is added to the gradient
  float lerp;   // of exp_avg towards the gradient: 1 - beta1 from exp_avg, or -beta1 from the gradient, as on CUDA
  float beta2;
  float grad_sq_weight;
  float bias_correction2_sqrt;
  float eps;
  float neg_step_size;
  bool has_l2;
  bool from_exp_avg;
  bool has_decay;
  bool is_cuda_order;
};

CHUNKMEM_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

CHUNKMEM_INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// `b` where they do not compare.
CHUNKMEM_INLINE float lesser(float a, float b) { return a < b ? a : b; }
CHUNKMEM_INLINE uint32_t lesser(uint32_t a, uint32_t b) { return a < b ? a : b; }
CHUNKMEM_INLINE uint32_t greater(uint32_t a, uint32_t b) { return a > b ? a : b; }

CHUNKMEM_INLINE float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

CHUNKMEM_INLINE float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

template <Order kOrder, typename F>
CHUNKMEM_INLINE void adam_moments(F grad, F param, F& exp_avg, F& exp_avg_sq, const AdamScalars& s) {
  F g = grad * s.grad_scale;
  const F regularized = fused_multiply_add(param, s.l2, g);
  g = s.has_l2 ? regularized : g;
  if (kOrder == Order::kCuda) {
    const F square = g * g;
    exp_avg = fused_multiply_add(-s.lerp, exp_avg, fused_multiply_add(s.lerp, g, g));
    exp_avg_sq = fused_multiply_add(s.beta2, exp_avg_sq, fused_multiply_add(-s.beta2, square, square));
    return;
  }
  exp_avg = fused_multiply_add(s.lerp, g - exp_avg, s.from_exp_avg ? exp_avg : g);
  const F weighted = s.grad_sq_weight * g;
  exp_avg_sq = kOrder == Order::kTail ? fused_multiply_add(exp_avg_sq, s.beta2, weighted * g)
                                      : fused_multiply_add(weighted, g, exp_avg_sq * s.beta2);
}

template <Order kOrder, typename F>
CHUNKMEM_INLINE F adam_param(F param, F exp_avg, F exp_avg_sq, const AdamScalars& s) {
  const F denominator = square_root(exp_avg_sq) / s.bias_correction2_sqrt + s.eps;
  const F shrunk = fused_multiply_add(s.decay, param, param);
  const F decayed = kOrder != Order::kCuda ? param * s.decay : s.has_decay ? shrunk : param;
  return decayed + s.neg_step_size * exp_avg / denominator;
}

template <Order kOrder>
CHUNKMEM_INLINE void adam_update(float grad, float& param, float& exp_avg, float& exp_avg_sq, const AdamScalars& s) {
  adam_moments<kOrder>(grad, param, exp_avg, exp_avg_sq, s);
  param = adam_param<kOrder>(param, exp_avg, exp_avg_sq, s);
}

// Conversions, in integers: the same everywhere, and every compiler makes vectors of them.

CHUNKMEM_INLINE float from_bfloat16(uint16_t x) { return float_of(uint32_t(x) << 16); }

CHUNKMEM_INLINE float from_half(uint16_t x) {
  const uint32_t magnitude = x & 0x7fffu;
  const float denormal = float(int32_t(magnitude)) * 0x1p-24f;
  const uint32_t rebiased = (magnitude << 13) + (magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u);
  const uint32_t unsigned_bits = magnitude < 0x0400u ? bits_of(denormal) : rebiased;
  return float_of(unsigned_bits | (uint32_t(x & 0x8000u) << 16));
}

// To nearest even: the upper half of the result. Rounding leaves an infinity what it is.
template <typename F>
CHUNKMEM_INLINE auto nearest_bfloat16(F x) {
  const auto bits = bits_of(x);
  const auto rounded = bits + (((bits >> 16) & 1u) + 0x7fffu);
  return x != x ? (bits & 0u) + 0x7fc00000u : rounded;
}

CHUNKMEM_INLINE uint16_t to_bfloat16(float x) { return uint16_t(nearest_bfloat16(x) >> 16); }

CHUNKMEM_INLINE uint16_t to_half(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // The last bit of 0.5f weighs 2^-24, as that of a float16 denormal: adding rounds to it.
  const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t small = magnitude < 0x38800000u ? denormal : normal;
  return uint16_t((magnitude >= 0x47800000u ? large : small) | ((bits >> 16) & 0x8000u));
}

// [Note: Order of the norm] All gradients of a call, end to end, are cut into blocks of 2048. In a block, lane i takes
// elements i, i + 32, i + 64 ... in this order, in double, where a square is exact; then the lanes are folded in
// halves. The sums of blocks are elements of the next level, until one is left.
constexpr int kNormBlock = 2048;
constexpr int kNormLanes = 32;

CHUNKMEM_INLINE double fold_lanes(double* lanes) {
  for (int width = kNormLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) {
      lanes[lane] += lanes[lane + width];
    }
  }
  return lanes[0];
}

}  // namespace chunkmem
