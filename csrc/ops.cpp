// The operators of the namespace `chunkmem`: what they take. csrc/cpu and csrc/cuda hold what they do, and
// chunkmem/optim/kernels.py the same in plain PyTorch. Only torch's stable ABI is used, so one library serves every
// torch from 2.10 on.
#include <torch/csrc/stable/library.h>

#include "arguments.h"

// One fused pass of Adam over lists of contiguous tensors, in place. Hyper-parameters are lists of one entry for all
// tensors or one for each. `lowp_outs` is empty, or takes the new parameters rounded to bfloat16 or float16. The last
// `numel % tail_width` elements of each tensor are computed in the order of torch's scalar tail (see adam_math.h). With
// `beta1_power` and `beta2_power`, which are beta ** step as a device makes it, all are in the order of torch on CUDA.
#define CHUNKMEM_ADAMW_NUMBERS                                                                               \
  "float[] lr, float[] beta1, float[] beta2, float[] eps, float[] weight_decay, int[] step, float unscale, " \
  "float clip_coefficient, bool decoupled, int tail_width, float[] beta1_power, float[] beta2_power"
#define CHUNKMEM_ADAMW_ARGUMENTS                                                            \
  "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, " \
  "Tensor(d!)[] lowp_outs, " CHUNKMEM_ADAMW_NUMBERS

// The same bits out of place: parameters and states are only read, and their new values written to tensors that begin
// elsewhere. With 0 `num_threads` a call runs on torch's threads, else on so many of its own, the one that makes it
// among them and fewer where there is little to do: torch's settings then play no part. CUDA ignores it.
#define CHUNKMEM_ADAMW_INTO_ARGUMENTS                                                        \
  "(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor(a!)[] " \
  "lowp_outs, " CHUNKMEM_ADAMW_NUMBERS                                                       \
  ", Tensor(b!)[] out_params, Tensor(c!)[] out_exp_avgs, Tensor(d!)[] out_exp_avg_sqs, int num_threads"

// The same arithmetic block by block of 256 elements (block_math.h), where the states are codes and scales in uint8, or
// where weights in bfloat16 are updated without masters and rounded stochastically. What is written may be what is read.
// `keys`: of random bits, one a tensor.
#define CHUNKMEM_ADAMW_BLOCKS_ARGUMENTS                                                      \
  "(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor(a!)[] " \
  "lowp_outs, " CHUNKMEM_ADAMW_NUMBERS                                                       \
  ", Tensor(b!)[] out_params, Tensor(c!)[] out_exp_avgs, Tensor(d!)[] out_exp_avg_sqs, int[] keys, int num_threads"

STABLE_TORCH_LIBRARY(chunkmem, m) {
  m.def("adamw_" CHUNKMEM_ADAMW_ARGUMENTS ") -> ()");
  m.def("adamw_into" CHUNKMEM_ADAMW_INTO_ARGUMENTS ") -> ()");
  m.def("adamw_blocks" CHUNKMEM_ADAMW_BLOCKS_ARGUMENTS ") -> ()");
  // Two doubles: the sum of the squares of `grad * unscale`, and 1 if all of those are finite, else 0. The tensors
  // count as one long one, so the sum depends neither on where that is cut nor on `num_threads`, as above.
  m.def("norm_and_finite(Tensor[] grads, float unscale, int num_threads=0) -> Tensor");
  // For tests: the same at an instruction set at most the best one: 0 baseline, 1 AVX2, 2 AVX-512.
  m.def("_adamw_at_" CHUNKMEM_ADAMW_ARGUMENTS ", int level) -> ()");
  m.def("_adamw_into_at" CHUNKMEM_ADAMW_INTO_ARGUMENTS ", int level) -> ()");
  m.def("_adamw_blocks_at" CHUNKMEM_ADAMW_BLOCKS_ARGUMENTS ", int level) -> ()");
  m.def("_norm_and_finite_at(Tensor[] grads, float unscale, int level) -> Tensor");
  m.def("_best_level() -> int");
}

// What torch's tracing runs in their place: shapes without values.
namespace chunkmem {
namespace {

void adamw_meta(CHUNKMEM_ADAM_PARAMETERS) {}

void adamw_into_meta(CHUNKMEM_ADAM_PARAMETERS, Tensors, Tensors, Tensors, int64_t) {}

void adamw_blocks_meta(CHUNKMEM_ADAM_PARAMETERS, Tensors, Tensors, Tensors, std::vector<int64_t>, int64_t) {}

Tensor norm_and_finite_meta(Tensors grads, double, int64_t) {
  return torch::stable::new_empty(grads[0], {2}, ScalarType::Double);
}

}  // namespace
}  // namespace chunkmem

STABLE_TORCH_LIBRARY_IMPL(chunkmem, Meta, m) {
  m.impl("adamw_", TORCH_BOX(&chunkmem::adamw_meta));
  m.impl("adamw_into", TORCH_BOX(&chunkmem::adamw_into_meta));
  m.impl("adamw_blocks", TORCH_BOX(&chunkmem::adamw_blocks_meta));
  m.impl("norm_and_finite", TORCH_BOX(&chunkmem::norm_and_finite_meta));
}
