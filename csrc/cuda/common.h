// What the kernels on CUDA share.
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include "../arguments.h"
#include "batch.h"

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

// Which piece the calling block of threads has been dealt, and which of its blocks that is.
struct Dealt {
  int piece;
  int64_t block;
};

template <class Work, int kMost>
__device__ Dealt dealt(const Batch<Work, kMost>& batch) {
  int piece = 0;
  while (blockIdx.x >= batch.first_block[piece + 1]) ++piece;
  return {piece, int64_t(blockIdx.x - batch.first_block[piece])};
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

#if defined(__CUDACC__)
template <class... Parameters, class... Given>
void launch(void (*kernel)(Parameters...), unsigned num_blocks, cudaStream_t stream, const Given&... given) {
  kernel<<<num_blocks, kThreads, 0, stream>>>(given...);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}
#else  // tests run the kernels on a CPU
template <class... Parameters, class... Given>
void launch(void (*kernel)(Parameters...), unsigned num_blocks, cudaStream_t, const Given&... given) {
  run_on_cpu(num_blocks, kThreads, [&] { kernel(given...); });
}
#endif

cudaStream_t current_stream(const Tensor& on) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace
}  // namespace chunkmem
