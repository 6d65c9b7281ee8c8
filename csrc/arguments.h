// What the operators are given, checked, as plain pointers and numbers: shared by all back ends. The messages name the
// argument; chunkmem/optim/kernels.py raises the same ones.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "adam_math.h"

namespace chunkmem {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Doubles = std::vector<double>;

struct Segment {
  const float* param;
  const void* grad;
  const float* exp_avg;
  const float* exp_avg_sq;
  float* out_param;  // this and the next two are the same memory as above if the call is in place
  float* out_exp_avg;
  float* out_exp_avg_sq;
  uint16_t* lowp_out;  // null if there is none
  int64_t numel;
  int64_t num_main;  // the others, at the end, are torch's tail
  AdamScalars scalars;
};

struct AdamCall {
  std::vector<Segment> segments;
  bool in_place = true;
  ScalarType grad_type = ScalarType::Float;
  ScalarType out_type = ScalarType::Undefined;
};

[[noreturn]] inline void refuse(const std::string& message) { throw std::runtime_error("chunkmem: " + message); }

inline void check_length(const char* name, size_t length, size_t num_tensors, bool may_be_one) {
  if (length != num_tensors && !(may_be_one && length == 1)) {
    refuse(std::string(name) + " has " + std::to_string(length) + " entries for " + std::to_string(num_tensors) +
           " tensors in params");
  }
}

inline bool is_lowp(ScalarType type) { return type == ScalarType::BFloat16 || type == ScalarType::Half; }

// All of `tensors`: contiguous, on the device of `like`, of one of the types allowed and all of the same.
inline void check_tensors(const char* name, const Tensors& tensors, const Tensor& like, bool may_be_float,
                          bool may_be_lowp) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string which = std::string(name) + "[" + std::to_string(i) + "]";
    const ScalarType type = tensors[i].scalar_type();
    if (!(may_be_float && type == ScalarType::Float) && !(may_be_lowp && is_lowp(type))) {
      refuse(which + " has a dtype that is not one of " + (may_be_float ? "float32" : "") +
             (may_be_float && may_be_lowp ? ", " : "") + (may_be_lowp ? "bfloat16, float16" : ""));
    }
    if (type != tensors[0].scalar_type()) {
      refuse(which + " has another dtype than " + name + "[0]; a call takes one");
    }
    if (tensors[i].device() != like.device()) {
      refuse(which + " is on another device than the first tensor of the call");
    }
    if (!tensors[i].is_contiguous()) {
      refuse(which + " is not contiguous");
    }
  }
}

inline void check_shapes(const char* name, const Tensors& tensors, const Tensors& params) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto a = tensors[i].sizes(), b = params[i].sizes();
    if (!std::equal(a.begin(), a.end(), b.begin(), b.end())) {
      refuse(std::string(name) + "[" + std::to_string(i) + "] has another shape than params[" + std::to_string(i) +
             "]");
    }
  }
}

struct HyperParameters {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;
  double beta1_power, beta2_power;  // in the order of CUDA only
};

// As torch computes them: in double, and each rounded once. `1 - lr * weight_decay` is contracted there.
inline AdamScalars make_scalars(const HyperParameters& h, double grad_scale, bool decoupled) {
  const double bias_correction1 = 1 - std::pow(h.beta1, double(h.step));
  const double bias_correction2 = 1 - std::pow(h.beta2, double(h.step));
  const float towards_grad = float(1 - h.beta1);
  AdamScalars s{};
  s.grad_scale = float(grad_scale);
  s.has_l2 = !decoupled && h.weight_decay != 0;
  s.l2 = s.has_l2 ? float(h.weight_decay) : 0.0f;
  s.decay = decoupled ? float(std::fma(-h.lr, h.weight_decay, 1.0)) : 1.0f;
  s.from_exp_avg = std::fabs(towards_grad) < 0.5f;
  s.lerp = s.from_exp_avg ? towards_grad : towards_grad - 1.0f;
  s.beta2 = float(h.beta2);
  s.grad_sq_weight = float(1 - h.beta2);
  s.bias_correction2_sqrt = float(std::sqrt(bias_correction2));
  s.eps = float(h.eps);
  s.neg_step_size = float(-(h.lr / bias_correction1));
  return s;
}

