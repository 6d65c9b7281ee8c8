// What the operators are given, checked, as plain pointers and numbers: shared by all back ends. The messages name the
// argument; chunkmem/optim/kernels.py raises the same ones.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "adam_math.h"

namespace chunkmem {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Doubles = std::vector<double>;

struct Segment {
  float* param;
  const void* grad;
  float* exp_avg;
  float* exp_avg_sq;
  uint16_t* lowp_out;  // null if there is none
  int64_t numel;
  int64_t num_main;        // the others, at the end, are torch's tail
  uint64_t first_element;  // number of the first one, for random bits
  AdamScalars scalars;
};

struct AdamCall {
  std::vector<Segment> segments;
  ScalarType grad_type = ScalarType::Float;
  ScalarType out_type = ScalarType::Undefined;
  bool stochastic = false;
  uint64_t seed = 0;
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

inline AdamCall make_adam_call(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                               const Tensors& exp_avg_sqs, const Tensors& lowp_outs, const Doubles& lr,
                               const Doubles& beta1, const Doubles& beta2, const Doubles& eps,
                               const Doubles& weight_decay, const std::vector<int64_t>& step, double unscale,
                               double clip_coefficient, bool decoupled, std::optional<int64_t> seed,
                               int64_t first_element, int64_t tail_width) {
  const size_t n = params.size();
  const std::pair<const char*, const Tensors*> lists[] = {
      {"params", &params}, {"grads", &grads}, {"exp_avgs", &exp_avgs}, {"exp_avg_sqs", &exp_avg_sqs},
      {"lowp_outs", &lowp_outs}};
  for (const auto& [name, tensors] : lists) {
    const bool is_out = tensors == &lowp_outs;
    if (is_out && tensors->empty()) {
      continue;
    }
    check_length(name, tensors->size(), n, false);
    check_tensors(name, *tensors, params[0], !is_out, is_out || tensors == &grads);
    check_shapes(name, *tensors, params);
  }
  const std::pair<const char*, const Doubles*> numbers[] = {
      {"lr", &lr}, {"beta1", &beta1}, {"beta2", &beta2}, {"eps", &eps}, {"weight_decay", &weight_decay}};
  for (const auto& [name, values] : numbers) {
    check_length(name, values->size(), n, true);
  }
  check_length("step", step.size(), n, true);
  for (size_t i = 0; i < step.size(); ++i) {
    if (step[i] < 1) {
      refuse("step[" + std::to_string(i) + "] is " + std::to_string(step[i]) + "; updates are counted from 1");
    }
  }
  if (tail_width < 0 || first_element < 0) {
    refuse("tail_width and first_element must be at least 0");
  }
  AdamCall call;
  call.grad_type = n ? grads[0].scalar_type() : ScalarType::Float;
  call.out_type = lowp_outs.empty() ? ScalarType::Undefined : lowp_outs[0].scalar_type();
  call.stochastic = seed.has_value();
  call.seed = uint64_t(seed.value_or(0));
  uint64_t element = uint64_t(first_element);
  for (size_t i = 0; i < n; ++i) {
    const auto at = [i](const auto& values) { return values[values.size() == 1 ? 0 : i]; };
    const HyperParameters h{at(lr), at(beta1), at(beta2), at(eps), at(weight_decay), at(step)};
    const int64_t numel = params[i].numel();
    const int64_t num_tail = tail_width ? numel % tail_width : 0;
    call.segments.push_back({params[i].mutable_data_ptr<float>(), grads[i].const_data_ptr(),
                             exp_avgs[i].mutable_data_ptr<float>(), exp_avg_sqs[i].mutable_data_ptr<float>(),
                             lowp_outs.empty() ? nullptr : static_cast<uint16_t*>(lowp_outs[i].mutable_data_ptr()),
                             numel, numel - num_tail, element,
                             make_scalars(h, unscale * clip_coefficient, decoupled)});
    element += uint64_t(numel);
  }
  return call;
}

}  // namespace chunkmem
