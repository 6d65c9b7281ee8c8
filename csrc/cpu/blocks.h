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
    for (int64_t i = 0; i < n; ++i) to[i] = decode<true>(codes[i], value);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = decode<false>(codes[i], value);
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
    codes[i] = encode<kSigned>(from[i], made, code_dither(kSigned ? random[i] : random[i] >> 16));
  }
}

void round_stochastically(const float* __restrict from, uint16_t* __restrict to, uint64_t key, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat16(from[i], random_bits(key, uint32_t(i)));
}

void adam_block(const BlockTile& tile) {
  alignas(64) float param_tile[kCodeBlock], grad_tile[kCodeBlock], exp_avg[kCodeBlock], exp_avg_sq[kCodeBlock];
  alignas(64) uint32_t random[kCodeBlock];
  const int64_t n = tile.numel, main = tile.num_main;
  const float* grad = static_cast<const float*>(tile.grad);
  if (tile.grad_type != Dtype::kFloat) {
    to_float(tile.grad, tile.grad_type, grad_tile, n);
    grad = grad_tile;
  }
  const bool in_fp32 = tile.param_type == Dtype::kFloat;
  float* param = in_fp32 ? static_cast<float*>(tile.out_param) : param_tile;
  if (!in_fp32) {
    to_float(tile.param, tile.param_type, param, n);
  } else if (tile.param != tile.out_param) {
    __builtin_memcpy(param, tile.param, size_t(n) * sizeof *param);
  }
  load_states(tile.exp_avg, tile.exp_avg_scale, true, exp_avg, n);
  load_states(tile.exp_avg_sq, tile.exp_avg_sq_scale, false, exp_avg_sq, n);
  update<false>(param, grad, exp_avg, exp_avg_sq, main, *tile.scalars);
  update<true>(param + main, grad + main, exp_avg + main, exp_avg_sq + main, n - main, *tile.scalars);
  if (tile.exp_avg_scale) {
    for (int64_t i = 0; i < n; ++i) random[i] = random_bits(tile.key, uint32_t(i));
  }
  store_states<true>(exp_avg, random, tile.out_exp_avg, tile.out_exp_avg_scale, n);
  store_states<false>(exp_avg_sq, random, tile.out_exp_avg_sq, tile.out_exp_avg_sq_scale, n);
  if (!in_fp32) {
    round_stochastically(param, static_cast<uint16_t*>(tile.out_param), block_key(tile.key, 0), n);
  }
  if (tile.lowp_out) {
    round_nearest(param, tile.lowp_out, n, tile.out_type);
  }
}
