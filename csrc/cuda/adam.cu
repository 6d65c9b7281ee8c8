// The update on CUDA, in place or not: one launch for many tensors, on the current stream, and nothing waits for the
// device.
#include "common.h"

namespace chunkmem {
namespace {

constexpr int kGroup = 8;  // elements a thread takes at once: 16 bytes of low precision, twice 16 of fp32

template <Dtype kOut>
__device__ uint16_t round_to(float x) {
  return kOut == Dtype::kBFloat16 ? to_bfloat16(x) : to_half(x);
}

__device__ void update(const Segment& s, int64_t i, float grad, float& param, float& exp_avg, float& exp_avg_sq) {
  if (i < s.num_main) {
    adam_update<Order::kVector>(grad, param, exp_avg, exp_avg_sq, s.scalars);
  } else {
    adam_update<Order::kTail>(grad, param, exp_avg, exp_avg_sq, s.scalars);
  }
}

__device__ void copy_group(const float* from, float* to) {
  reinterpret_cast<float4*>(to)[0] = reinterpret_cast<const float4*>(from)[0];
  reinterpret_cast<float4*>(to)[1] = reinterpret_cast<const float4*>(from)[1];
}

// Elements `head` to `head + kGroup * num_groups` lie on boundaries of 16 bytes in all tensors; the others go one by
// one, to the threads behind those of the groups.
struct AdamWork {
  Segment segment;
  int64_t head;
  int64_t num_groups;
};

constexpr int kMostTensors = 24;
using AdamBatch = Batch<AdamWork, kMostTensors>;
static_assert(sizeof(AdamBatch) <= kMostArgumentBytes);

template <Dtype kGrad, Dtype kOut>
__global__ void adam_kernel(const __grid_constant__ AdamBatch batch) {
  const Dealt mine = dealt(batch);
  const AdamWork& work = batch.work[mine.piece];
  const Segment& s = work.segment;
  const int64_t head = work.head, num_groups = work.num_groups;
  const int64_t thread = mine.block * kThreads + threadIdx.x;
  if (thread >= num_groups) {
    const int64_t single = thread - num_groups;
    const int64_t i = single < head ? single : single + kGroup * num_groups;
    if (i >= s.numel) return;
    float param = s.param[i], exp_avg = s.exp_avg[i], exp_avg_sq = s.exp_avg_sq[i];
    update(s, i, load<kGrad>(s.grad, i), param, exp_avg, exp_avg_sq);
    s.out_param[i] = param;
    s.out_exp_avg[i] = exp_avg;
    s.out_exp_avg_sq[i] = exp_avg_sq;
    if constexpr (kOut != Dtype::kNone) s.lowp_out[i] = round_to<kOut>(param);
    return;
  }
  const int64_t begin = head + kGroup * thread;
  alignas(16) float param[kGroup], exp_avg[kGroup], exp_avg_sq[kGroup], grad[kGroup];
  copy_group(s.param + begin, param);
  copy_group(s.exp_avg + begin, exp_avg);
  copy_group(s.exp_avg_sq + begin, exp_avg_sq);
  if constexpr (kGrad == Dtype::kFloat) {
    copy_group(static_cast<const float*>(s.grad) + begin, grad);
  } else {
    alignas(16) uint16_t bits[kGroup];
    *reinterpret_cast<uint4*>(bits) = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(s.grad) + begin);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) grad[j] = load<kGrad>(bits, j);
  }
#pragma unroll
  for (int j = 0; j < kGroup; ++j) update(s, begin + j, grad[j], param[j], exp_avg[j], exp_avg_sq[j]);
  copy_group(param, s.out_param + begin);
  copy_group(exp_avg, s.out_exp_avg + begin);
  copy_group(exp_avg_sq, s.out_exp_avg_sq + begin);
  if constexpr (kOut != Dtype::kNone) {
    uint32_t pairs[kGroup / 2] = {};
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const uint32_t rounded = round_to<kOut>(param[j]);
      pairs[j / 2] |= rounded << (16 * (j % 2));
    }
    // Nothing reads it soon, so it need not stay in a cache.
    __stcs(reinterpret_cast<uint4*>(s.lowp_out + begin), make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  }
}

