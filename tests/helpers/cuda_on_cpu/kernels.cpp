// The CUDA kernels as operators on tensors of the CPU, for tests: every line of them but where they are launched.
#include "cuda_runtime.h"
//
#include <torch/csrc/stable/c/shim.h>

// There is no device to choose, nor a stream. These come before torch's own ones (-Bsymbolic).
extern "C" {
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return AOTI_TORCH_SUCCESS; }
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}
__attribute__((visibility("default"))) int64_t num_launches() { return cuda_on_cpu::num_launches; }
}

#include "../../../csrc/cuda/common.h"
#define CUDA CPU
#include "../../../csrc/cuda/adam.cu"
#include "../../../csrc/cuda/blocks.cu"
#include "../../../csrc/cuda/norm.cu"
