// The update by blocks on CUDA: a warp takes a block of 256 elements, each thread every 32nd of them. One launch for
// many tensors, on the current stream; nothing waits for the device.
#include "../block_arguments.h"
#include "common.h"

namespace chunkmem {
namespace {

constexpr int kLanes = 32;
constexpr int kEach = int(kCodeBlock) / kLanes;  // elements a thread takes

struct BlockTypes {
  Dtype param;
  Dtype grad;
  Dtype out;
  bool has_codes;
};

constexpr int kMostSegments = 24;
using BlockBatch = Batch<BlockSegment, kMostSegments>;
static_assert(sizeof(BlockBatch) + sizeof(BlockTypes) <= kMostArgumentBytes);

// The largest of what the threads of a warp have, in all of them; a double holds every 32 bits.
__device__ uint32_t largest_of_warp(uint32_t value) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    const uint32_t other = uint32_t(__shfl_xor_sync(0xffffffffu, double(value), width));
    value = other > value ? other : value;
  }
  return value;
}

__device__ const float* scale_in(const void* states, int64_t numel, int64_t index) {
  return reinterpret_cast<const float*>(static_cast<const char*>(states) + scales_begin(numel)) + index;
}
__device__ float* scale_in(void* states, int64_t numel, int64_t index) {
  return reinterpret_cast<float*>(static_cast<char*>(states) + scales_begin(numel)) + index;
}

template <bool kSigned>
__device__ void load_states(const void* from, bool has_codes, int64_t numel, int64_t index, float* to) {
  const float scale = has_codes ? *scale_in(from, numel, index) : 0.0f;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int64_t i = index * kCodeBlock + int64_t(threadIdx.x % kLanes) + j * kLanes;
    if (i >= numel) continue;
    to[j] = has_codes ? decode<kSigned>(uint32_t(static_cast<const uint8_t*>(from)[i]), scale)
                      : static_cast<const float*>(from)[i];
  }
}

// All threads of a warp come here, so that all elements beyond the end have to be 0.
template <bool kSigned>
__device__ void store_states(const float* from, uint64_t key, bool has_codes, int64_t numel, int64_t index, void* to) {
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint32_t magnitude = bits_of(from[j]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  const Scale scale = make_scale(largest_of_warp(most));
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int in_block = int(threadIdx.x % kLanes) + j * kLanes;
    const int64_t i = index * kCodeBlock + in_block;
    if (i >= numel) continue;
    const uint32_t random = random_bits(key, uint32_t(in_block));
    if (has_codes) {
      static_cast<uint8_t*>(to)[i] = uint8_t(encode<kSigned>(from[j], scale, code_dither<kSigned>(random)));
    } else {
      static_cast<float*>(to)[i] = from[j];
    }
  }
  if (has_codes && threadIdx.x % kLanes == 0) {
    *scale_in(to, numel, index) = scale.value;
    // The bytes between codes and scales.
    const bool is_last = index == num_blocks_of(numel) - 1;
    for (int64_t i = numel; is_last && i < scales_begin(numel); ++i) static_cast<uint8_t*>(to)[i] = 0;
  }
}

__global__ void block_kernel(const __grid_constant__ BlockBatch batch, BlockTypes types) {
  const Dealt mine = dealt(batch);
  const BlockSegment& s = batch.work[mine.piece];
  const int64_t index = (mine.block * kThreads + threadIdx.x) / kLanes;
  if (index >= num_blocks_of(s.numel)) return;
  const uint64_t key = block_key(s.key, uint64_t(index));
  float param[kEach] = {}, exp_avg[kEach] = {}, exp_avg_sq[kEach] = {};
  load_states<true>(s.exp_avg, types.has_codes, s.numel, index, exp_avg);
  load_states<false>(s.exp_avg_sq, types.has_codes, s.numel, index, exp_avg_sq);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int64_t i = index * kCodeBlock + int64_t(threadIdx.x % kLanes) + j * kLanes;
    if (i >= s.numel) continue;
    param[j] = load(s.param, types.param, i);
    const float grad = load(s.grad, types.grad, i);
    if (i < s.num_main) {
      adam_update<Order::kVector>(grad, param[j], exp_avg[j], exp_avg_sq[j], s.scalars);
    } else {
      adam_update<Order::kTail>(grad, param[j], exp_avg[j], exp_avg_sq[j], s.scalars);
    }
  }
  store_states<true>(exp_avg, key, types.has_codes, s.numel, index, s.out_exp_avg);
  store_states<false>(exp_avg_sq, key, types.has_codes, s.numel, index, s.out_exp_avg_sq);
  const uint64_t key_of_weights = block_key(key, 0);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int in_block = int(threadIdx.x % kLanes) + j * kLanes;
    const int64_t i = index * kCodeBlock + in_block;
    if (i >= s.numel) continue;
    if (types.param == Dtype::kFloat) {
      static_cast<float*>(s.out_param)[i] = param[j];
    } else {
      static_cast<uint16_t*>(s.out_param)[i] = to_bfloat16(param[j], random_bits_of_weight(key_of_weights, uint32_t(in_block)));
    }
    if (s.lowp_out) s.lowp_out[i] = types.out == Dtype::kBFloat16 ? to_bfloat16(param[j]) : to_half(param[j]);
  }
}

void adamw_blocks(CHUNKMEM_ADAM_PARAMETERS, Tensors out_params, Tensors out_exp_avgs, Tensors out_exp_avg_sqs,
                  std::vector<int64_t> keys, int64_t num_threads) {
  check_num_threads(num_threads);
  if (params.empty()) return;
  const AdamArguments given = CHUNKMEM_ADAM_GIVEN;
  const BlockCall call = make_block_call(given, {out_params, out_exp_avgs, out_exp_avg_sqs}, keys);
  const torch::stable::accelerator::DeviceGuard guard(given.params[0].get_device_index());
  const cudaStream_t stream = current_stream(given.params[0]);
  const BlockTypes types{dtype_of(call.param_type), dtype_of(call.grad_type), dtype_of(call.out_type), call.has_codes};
  BlockBatch batch;
  const auto launch_batch = [&] {
    if (batch.count > 0) launch(block_kernel, batch.num_blocks(), stream, batch, types);
    batch = {};
  };
  for (const BlockSegment& s : call.segments) {
    if (s.numel == 0) continue;
    batch.add(s, num_thread_blocks(num_blocks_of(s.numel) * kLanes));
    if (batch.count == kMostSegments) launch_batch();
  }
  launch_batch();
}

}  // namespace
}  // namespace chunkmem

STABLE_TORCH_LIBRARY_IMPL(chunkmem, CUDA, m) { m.impl("adamw_blocks", TORCH_BOX(&chunkmem::adamw_blocks)); }
