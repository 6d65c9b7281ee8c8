// What the kernels on CUDA share.
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include "../arguments.h"

namespace chunkmem {
namespace {

constexpr int kThreads = 256;

enum class Dtype { kNone, kFloat, kBFloat16, kHalf };

Dtype dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return Dtype::kFloat;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Half: return Dtype::kHalf;
    default: return Dtype::kNone;
  }
}

template <Dtype kDtype>
__device__ float load(const void* from, int64_t i) {
  if constexpr (kDtype == Dtype::kFloat) return static_cast<const float*>(from)[i];
  const uint16_t bits = static_cast<const uint16_t*>(from)[i];
  return kDtype == Dtype::kBFloat16 ? from_bfloat16(bits) : from_half(bits);
}

__device__ float load(const void* from, Dtype dtype, int64_t i) {
  return dtype == Dtype::kFloat      ? load<Dtype::kFloat>(from, i)
         : dtype == Dtype::kBFloat16 ? load<Dtype::kBFloat16>(from, i)
                                     : load<Dtype::kHalf>(from, i);
}

unsigned num_thread_blocks(int64_t num_threads) { return unsigned((num_threads + kThreads - 1) / kThreads); }

cudaStream_t current_stream(const Tensor& on) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace
}  // namespace chunkmem
