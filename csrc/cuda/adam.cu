// The update on CUDA: one launch a tensor, on the current stream, and nothing waits for the device.
#include "common.h"

namespace chunkmem {
namespace {

constexpr int kGroup = 8;  // elements a thread takes at once: 16 bytes of low precision, twice 16 of fp32

struct Rounding {
  bool stochastic;
  uint64_t seed;
};

template <Dtype kOut>
__device__ uint16_t round_to(float x, Rounding rounding, uint64_t element) {
  if (!rounding.stochastic) return kOut == Dtype::kBFloat16 ? to_bfloat16(x) : to_half(x);
  const uint32_t random = random_bits(random_key(rounding.seed, element), uint32_t(element));
  return kOut == Dtype::kBFloat16 ? to_bfloat16(x, random & 0xffffu) : to_half_stochastic(x, random);
}

__device__ void update(const Segment& s, int64_t i, float grad, float& param, float& exp_avg, float& exp_avg_sq) {
  if (i < s.num_main) {
    adam_update<false>(grad, param, exp_avg, exp_avg_sq, s.scalars);
  } else {
    adam_update<true>(grad, param, exp_avg, exp_avg_sq, s.scalars);
  }
}

__device__ void load_group(const float* from, float* to) {
  reinterpret_cast<float4*>(to)[0] = reinterpret_cast<const float4*>(from)[0];
  reinterpret_cast<float4*>(to)[1] = reinterpret_cast<const float4*>(from)[1];
}

// Elements `head` to `head + kGroup * num_groups` lie on boundaries of 16 bytes in all tensors; the others go one by
// one, to the threads behind those of the groups.
template <Dtype kGrad, Dtype kOut>
__global__ void adam_kernel(Segment s, int64_t head, int64_t num_groups, Rounding rounding) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (thread >= num_groups) {
    const int64_t single = thread - num_groups;
    const int64_t i = single < head ? single : single + kGroup * num_groups;
    if (i >= s.numel) return;
    update(s, i, load<kGrad>(s.grad, i), s.param[i], s.exp_avg[i], s.exp_avg_sq[i]);
    if constexpr (kOut != Dtype::kNone) {
      s.lowp_out[i] = round_to<kOut>(s.param[i], rounding, s.first_element + uint64_t(i));
    }
    return;
  }
  const int64_t begin = head + kGroup * thread;
  alignas(16) float param[kGroup], exp_avg[kGroup], exp_avg_sq[kGroup], grad[kGroup];
  load_group(s.param + begin, param);
  load_group(s.exp_avg + begin, exp_avg);
  load_group(s.exp_avg_sq + begin, exp_avg_sq);
  if constexpr (kGrad == Dtype::kFloat) {
    load_group(static_cast<const float*>(s.grad) + begin, grad);
  } else {
    alignas(16) uint16_t bits[kGroup];
    *reinterpret_cast<uint4*>(bits) = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(s.grad) + begin);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) grad[j] = load<kGrad>(bits, j);
  }
#pragma unroll
  for (int j = 0; j < kGroup; ++j) update(s, begin + j, grad[j], param[j], exp_avg[j], exp_avg_sq[j]);
  load_group(param, s.param + begin);
  load_group(exp_avg, s.exp_avg + begin);
  load_group(exp_avg_sq, s.exp_avg_sq + begin);
  if constexpr (kOut != Dtype::kNone) {
    uint32_t pairs[kGroup / 2] = {};
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const uint32_t rounded = round_to<kOut>(param[j], rounding, s.first_element + uint64_t(begin + j));
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
        aligned(s.grad, (grad == Dtype::kFloat ? 4 : 2) * head) && (!s.lowp_out || aligned(s.lowp_out, 2 * head))) {
      return head;
    }
  }
  return s.numel;
}

template <Dtype kGrad, Dtype kOut>
void launch(const Segment& s, Rounding rounding, cudaStream_t stream) {
  const int64_t head = find_head(s, kGrad), num_groups = (s.numel - head) / kGroup;
  const int64_t num_threads = s.numel - (kGroup - 1) * num_groups;
  adam_kernel<kGrad, kOut><<<num_thread_blocks(num_threads), kThreads, 0, stream>>>(s, head, num_groups, rounding);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <Dtype kGrad>
void launch(const Segment& s, Dtype out, Rounding rounding, cudaStream_t stream) {
  switch (out) {
    case Dtype::kBFloat16: return launch<kGrad, Dtype::kBFloat16>(s, rounding, stream);
    case Dtype::kHalf: return launch<kGrad, Dtype::kHalf>(s, rounding, stream);
    default: return launch<kGrad, Dtype::kNone>(s, rounding, stream);
  }
}

void adamw_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors lowp_outs, Doubles lr,
            Doubles beta1, Doubles beta2, Doubles eps, Doubles weight_decay, std::vector<int64_t> step, double unscale,
            double clip_coefficient, bool decoupled, std::optional<int64_t> seed, int64_t first_element,
            int64_t tail_width) {
  const AdamCall call =
      make_adam_call(params, grads, exp_avgs, exp_avg_sqs, lowp_outs, lr, beta1, beta2, eps, weight_decay, step,
                     unscale, clip_coefficient, decoupled, seed, first_element, tail_width);
  const torch::stable::accelerator::DeviceGuard guard(params[0].get_device_index());
  const cudaStream_t stream = current_stream(params[0]);
  const Dtype out = dtype_of(call.out_type);
  const Rounding rounding{call.stochastic, call.seed};
  for (const Segment& s : call.segments) {
    if (s.numel == 0) continue;
    switch (call.grad_type) {
      case ScalarType::BFloat16: launch<Dtype::kBFloat16>(s, out, rounding, stream); break;
      case ScalarType::Half: launch<Dtype::kHalf>(s, out, rounding, stream); break;
      default: launch<Dtype::kFloat>(s, out, rounding, stream);
    }
  }
}

}  // namespace
}  // namespace chunkmem

STABLE_TORCH_LIBRARY_IMPL(chunkmem, CUDA, m) { m.impl("adamw_", TORCH_BOX(&chunkmem::adamw_)); }
