// The update of whole blocks of 8-bit states, a vector of elements at a time. Part of blocks.h, at levels that have
// vectors (lanes.h).
//
// [Note: One block ahead] What a block is encoded by depends on all of its elements: on its largest one, through a
// division. So a block is updated while the one before it is encoded; neither waits for the other.

// A block that is updated and not encoded yet.
struct Updated {
  alignas(64) float exp_avg[kCodeBlock];
  alignas(64) float exp_avg_sq[kCodeBlock];
  alignas(64) uint16_t lowp[kCodeBlock];  // of what is stored past the caches
  Words most_exp_avg;                     // the largest magnitudes in each lane, as bits
  Words most_exp_avg_sq;
};

CHUNKMEM_INLINE Floats load_floats(const float* from) { return load_lanes(from); }
CHUNKMEM_INLINE Floats load_floats(const uint16_t* from) { return float_of(load_lanes(from) << 16); }

// What is known when it is compiled, so that the loops have no branches.
template <typename Param, typename Grad, bool kHasLowp, bool kIsPlain>
struct Kind {
  using P = Param;  // float, or bfloat16 as bits: without masters, and rounded stochastically
  using G = Grad;
  static constexpr bool has_lowp = kHasLowp, has_master = sizeof(P) == sizeof(float), is_plain = kIsPlain;
};

template <typename K>
CHUNKMEM_INLINE void update_whole_block(const BlockRun& run, const AdamScalars& s, const typename K::G* grad,
                                        int64_t block, uint16_t* lowp, Updated& to) {
  const int64_t begin = block * kCodeBlock;
  const auto* param = static_cast<const typename K::P*>(run.param) + begin;
  auto* out_param = static_cast<typename K::P*>(run.out_param) + begin;
  const uint8_t* exp_avg = static_cast<const uint8_t*>(run.exp_avg) + begin;
  const uint8_t* exp_avg_sq = static_cast<const uint8_t*>(run.exp_avg_sq) + begin;
  const float scale = run.exp_avg_scales[block], scale_sq = run.exp_avg_sq_scales[block];
  const uint64_t key = K::has_master ? 0 : block_key(block_key(run.key, uint64_t(block)), 0);
  Words most{}, most_sq{}, index = lane_numbers();
  for (int64_t begin_pair = 0; begin_pair < kCodeBlock; begin_pair += 2 * CHUNKMEM_LANES) {
    Words rounded[2];
#pragma GCC unroll 2
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t i = begin_pair + half * CHUNKMEM_LANES;
      Floats p = load_floats(param + i);
      Floats m = decode<true>(load_lanes(exp_avg + i), scale), v = decode<false>(load_lanes(exp_avg_sq + i), scale_sq);
      adam_update<false>(load_floats(grad + i), p, m, v, s);
      store_lanes(to.exp_avg + i, m);
      store_lanes(to.exp_avg_sq + i, v);
      most = greater(most, bits_of(m) & 0x7fffffffu);
      most_sq = greater(most_sq, bits_of(v) & 0x7fffffffu);
      if constexpr (K::has_master) {
        store_lanes(out_param + i, p);
        if constexpr (K::has_lowp) rounded[half] = nearest_bfloat16(p);
      } else {
        rounded[half] = stochastic_bfloat16(p, random_bits(key, index));
        index += CHUNKMEM_LANES;
      }
    }
    if constexpr (!K::has_master) {
      store_upper_halves(out_param + begin_pair, rounded[0], rounded[1]);
    } else if constexpr (K::has_lowp) {
      store_upper_halves(lowp + begin_pair, rounded[0], rounded[1]);
    }
  }
  to.most_exp_avg = most;
  to.most_exp_avg_sq = most_sq;
}