// The first element from which all tensors are on boundaries of 16 bytes; all of them if they never are together.
int64_t find_head(const Segment& s, Dtype grad) {
  const auto aligned = [](const void* at, int64_t nbytes) { return (uintptr_t(at) + uintptr_t(nbytes)) % 16 == 0; };
  for (int64_t head = 0; head < kGroup && head < s.numel; ++head) {
    if (aligned(s.param, 4 * head) && aligned(s.exp_avg, 4 * head) && aligned(s.exp_avg_sq, 4 * head) &&
        aligned(s.out_param, 4 * head) && aligned(s.out_exp_avg, 4 * head) && aligned(s.out_exp_avg_sq, 4 * head) &&
        aligned(s.grad, (grad == Dtype::kFloat ? 4 : 2) * head) && (!s.lowp_out || aligned(s.lowp_out, 2 * head))) {
      return head;
    }
  }
  return s.numel;
}

template <Dtype kGrad>
void launch_adam(const AdamBatch& batch, Dtype out, cudaStream_t stream) {
  switch (out) {
    case Dtype::kBFloat16: return launch(adam_kernel<kGrad, Dtype::kBFloat16>, batch.num_blocks(), stream, batch);
    case Dtype::kHalf: return launch(adam_kernel<kGrad, Dtype::kHalf>, batch.num_blocks(), stream, batch);
    default: return launch(adam_kernel<kGrad, Dtype::kNone>, batch.num_blocks(), stream, batch);
  }
}

void launch_adam(const AdamBatch& batch, Dtype grad, Dtype out, cudaStream_t stream) {
  if (batch.count == 0) return;
  switch (grad) {
    case Dtype::kBFloat16: return launch_adam<Dtype::kBFloat16>(batch, out, stream);
    case Dtype::kHalf: return launch_adam<Dtype::kHalf>(batch, out, stream);
    default: return launch_adam<Dtype::kFloat>(batch, out, stream);
  }
}

void run_adam(const AdamCall& call, const Tensor& on) {
  const torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
  const cudaStream_t stream = current_stream(on);
  const Dtype grad = dtype_of(call.grad_type), out = dtype_of(call.out_type);
  AdamBatch batch;
  for (const Segment& s : call.segments) {
    if (s.numel == 0) continue;
    const int64_t head = find_head(s, grad), num_groups = (s.numel - head) / kGroup;
    batch.add({s, head, num_groups}, num_thread_blocks(s.numel - (kGroup - 1) * num_groups));
    if (batch.count == kMostTensors) {
      launch_adam(batch, grad, out, stream);
      batch = {};
    }
  }
  launch_adam(batch, grad, out, stream);
}

void adamw_(CHUNKMEM_ADAM_PARAMETERS) {
  const AdamArguments given = CHUNKMEM_ADAM_GIVEN;
  check_no_powers(given);
  run_adam(make_adam_call(given), given.params[0]);
}

void adamw_into(CHUNKMEM_ADAM_PARAMETERS, Tensors out_params, Tensors out_exp_avgs, Tensors out_exp_avg_sqs,
                int64_t num_threads) {
  check_num_threads(num_threads);
  const AdamArguments given = CHUNKMEM_ADAM_GIVEN;
  check_no_powers(given);
  const Outputs outputs{out_params, out_exp_avgs, out_exp_avg_sqs};
  run_adam(make_adam_call(given, &outputs), given.params[0]);
}

}  // namespace
}  // namespace chunkmem

STABLE_TORCH_LIBRARY_IMPL(chunkmem, CUDA, m) {
  m.impl("adamw_", TORCH_BOX(&chunkmem::adamw_));
  m.impl("adamw_into", TORCH_BOX(&chunkmem::adamw_into));
}
