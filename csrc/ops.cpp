// The operators of the namespace `chunkmem`: what they take. csrc/cpu and csrc/cuda hold what they do, and
// chunkmem/optim/kernels.py the same in plain PyTorch. Only torch's stable ABI is used, so one library serves every
// torch from 2.11 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

// One fused pass of Adam over lists of contiguous tensors, in place. Hyper-parameters are lists of one entry for all
// tensors or one for each. `lowp_outs` is empty, or takes the new parameters rounded to bfloat16 or float16: to
// nearest even, or, given a `seed`, stochastically; `first_element` is then the number of the first element. The last
// `numel % tail_width` elements of each tensor are computed in the order of torch's scalar tail (see adam_math.h).
#define CHUNKMEM_ADAMW_ARGUMENTS                                                                              \
  "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "                   \
  "Tensor(d!)[] lowp_outs, float[] lr, float[] beta1, float[] beta2, float[] eps, float[] weight_decay, "     \
  "int[] step, float unscale, float clip_coefficient, bool decoupled, int? seed, int first_element, int tail_width"

STABLE_TORCH_LIBRARY(chunkmem, m) {
  m.def("adamw_" CHUNKMEM_ADAMW_ARGUMENTS ") -> ()");
  // Two doubles: the sum of the squares of `grad * unscale`, and 1 if all of those are finite, else 0. The tensors
  // count as one long one, so the sum does not depend on where that is cut.
  m.def("norm_and_finite(Tensor[] grads, float unscale) -> Tensor");
  // For tests: the same at an instruction set at most the best one: 0 baseline, 1 AVX2, 2 AVX-512.
  m.def("_adamw_at_" CHUNKMEM_ADAMW_ARGUMENTS ", int level) -> ()");
  m.def("_norm_and_finite_at(Tensor[] grads, float unscale, int level) -> Tensor");
  m.def("_best_level() -> int");
}

// What torch's tracing runs in their place: shapes without values.
namespace {

using Tensors = std::vector<torch::stable::Tensor>;
using Doubles = std::vector<double>;

void adamw_meta(Tensors, Tensors, Tensors, Tensors, Tensors, Doubles, Doubles, Doubles, Doubles, Doubles,
                std::vector<int64_t>, double, double, bool, std::optional<int64_t>, int64_t, int64_t) {}

torch::stable::Tensor norm_and_finite_meta(Tensors grads, double) {
  return torch::stable::new_empty(grads[0], {2}, torch::headeronly::ScalarType::Double);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(chunkmem, Meta, m) {
  m.impl("adamw_", TORCH_BOX(&adamw_meta));
  m.impl("norm_and_finite", TORCH_BOX(&norm_and_finite_meta));
}