// As torch's CUDA kernel computes them, in float, from powers that were made there.
inline AdamScalars make_scalars_of_cuda(const HyperParameters& h, double grad_scale, bool decoupled) {
  const float lr = float(h.lr), weight_decay = float(h.weight_decay);
  AdamScalars s{};
  s.is_cuda_order = true;
  s.grad_scale = float(grad_scale);
  s.has_l2 = !decoupled && weight_decay != 0;
  s.l2 = s.has_l2 ? weight_decay : 0.0f;
  s.has_decay = decoupled && weight_decay != 0;
  s.decay = -(lr * weight_decay);
  s.lerp = -float(h.beta1);
  s.beta2 = float(h.beta2);
  s.bias_correction2_sqrt = std::sqrt(1.0f - float(h.beta2_power));
  s.eps = float(h.eps);
  s.neg_step_size = -(lr / (1.0f - float(h.beta1_power)));
  return s;
}

// What every update is given (csrc/ops.cpp says what it means): the parameters of an operator, and those gathered.
#define CHUNKMEM_ADAM_PARAMETERS                                                                                      \
  Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors lowp_outs, Doubles lr, Doubles beta1, \
      Doubles beta2, Doubles eps, Doubles weight_decay, std::vector<int64_t> step, double unscale,                    \
      double clip_coefficient, bool decoupled, int64_t tail_width, Doubles beta1_power, Doubles beta2_power
#define CHUNKMEM_ADAM_GIVEN                                                                                          \
  chunkmem::AdamArguments {                                                                                          \
    std::move(params), std::move(grads), std::move(exp_avgs), std::move(exp_avg_sqs), std::move(lowp_outs),          \
        std::move(lr), std::move(beta1), std::move(beta2), std::move(eps), std::move(weight_decay), std::move(step), \
        unscale, clip_coefficient, decoupled, tail_width, std::move(beta1_power), std::move(beta2_power)             \
  }

struct AdamArguments {
  Tensors params, grads, exp_avgs, exp_avg_sqs, lowp_outs;
  Doubles lr, beta1, beta2, eps, weight_decay;
  std::vector<int64_t> step;
  double unscale, clip_coefficient;
  bool decoupled;
  int64_t tail_width;
  Doubles beta1_power, beta2_power;

  bool is_cuda_order() const { return !beta1_power.empty() || !beta2_power.empty(); }
};

// Where an update out of place writes.
struct Outputs {
  Tensors params, exp_avgs, exp_avg_sqs;
};

inline void check_num_threads(int64_t num_threads) {
  if (num_threads < 0) {
    refuse("num_threads is " + std::to_string(num_threads) + "; it must be at least 0");
  }
}

inline void check_numbers(const AdamArguments& given) {
  const size_t n = given.params.size();
  const std::pair<const char*, const Doubles*> numbers[] = {{"lr", &given.lr},
                                                            {"beta1", &given.beta1},
                                                            {"beta2", &given.beta2},
                                                            {"eps", &given.eps},
                                                            {"weight_decay", &given.weight_decay}};
  for (const auto& [name, values] : numbers) {
    check_length(name, values->size(), n, true);
  }
  check_length("step", given.step.size(), n, true);
  for (size_t i = 0; i < given.step.size(); ++i) {
    if (given.step[i] < 1) {
      refuse("step[" + std::to_string(i) + "] is " + std::to_string(given.step[i]) + "; updates are counted from 1");
    }
  }
  if (given.tail_width < 0) {
    refuse("tail_width is " + std::to_string(given.tail_width) + "; it must be at least 0");
  }
  if (given.is_cuda_order()) {
    check_length("beta1_power", given.beta1_power.size(), n, true);
    check_length("beta2_power", given.beta2_power.size(), n, true);
  }
}

// For what computes in one order only.
inline void check_no_powers(const AdamArguments& given) {
  if (given.is_cuda_order()) {
    refuse("beta1_power and beta2_power are for adamw_ and adamw_into on a CPU");
  }
}

using NamedTensors = std::pair<const char*, const Tensors*>;

inline void check_lists(const std::vector<NamedTensors>& lists, const AdamArguments& given) {
  for (const auto& [name, tensors] : lists) {
    const bool is_lowp_out = tensors == &given.lowp_outs;
    if (is_lowp_out && tensors->empty()) {
      continue;
    }
    check_length(name, tensors->size(), given.params.size(), false);
    check_tensors(name, *tensors, given.params[0], !is_lowp_out, is_lowp_out || tensors == &given.grads);
    check_shapes(name, *tensors, given.params);
  }
}

