// The update by blocks on the CPU: blocks of all tensors, over several threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../block_arguments.h"
#include "choose.h"
#include "threads.h"

namespace chunkmem {
namespace {

int64_t itemsize_of(ScalarType type) { return type == ScalarType::Float ? 4 : 2; }

const void* behind(const void* begin, int64_t nbytes) { return static_cast<const char*>(begin) + nbytes; }
void* behind(void* begin, int64_t nbytes) { return static_cast<char*>(begin) + nbytes; }

BlockTile make_tile(const BlockCall& call, const BlockSegment& s, int64_t index) {
  const int64_t begin = index * kCodeBlock, numel = std::min(kCodeBlock, s.numel - begin);
  const int64_t param_at = begin * itemsize_of(call.param_type), state_at = begin * (call.has_codes ? 1 : 4);
  const int64_t scale_at = scales_begin(s.numel) + 4 * index;
  const auto scale = [&](auto* states) -> decltype(states) {
    return call.has_codes ? behind(states, scale_at) : nullptr;
  };
  return {behind(s.param, param_at),
          behind(s.grad, begin * itemsize_of(call.grad_type)),
          behind(s.exp_avg, state_at),
          behind(s.exp_avg_sq, state_at),
          static_cast<const float*>(scale(s.exp_avg)),
          static_cast<const float*>(scale(s.exp_avg_sq)),
          behind(s.out_param, param_at),
          behind(s.out_exp_avg, state_at),
          behind(s.out_exp_avg_sq, state_at),
          static_cast<float*>(scale(s.out_exp_avg)),
          static_cast<float*>(scale(s.out_exp_avg_sq)),
          s.lowp_out ? s.lowp_out + begin : nullptr,
          numel,
          std::clamp<int64_t>(s.num_main - begin, 0, numel),
          block_key(s.key, uint64_t(index)),
          dtype_of(call.param_type),
          dtype_of(call.grad_type),
          dtype_of(call.out_type),
          &s.scalars};
}

// The bytes between codes and scales: always the same, although nobody reads them.
void clear_gap(void* states, int64_t numel) {
  std::memset(behind(states, numel), 0, size_t(scales_begin(numel) - numel));
}

void run_blocks(const BlockCall& call, int64_t num_threads, const Level& level) {
  std::vector<int64_t> ends;  // blocks up to and with each tensor
  int64_t total = 0;
  for (const BlockSegment& segment : call.segments) {
    ends.push_back(total += num_blocks_of(segment.numel));
    if (call.has_codes) {
      clear_gap(segment.out_exp_avg, segment.numel);
      clear_gap(segment.out_exp_avg_sq, segment.numel);
    }
  }
  for_pieces(total, kGrain / kCodeBlock, num_threads, [&](int64_t begin, int64_t end) {
    size_t at = size_t(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (int64_t index = begin; index < end; ++index) {
      while (ends[at] <= index) ++at;
      level.adam_block(make_tile(call, call.segments[at], index - (at ? ends[at - 1] : 0)));
    }
  });
}

void adamw_blocks_at(CHUNKMEM_ADAM_PARAMETERS, Tensors out_params, Tensors out_exp_avgs, Tensors out_exp_avg_sqs,
                     std::vector<int64_t> keys, int64_t num_threads, int64_t level) {
  check_num_threads(num_threads);
  run_blocks(make_block_call(CHUNKMEM_ADAM_GIVEN, {out_params, out_exp_avgs, out_exp_avg_sqs}, keys), num_threads,
             level_at(level));
}

void adamw_blocks(CHUNKMEM_ADAM_PARAMETERS, Tensors out_params, Tensors out_exp_avgs, Tensors out_exp_avg_sqs,
                  std::vector<int64_t> keys, int64_t num_threads) {
  check_num_threads(num_threads);
  run_blocks(make_block_call(CHUNKMEM_ADAM_GIVEN, {out_params, out_exp_avgs, out_exp_avg_sqs}, keys), num_threads,
             level_at(best_level()));
}

}  // namespace
}  // namespace chunkmem

STABLE_TORCH_LIBRARY_IMPL(chunkmem, CPU, m) {
  m.impl("adamw_blocks", TORCH_BOX(&chunkmem::adamw_blocks));
  m.impl("_adamw_blocks_at", TORCH_BOX(&chunkmem::adamw_blocks_at));
}