CHUNKMEM_INLINE void encode_whole_block(const BlockRun& run, const Updated& from, int64_t block) {
  const Scale scale = make_scale(largest_lane(from.most_exp_avg));
  const Scale scale_sq = make_scale(largest_lane(from.most_exp_avg_sq));
  run.out_exp_avg_scales[block] = scale.value;
  run.out_exp_avg_sq_scales[block] = scale_sq.value;
  uint8_t* exp_avg = static_cast<uint8_t*>(run.out_exp_avg) + block * kCodeBlock;
  uint8_t* exp_avg_sq = static_cast<uint8_t*>(run.out_exp_avg_sq) + block * kCodeBlock;
  const uint64_t key = block_key(run.key, uint64_t(block));
  Words index = lane_numbers();
  for (int64_t i = 0; i < kCodeBlock; i += CHUNKMEM_LANES, index += CHUNKMEM_LANES) {
    const Words random = random_bits(key, index);
    store_lanes(exp_avg + i, encode<true>(load_lanes(from.exp_avg + i), scale, code_dither<true>(random)));
    store_lanes(exp_avg_sq + i, encode<false>(load_lanes(from.exp_avg_sq + i), scale_sq, code_dither<false>(random)));
  }
}

// Blocks [run.first, last).
template <typename K>
void update_whole_blocks(const BlockRun& run, int64_t last) {
  using G = typename K::G;
  Updated updated[2];
  alignas(64) float converted[kCodeBlock];
  AdamScalars s = *run.scalars;
  if (K::is_plain) {
    s.has_l2 = false;
    s.from_exp_avg = true;
  }
  const bool past_caches = run.past_caches && run.lowp_out && on_a_line(run.lowp_out);
  const bool to_half = run.out_type == Dtype::kHalf;
  for (int64_t block = run.first; block <= last; ++block) {
    const int64_t begin = block * kCodeBlock;
    if (block < last) {
      Updated& to = updated[block % 2];
      const G* grad = static_cast<const G*>(run.grad) + begin;
      if (sizeof(G) == 4 && run.grad_type == Dtype::kHalf) {
        to_float(static_cast<const uint16_t*>(run.grad) + begin, Dtype::kHalf, converted, kCodeBlock);
        grad = reinterpret_cast<const G*>(converted);
      }
      uint16_t* lowp = !run.lowp_out ? nullptr : past_caches ? to.lowp : run.lowp_out + begin;
      update_whole_block<K>(run, s, grad, block, lowp, to);
      if (to_half) round_nearest(static_cast<float*>(run.out_param) + begin, lowp, kCodeBlock, Dtype::kHalf);
    }
    if (block > run.first) {
      const Updated& from = updated[(block - 1) % 2];
      encode_whole_block(run, from, block - 1);
      if (past_caches) store_lines_past_caches(run.lowp_out + begin - kCodeBlock, from.lowp, kCodeBlock);
    }
  }
}

template <typename P, typename G, bool kHasLowp>
void update_whole_blocks_of(const BlockRun& run, int64_t last) {
  const bool is_plain = !run.scalars->has_l2 && run.scalars->from_exp_avg;
  is_plain ? update_whole_blocks<Kind<P, G, kHasLowp, true>>(run, last)
           : update_whole_blocks<Kind<P, G, kHasLowp, false>>(run, last);
}

template <typename G>
void update_whole_blocks_of(const BlockRun& run, int64_t last) {
  if (run.param_type != Dtype::kFloat) {
    update_whole_blocks_of<uint16_t, G, false>(run, last);
  } else if (run.out_type == Dtype::kBFloat16) {
    update_whole_blocks_of<float, G, true>(run, last);
  } else {
    update_whole_blocks_of<float, G, false>(run, last);
  }
}

// Updates the whole blocks that a run begins with; returns the first one that is left.
int64_t update_whole_blocks(const BlockRun& run) {
  const int64_t num_whole = run.num_main / kCodeBlock, last = num_whole < run.last ? num_whole : run.last;
  const bool rounds_twice = run.param_type != Dtype::kFloat && run.lowp_out;
  if (!run.exp_avg_scales || rounds_twice || last <= run.first) return run.first;
  run.grad_type == Dtype::kBFloat16 ? update_whole_blocks_of<uint16_t>(run, last)
                                    : update_whole_blocks_of<float>(run, last);
  return last;
}
