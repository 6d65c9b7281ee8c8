// The operators on the CPU: tiles of all tensors, over several threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../arguments.h"
#include "choose.h"
#include "threads.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace chunkmem {
namespace {

// The first tile of a tensor is shorter by as many elements as its rounded output, or if it has none its parameter,
// lies behind a boundary of 32 elements: the others then begin on lines of the cache.
int64_t skew_of(const Segment& segment) {
  const uintptr_t index = segment.lowp_out ? reinterpret_cast<uintptr_t>(segment.lowp_out) / sizeof(uint16_t)
                                           : reinterpret_cast<uintptr_t>(segment.out_param) / sizeof(float);
  return int64_t(index % 32);
}

int64_t tile_numel(const AdamCall& call) {
  const bool converts = call.grad_type != ScalarType::Float || call.out_type != ScalarType::Undefined;
  return call.in_place && converts ? kTile : kTileLong;
}

int64_t num_tiles(const AdamCall& call, const Segment& segment) {
  const int64_t size = tile_numel(call);
  return segment.numel ? (segment.numel + skew_of(segment) + size - 1) / size : 0;
}

AdamTile make_tile(const AdamCall& call, const Segment& segment, int64_t index) {
  const int64_t skew = skew_of(segment), size = tile_numel(call);
  const int64_t begin = std::max<int64_t>(0, index * size - skew);
  const int64_t numel = std::min((index + 1) * size - skew, segment.numel) - begin;
  const int64_t grad_nbytes = call.grad_type == ScalarType::Float ? 4 : 2;
  return {segment.param + begin,
          static_cast<const char*>(segment.grad) + begin * grad_nbytes,
          segment.exp_avg + begin,
          segment.exp_avg_sq + begin,
          segment.out_param + begin,
          segment.out_exp_avg + begin,
          segment.out_exp_avg_sq + begin,
          segment.lowp_out ? segment.lowp_out + begin : nullptr,
          numel,
          std::clamp<int64_t>(segment.num_main - begin, 0, numel),
          dtype_of(call.grad_type),
          dtype_of(call.out_type),
          call.in_place,
          false,
          &segment.scalars};
}

void run_adam(const AdamCall& call, int64_t num_threads, const Level& level) {
  std::vector<int64_t> ends;  // tiles up to and with each tensor
  int64_t total = 0, numel = 0;
  for (const Segment& segment : call.segments) {
    ends.push_back(total += num_tiles(call, segment));
    numel += segment.numel;
  }
  const bool past_caches = numel >= kPastCachesNumel;
  for_pieces(total, kGrain / tile_numel(call), num_threads, [&](int64_t begin, int64_t end) {
    size_t at = size_t(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (int64_t index = begin; index < end; ++index) {
      while (ends[at] <= index) ++at;
      AdamTile tile = make_tile(call, call.segments[at], index - (at ? ends[at - 1] : 0));
      tile.past_caches = past_caches;
      level.adam(tile);
    }
#if defined(__SSE2__)
    if (past_caches) _mm_sfence();
#endif
  });
}

// Copies elements [begin, begin + kNormBlock) of the tensors, end to end, to `block`; zeros behind the last one.
void gather_block(const Tensors& grads, const std::vector<int64_t>& ends, size_t at, int64_t begin, char* block) {
  const int64_t nbytes = int64_t(grads[0].element_size());
  int64_t filled = 0;
  for (; at < grads.size() && filled < kNormBlock; ++at) {
    const int64_t skipped = begin + filled - (ends[at] - grads[at].numel());
    const int64_t count = std::min(grads[at].numel() - skipped, kNormBlock - filled);
    if (count > 0) {
      std::memcpy(block + filled * nbytes, static_cast<const char*>(grads[at].const_data_ptr()) + skipped * nbytes,
                  size_t(count * nbytes));
      filled += count;
    }
  }
  std::memset(block + filled * nbytes, 0, size_t((kNormBlock - filled) * nbytes));
}

std::vector<double> sums_of_blocks(const Tensors& grads, float unscale, int64_t num_threads, const Level& level) {
  std::vector<int64_t> ends;
  int64_t total = 0;
  for (const Tensor& grad : grads) ends.push_back(total += grad.numel());
  std::vector<double> sums(size_t((total + kNormBlock - 1) / kNormBlock));
  const Dtype dtype = dtype_of(grads[0].scalar_type());
  const int64_t nbytes = int64_t(grads[0].element_size());
  for_pieces(int64_t(sums.size()), kGrain / kNormBlock, num_threads, [&](int64_t first, int64_t last) {
    alignas(64) char gathered[kNormBlock * sizeof(float)];
    size_t at = size_t(std::upper_bound(ends.begin(), ends.end(), first * kNormBlock) - ends.begin());
    for (int64_t index = first; index < last; ++index) {
      const int64_t begin = index * kNormBlock;
      while (ends[at] <= begin) ++at;
      const void* block = gathered;
      if (begin + kNormBlock <= ends[at]) {
        const int64_t offset = begin - (ends[at] - grads[at].numel());
        block = static_cast<const char*>(grads[at].const_data_ptr()) + offset * nbytes;
      } else {
        gather_block(grads, ends, at, begin, gathered);
      }
      sums[size_t(index)] = level.sum_squares(block, dtype, unscale);
    }
  });
  return sums;
}

// [Note: Order of the norm] The levels above the first.
std::vector<double> next_level(const std::vector<double>& values) {
  std::vector<double> sums;
  for (size_t begin = 0; begin < values.size(); begin += kNormBlock) {
    double lanes[kNormLanes] = {};
    for (size_t i = begin; i < std::min(values.size(), begin + kNormBlock); ++i) {
      lanes[(i - begin) % kNormLanes] += values[i];
    }
    sums.push_back(fold_lanes(lanes));
  }
  return sums;
}

Tensor norm_of(const Tensors& grads, double unscale, int64_t num_threads, const Level& level) {
  check_tensors("grads", grads, grads[0], true, true);
  check_num_threads(num_threads);
  std::vector<double> sums = sums_of_blocks(grads, float(unscale), num_threads, level);
  while (sums.size() > 1) sums = next_level(sums);
  const double sum = sums.empty() ? 0.0 : sums[0];
  Tensor result = torch::stable::empty({2}, ScalarType::Double);
  double* values = result.mutable_data_ptr<double>();
  values[0] = sum;
  values[1] = std::isfinite(sum) ? 1.0 : 0.0;  // squares of floats cannot overflow a double
  return result;
}

Tensor norm_and_finite_at(Tensors grads, double unscale, int64_t level) {
  return norm_of(grads, unscale, 0, level_at(level));
}

Tensor norm_and_finite(Tensors grads, double unscale, int64_t num_threads) {
  return norm_of(grads, unscale, num_threads, level_at(best_level()));
}

void adamw_at_(CHUNKMEM_ADAM_PARAMETERS, int64_t level) {
  const Level& chosen = level_at(level);
  run_adam(make_adam_call(CHUNKMEM_ADAM_GIVEN), 0, chosen);
}

void adamw_(CHUNKMEM_ADAM_PARAMETERS) { run_adam(make_adam_call(CHUNKMEM_ADAM_GIVEN), 0, level_at(best_level())); }

void run_into(const AdamArguments& given, const Outputs& outputs, int64_t num_threads, const Level& level) {
  check_num_threads(num_threads);
  run_adam(make_adam_call(given, &outputs), num_threads, level);
}

void adamw_into_at(CHUNKMEM_ADAM_PARAMETERS, Tensors out_params, Tensors out_exp_avgs, Tensors out_exp_avg_sqs,
                   int64_t num_threads, int64_t level) {
  run_into(CHUNKMEM_ADAM_GIVEN, {out_params, out_exp_avgs, out_exp_avg_sqs}, num_threads, level_at(level));
}

void adamw_into(CHUNKMEM_ADAM_PARAMETERS, Tensors out_params, Tensors out_exp_avgs, Tensors out_exp_avg_sqs,
                int64_t num_threads) {
  run_into(CHUNKMEM_ADAM_GIVEN, {out_params, out_exp_avgs, out_exp_avg_sqs}, num_threads, level_at(best_level()));
}

}  // namespace
}  // namespace chunkmem

STABLE_TORCH_LIBRARY_IMPL(chunkmem, CPU, m) {
  m.impl("adamw_", TORCH_BOX(&chunkmem::adamw_));
  m.impl("adamw_into", TORCH_BOX(&chunkmem::adamw_into));
  m.impl("norm_and_finite", TORCH_BOX(&chunkmem::norm_and_finite));
  m.impl("_adamw_at_", TORCH_BOX(&chunkmem::adamw_at_));
  m.impl("_adamw_into_at", TORCH_BOX(&chunkmem::adamw_into_at));
  m.impl("_norm_and_finite_at", TORCH_BOX(&chunkmem::norm_and_finite_at));
}

STABLE_TORCH_LIBRARY_IMPL(chunkmem, CompositeExplicitAutograd, m) {
  m.impl("_best_level", TORCH_BOX(&chunkmem::best_level));
}
