// The update of whole blocks of 8-bit states, a vector of elements at a time. Part of blocks.h, at levels that have
// vectors (lanes.h).
//
// What a block is encoded by depends on all of its elements: on its largest one, through a
// division. So there are two loops, the moments and the rest, and the first one of a block comes before the second one
// of the block before. In the second one roots and divisions, which take long, run while codes are made, which does not
// wait for them.

// A block whose moments are updated, and nothing else.
struct Updated {
  alignas(64) float exp_avg[kCodeBlock];
  alignas(64) float exp_avg_sq[kCodeBlock];
  alignas(64) uint16_t lowp[kCodeBlock];        // what will be stored past the caches
  alignas(64) uint32_t random[kCodeBlock / 2];  // of weights without masters
  Words most_exp_avg;                           // the largest magnitudes in each lane, as bits
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
CHUNKMEM_INLINE void update_moments(const BlockRun& run, const AdamScalars& s, const typename K::G* grad, int64_t block,
                                    Updated& to) {
  const int64_t begin = block * kCodeBlock;
  const auto* param = static_cast<const typename K::P*>(run.param) + begin;
  const uint8_t* exp_avg = static_cast<const uint8_t*>(run.exp_avg) + begin;
  const uint8_t* exp_avg_sq = static_cast<const uint8_t*>(run.exp_avg_sq) + begin;
  const float scale = run.exp_avg_scales[block], scale_sq = run.exp_avg_sq_scales[block];
  Words most{}, most_sq{};
#pragma GCC unroll 2
  for (int64_t i = 0; i < kCodeBlock; i += CHUNKMEM_LANES) {
    Floats m = decode<true>(load_lanes(exp_avg + i), scale), v = decode<false>(load_lanes(exp_avg_sq + i), scale_sq);
    adam_moments<Order::kVector>(load_floats(grad + i), K::is_plain ? Floats{} : load_floats(param + i), m, v, s);
    store_lanes(to.exp_avg + i, m);
    store_lanes(to.exp_avg_sq + i, v);
    most = greater(most, bits_of(m) & 0x7fffffffu);
    most_sq = greater(most_sq, bits_of(v) & 0x7fffffffu);
  }
  to.most_exp_avg = most;
  to.most_exp_avg_sq = most_sq;
  if constexpr (!K::has_master) {
    const uint64_t key = block_key(block_key(run.key, uint64_t(block)), 0);
    Words index = lane_numbers();
    for (int64_t i = 0; i < kCodeBlock / 2; i += CHUNKMEM_LANES, index += CHUNKMEM_LANES) {
      store_lanes(to.random + i, random_bits(key, index));
    }
  }
}

// Where the results of a block go.
template <typename K>
struct Places {
  const typename K::P* param;
  typename K::P* out_param;
  uint16_t* lowp;
  uint8_t* exp_avg;
  uint8_t* exp_avg_sq;
};

// Stores 4 vectors of parameters from element `begin` of a block on.
template <typename K>
CHUNKMEM_INLINE void store_params(const Floats* p, const Updated& from, const Places<K>& to, int64_t begin) {
  Words rounded[4];
#pragma GCC unroll 4
  for (int64_t j = 0; j < 4; ++j) {
    const int64_t i = begin + j * CHUNKMEM_LANES;
    if constexpr (K::has_master) {
      store_lanes(to.out_param + i, p[j]);
      if constexpr (K::has_lowp) rounded[j] = nearest_bfloat16(p[j]);
    } else {
      const Words words = load_lanes(from.random + i % (kCodeBlock / 2));
      rounded[j] = stochastic_bfloat16(p[j], begin < kCodeBlock / 2 ? words : words >> 16);
    }
  }
  if constexpr (!K::has_master || K::has_lowp) {
    uint16_t* lowp = K::has_master ? to.lowp : reinterpret_cast<uint16_t*>(to.out_param);
    store_upper_halves(lowp + begin, rounded[0], rounded[1]);
    store_upper_halves(lowp + begin + 2 * CHUNKMEM_LANES, rounded[2], rounded[3]);
  }
}

template <typename K, bool kShrinks>
CHUNKMEM_INLINE void update_params(const AdamScalars& s, const Updated& from, const Scale scale, const Scale scale_sq,
                                   uint64_t key, const Places<K>& to) {
  Words index = lane_numbers();
  for (int64_t begin = 0; begin < kCodeBlock; begin += 4 * CHUNKMEM_LANES) {
    Words m_codes[4], v_codes[4];
    Floats p[4];
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j, index += CHUNKMEM_LANES) {
      const int64_t i = begin + j * CHUNKMEM_LANES;
      const Floats m = load_lanes(from.exp_avg + i), v = load_lanes(from.exp_avg_sq + i);
      p[j] = adam_param<Order::kVector>(load_floats(to.param + i), m, v, s);
      const Words random = random_bits(key, index);
      m_codes[j] = encode<true, kShrinks>(m, scale, code_dither<true>(random));
      v_codes[j] = encode<false, kShrinks>(v, scale_sq, code_dither<false>(random));
    }
    store_bytes(to.exp_avg + begin, m_codes[0], m_codes[1], m_codes[2], m_codes[3]);
    store_bytes(to.exp_avg_sq + begin, v_codes[0], v_codes[1], v_codes[2], v_codes[3]);
    store_params<K>(p, from, to, begin);
  }
}

template <typename K>
CHUNKMEM_INLINE void update_params(const BlockRun& run, const AdamScalars& s, const Updated& from, int64_t block,
                                   uint16_t* lowp) {
  const int64_t begin = block * kCodeBlock;
  const Scale scale = make_scale(largest_lane(from.most_exp_avg));
  const Scale scale_sq = make_scale(largest_lane(from.most_exp_avg_sq));
  run.out_exp_avg_scales[block] = scale.value;
  run.out_exp_avg_sq_scales[block] = scale_sq.value;
  const Places<K> to{static_cast<const typename K::P*>(run.param) + begin,
                     static_cast<typename K::P*>(run.out_param) + begin, lowp,
                     static_cast<uint8_t*>(run.out_exp_avg) + begin, static_cast<uint8_t*>(run.out_exp_avg_sq) + begin};
  const uint64_t key = block_key(run.key, uint64_t(block));
  if (scale.shrink == 1.0f && scale_sq.shrink == 1.0f) {
    update_params<K, false>(s, from, scale, scale_sq, key, to);
  } else {
    update_params<K, true>(s, from, scale, scale_sq, key, to);
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
    if (block < last) {
      const G* grad = static_cast<const G*>(run.grad) + block * kCodeBlock;
      if (sizeof(G) == 4 && run.grad_type == Dtype::kHalf) {
        to_float(static_cast<const uint16_t*>(run.grad) + block * kCodeBlock, Dtype::kHalf, converted, kCodeBlock);
        grad = reinterpret_cast<const G*>(converted);
      }
      update_moments<K>(run, s, grad, block, updated[block % 2]);
    }
    if (block > run.first) {
      Updated& from = updated[(block - 1) % 2];
      const int64_t begin = (block - 1) * kCodeBlock;
      uint16_t* lowp = !run.lowp_out ? nullptr : past_caches ? from.lowp : run.lowp_out + begin;
      update_params<K>(run, s, from, block - 1, lowp);
      if (to_half) round_nearest(static_cast<float*>(run.out_param) + begin, lowp, kCodeBlock, Dtype::kHalf);
      if (past_caches) store_lines_past_caches(run.lowp_out + begin, from.lowp, kCodeBlock);
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
