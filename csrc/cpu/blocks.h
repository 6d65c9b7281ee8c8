// The loops over one block of 8-bit states, or of weights that are rounded stochastically. Part of tile.h: each
// function has a loop of its own that compilers make vectors of, over arrays that stay in the nearest cache.

void load_states(const void* from, const float* scale, bool is_signed, float* __restrict to, int64_t n) {
  if (!scale) {
    __builtin_memcpy(to, from, size_t(n) * sizeof *to);
    return;
  }
  const auto* codes = static_cast<const uint8_t*>(from);
  const float value = *scale;
  if (is_signed) {
    for (int64_t i = 0; i < n; ++i) to[i] = decode<true>(uint32_t(codes[i]), value);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = decode<false>(uint32_t(codes[i]), value);
  }
}

template <bool kSigned>
void store_states(const float* __restrict from, const uint32_t* __restrict random, void* to, float* scale, int64_t n) {
  if (!scale) {
    __builtin_memcpy(to, from, size_t(n) * sizeof *from);
    return;
  }
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(from[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  const Scale made = make_scale(most);
  *scale = made.value;
  auto* __restrict codes = static_cast<uint8_t*>(to);
  for (int64_t i = 0; i < n; ++i) {
    codes[i] = uint8_t(encode<kSigned>(from[i], made, code_dither<kSigned>(random[i])));
  }
}

void round_stochastically(const float* __restrict from, uint16_t* __restrict to, uint64_t key, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat16(from[i], random_bits_of_weight(key, uint32_t(i)));
}

const void* behind(const void* begin, int64_t nbytes) { return static_cast<const char*>(begin) + nbytes; }
void* behind(void* begin, int64_t nbytes) { return static_cast<char*>(begin) + nbytes; }

void adam_block(const BlockRun& run, int64_t block) {
  alignas(64) float param_tile[kCodeBlock], grad_tile[kCodeBlock], exp_avg[kCodeBlock], exp_avg_sq[kCodeBlock];
  alignas(64) uint32_t random[kCodeBlock];
  const bool has_codes = run.exp_avg_scales, in_fp32 = run.param_type == Dtype::kFloat;
  const int64_t begin = block * kCodeBlock, left = run.numel - begin, n = left < kCodeBlock ? left : kCodeBlock;
  const int64_t main_left = run.num_main - begin, main = main_left < 0 ? 0 : main_left < n ? main_left : n;
  const int64_t param_at = begin * nbytes_of(run.param_type), state_at = begin * (has_codes ? 1 : 4);
  const uint64_t key = block_key(run.key, uint64_t(block));
  const void *given_param = behind(run.param, param_at), *given_grad = behind(run.grad, begin * nbytes_of(run.grad_type));
  void* out_param = behind(run.out_param, param_at);
  const float* grad = static_cast<const float*>(given_grad);
  if (run.grad_type != Dtype::kFloat) {
    to_float(given_grad, run.grad_type, grad_tile, n);
    grad = grad_tile;
  }
  float* param = in_fp32 ? static_cast<float*>(out_param) : param_tile;
  if (!in_fp32) {
    to_float(given_param, run.param_type, param, n);
  } else if (given_param != out_param) {
    __builtin_memcpy(param, given_param, size_t(n) * sizeof *param);
  }
  load_states(behind(run.exp_avg, state_at), has_codes ? run.exp_avg_scales + block : nullptr, true, exp_avg, n);
  load_states(behind(run.exp_avg_sq, state_at), has_codes ? run.exp_avg_sq_scales + block : nullptr, false, exp_avg_sq,
              n);
  update<Order::kVector>(param, grad, exp_avg, exp_avg_sq, main, *run.scalars);
  update<Order::kTail>(param + main, grad + main, exp_avg + main, exp_avg_sq + main, n - main, *run.scalars);
  if (has_codes) {
    for (int64_t i = 0; i < n; ++i) random[i] = random_bits(key, uint32_t(i));
  }
  store_states<true>(exp_avg, random, behind(run.out_exp_avg, state_at),
                     has_codes ? run.out_exp_avg_scales + block : nullptr, n);
  store_states<false>(exp_avg_sq, random, behind(run.out_exp_avg_sq, state_at),
                      has_codes ? run.out_exp_avg_sq_scales + block : nullptr, n);
  if (!in_fp32) {
    round_stochastically(param, static_cast<uint16_t*>(out_param), block_key(key, 0), n);
  }
  if (run.lowp_out) {
    round_nearest(param, run.lowp_out + begin, n, run.out_type);
  }
}

#if defined(CHUNKMEM_LANES)
#include "whole_blocks.h"
#else
int64_t update_whole_blocks(const BlockRun& run) { return run.first; }
#endif

void adam_blocks(const BlockRun& run) {
  for (int64_t block = update_whole_blocks(run); block < run.last; ++block) adam_block(run, block);
}
