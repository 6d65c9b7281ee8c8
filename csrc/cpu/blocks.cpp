// The update by blocks on the CPU: blocks of all tensors, over several threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../block_arguments.h"
#include "choose.h"
#include "threads.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace chunkmem {
namespace {

BlockRun make_run(const BlockCall& call, const BlockSegment& s, int64_t first, int64_t last, bool past_caches) {
  const int64_t scales_at = scales_begin(s.numel);
  const auto read_scales = [&](const void* states) {
    return call.has_codes ? reinterpret_cast<const float*>(static_cast<const char*>(states) + scales_at) : nullptr;
  };
  const auto written_scales = [&](void* states) {
    return call.has_codes ? reinterpret_cast<float*>(static_cast<char*>(states) + scales_at) : nullptr;
  };
  return {s.param,
          s.grad,
          s.exp_avg,
          s.exp_avg_sq,
          read_scales(s.exp_avg),
          read_scales(s.exp_avg_sq),
          s.out_param,
          s.out_exp_avg,
          s.out_exp_avg_sq,
          written_scales(s.out_exp_avg),
          written_scales(s.out_exp_avg_sq),
          s.lowp_out,
          s.numel,
          s.num_main,
          first,
          last,
          s.key,
          dtype_of(call.param_type),
          dtype_of(call.grad_type),
          dtype_of(call.out_type),
          past_caches,
          &s.scalars};
}

// The bytes between codes and scales: always the same, although nobody reads them.
void clear_gap(void* states, int64_t numel) {
  std::memset(static_cast<char*>(states) + numel, 0, size_t(scales_begin(numel) - numel));
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
  const bool past_caches = total * kCodeBlock >= kPastCachesNumel;
  for_pieces(total, kGrain / kCodeBlock, num_threads, [&](int64_t begin, int64_t end) {
    size_t at = size_t(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (int64_t next; begin < end; begin = next, ++at) {
      const int64_t before = at ? ends[at - 1] : 0;
      next = std::min(end, ends[at]);
      level.adam_blocks(make_run(call, call.segments[at], begin - before, next - before, past_caches));
    }
#if defined(__SSE2__)
    if (past_caches) _mm_sfence();
#endif
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
