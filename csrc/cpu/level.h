// What one instruction set offers, and what it is given.
#pragma once
#include "../adam_math.h"
#include "../block_math.h"

namespace chunkmem {

enum class Dtype { kNone, kFloat, kBFloat16, kHalf };

// Where gradients are converted or results rounded: so few that the loads of the next tile start meanwhile.
constexpr int64_t kTile = 256;

// Otherwise a tile is longer: each one starts with a pause, out of place in the stores past the caches.
constexpr int64_t kTileLong = 1024;

// At most kTile elements of one tensor, or kTileLong.
struct AdamTile {
  const float* param;
  const void* grad;
  const float* exp_avg;
  const float* exp_avg_sq;
  float* out_param;  // this and the next two are the same memory as above if the call is in place
  float* out_exp_avg;
  float* out_exp_avg_sq;
  uint16_t* lowp_out;  // null if there is none
  int64_t numel;
  int64_t num_main;
  Dtype grad_type;
  Dtype out_type;
  bool in_place;
  bool past_caches;  // writes what is not read again soon: all outputs but those in place
  const AdamScalars* scalars;
};

// Blocks of kCodeBlock elements, one after the other, of a tensor whose states are in 8 bits or whose weights are rounded
// stochastically. What is written may be the same memory as what is read.
struct BlockRun {
  const void* param;  // this and all that follow: of the whole tensor
  const void* grad;
  const void* exp_avg;  // codes, or fp32 where there are no scales
  const void* exp_avg_sq;
  const float* exp_avg_scales;  // one a block; null: states are in fp32
  const float* exp_avg_sq_scales;
  void* out_param;
  void* out_exp_avg;
  void* out_exp_avg_sq;
  float* out_exp_avg_scales;
  float* out_exp_avg_sq_scales;
  uint16_t* lowp_out;  // null if there is none
  int64_t numel;
  int64_t num_main;
  int64_t first;  // blocks [first, last) are updated
  int64_t last;
  uint64_t key;  // of random bits
  Dtype param_type;
  Dtype grad_type;
  Dtype out_type;
  bool past_caches;  // writes `lowp_out`, which is not read again soon
  const AdamScalars* scalars;
};

struct Level {
  void (*adam)(const AdamTile& tile);
  void (*adam_blocks)(const BlockRun& run);
  // Of exactly kNormBlock elements.
  double (*sum_squares)(const void* block, Dtype dtype, float unscale);
};

extern const Level baseline;
#if defined(__x86_64__)
extern const Level avx2;
extern const Level avx512;
#endif

}  // namespace chunkmem