// No output begins where an input or another output does.
inline void check_memory_of_outputs(const std::vector<NamedTensors>& inputs, const std::vector<NamedTensors>& outputs) {
  std::unordered_map<const void*, std::pair<const char*, size_t>> taken;
  for (const auto& [name, tensors] : inputs) {
    for (size_t i = 0; i < tensors->size(); ++i) {
      const Tensor& tensor = (*tensors)[i];
      if (tensor.numel() > 0) taken.emplace(tensor.const_data_ptr(), std::pair{name, i});
    }
  }
  for (const auto& [name, tensors] : outputs) {
    for (size_t i = 0; i < tensors->size(); ++i) {
      const Tensor& tensor = (*tensors)[i];
      if (tensor.numel() == 0) continue;
      // Where it will be written: by then torch has copied what it copies on the first write.
      const auto [found, is_new] = taken.emplace(tensor.mutable_data_ptr(), std::pair{name, i});
      if (!is_new) {
        refuse(std::string(name) + "[" + std::to_string(i) + "] begins where " + found->second.first + "[" +
               std::to_string(found->second.second) + "] does; an output needs memory of its own");
      }
    }
  }
}

inline void check_call(const AdamArguments& given, const Outputs* outputs) {
  const std::vector<NamedTensors> inputs = {{"params", &given.params},
                                            {"grads", &given.grads},
                                            {"exp_avgs", &given.exp_avgs},
                                            {"exp_avg_sqs", &given.exp_avg_sqs}};
  check_lists(inputs, given);
  check_lists({{"lowp_outs", &given.lowp_outs}}, given);
  if (outputs) {
    const std::vector<NamedTensors> outs = {{"out_params", &outputs->params},
                                            {"out_exp_avgs", &outputs->exp_avgs},
                                            {"out_exp_avg_sqs", &outputs->exp_avg_sqs}};
    check_lists(outs, given);
    check_memory_of_outputs(inputs, outs);
  }
  check_numbers(given);
}

// Checks what an operator was given. Without `outputs` the call is in place.
inline AdamCall make_adam_call(const AdamArguments& given, const Outputs* outputs = nullptr) {
  check_call(given, outputs);
  AdamCall call;
  call.in_place = outputs == nullptr;
  call.grad_type = given.grads.empty() ? ScalarType::Float : given.grads[0].scalar_type();
  call.out_type = given.lowp_outs.empty() ? ScalarType::Undefined : given.lowp_outs[0].scalar_type();
  for (size_t i = 0; i < given.params.size(); ++i) {
    const auto at = [i](const auto& values) { return values[values.size() == 1 ? 0 : i]; };
    HyperParameters h{at(given.lr), at(given.beta1), at(given.beta2), at(given.eps), at(given.weight_decay),
                      at(given.step)};
    const bool is_cuda_order = given.is_cuda_order();
    if (is_cuda_order) h.beta1_power = at(given.beta1_power), h.beta2_power = at(given.beta2_power);
    const int64_t numel = given.params[i].numel();
    const int64_t num_tail = given.tail_width && !is_cuda_order ? numel % given.tail_width : 0;
    Segment s{};
    // What is written comes first: torch may copy a tensor when it is first asked for memory to write to.
    s.out_param = (outputs ? outputs->params : given.params)[i].mutable_data_ptr<float>();
    s.out_exp_avg = (outputs ? outputs->exp_avgs : given.exp_avgs)[i].mutable_data_ptr<float>();
    s.out_exp_avg_sq = (outputs ? outputs->exp_avg_sqs : given.exp_avg_sqs)[i].mutable_data_ptr<float>();
    if (!given.lowp_outs.empty()) s.lowp_out = static_cast<uint16_t*>(given.lowp_outs[i].mutable_data_ptr());
    s.param = given.params[i].const_data_ptr<float>();
    s.grad = given.grads[i].const_data_ptr();
    s.exp_avg = given.exp_avgs[i].const_data_ptr<float>();
    s.exp_avg_sq = given.exp_avg_sqs[i].const_data_ptr<float>();
    s.numel = numel;
    s.num_main = numel - num_tail;
    const double grad_scale = given.unscale * given.clip_coefficient;
    s.scalars = is_cuda_order ? make_scalars_of_cuda(h, grad_scale, given.decoupled)
                              : make_scalars(h, grad_scale, given.decoupled);
    call.segments.push_back(s);
  }
  return call;
}

}  // namespace chunkmem
