// What an update by blocks is given, checked, as plain pointers and numbers: shared by all back ends. The messages name
// the argument.
#pragma once
#include "arguments.h"
#include "block_math.h"

namespace chunkmem {

struct BlockSegment {
  const void* param;
  const void* grad;
  const void* exp_avg;
  const void* exp_avg_sq;
  void* out_param;  // this and the next two may be the same memory as above
  void* out_exp_avg;
  void* out_exp_avg_sq;
  uint16_t* lowp_out;  // null if there is none
  int64_t numel;
  int64_t num_main;
  uint64_t key;
  AdamScalars scalars;
};

struct BlockCall {
  std::vector<BlockSegment> segments;
  bool has_codes = true;  // else states are in fp32
  ScalarType param_type = ScalarType::Float;
  ScalarType grad_type = ScalarType::Float;
  ScalarType out_type = ScalarType::Undefined;
};

// Where the scales of a tensor begin, behind its codes, and the bytes of both.
CHUNKMEM_INLINE int64_t scales_begin(int64_t numel) { return (numel + 3) / 4 * 4; }
CHUNKMEM_INLINE int64_t num_blocks_of(int64_t numel) { return (numel + kCodeBlock - 1) / kCodeBlock; }
inline int64_t codes_nbytes(int64_t numel) { return scales_begin(numel) + 4 * num_blocks_of(numel); }

inline void check_like(const char* name, const Tensors& tensors, const Tensors& params, ScalarType type,
                       bool is_codes) {
  check_length(name, tensors.size(), params.size(), false);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string which = std::string(name) + "[" + std::to_string(i) + "]";
    if (tensors[i].scalar_type() != type) refuse(which + " has another dtype than the call takes");
    if (tensors[i].device() != params[0].device()) {
      refuse(which + " is on another device than the first tensor of the call");
    }
    if (!tensors[i].is_contiguous()) refuse(which + " is not contiguous");
    const int64_t numel = is_codes ? codes_nbytes(params[i].numel()) : params[i].numel();
    if (tensors[i].numel() != numel) {
      refuse(which + " has " + std::to_string(tensors[i].numel()) + " elements instead of " + std::to_string(numel));
    }
  }
}

inline BlockCall make_block_call(const AdamArguments& given, const Outputs& outputs, const std::vector<int64_t>& keys) {
  BlockCall call;
  if (given.params.empty()) return call;
  check_no_powers(given);
  const ScalarType type = call.param_type = given.params[0].scalar_type();
  if (type != ScalarType::Float && type != ScalarType::BFloat16) {
    refuse("params[0] has a dtype that is not one of float32, bfloat16");
  }
  if (given.grads.empty() || given.exp_avgs.empty()) {
    refuse("grads or exp_avgs has 0 entries for some tensors in params");
  }
  const ScalarType states = given.exp_avgs[0].scalar_type();
  call.has_codes = states == ScalarType::Byte;
  if (!call.has_codes && states != ScalarType::Float) {
    refuse("exp_avgs[0] has a dtype that is not one of uint8, float32");
  }
  call.grad_type = given.grads[0].scalar_type();
  check_tensors("grads", given.grads, given.params[0], true, true);
  const std::pair<NamedTensors, ScalarType> lists[] = {{{"params", &given.params}, type},
                                                       {{"grads", &given.grads}, call.grad_type},
                                                       {{"exp_avgs", &given.exp_avgs}, states},
                                                       {{"exp_avg_sqs", &given.exp_avg_sqs}, states},
                                                       {{"out_params", &outputs.params}, type},
                                                       {{"out_exp_avgs", &outputs.exp_avgs}, states},
                                                       {{"out_exp_avg_sqs", &outputs.exp_avg_sqs}, states}};
  for (const auto& [list, dtype] : lists) {
    const bool is_state = list.second != &given.params && list.second != &given.grads && list.second != &outputs.params;
    check_like(list.first, *list.second, given.params, dtype, is_state && call.has_codes);
  }
  if (!given.lowp_outs.empty()) {
    call.out_type = given.lowp_outs[0].scalar_type();
    check_tensors("lowp_outs", given.lowp_outs, given.params[0], false, true);
    check_like("lowp_outs", given.lowp_outs, given.params, call.out_type, false);
  }
  check_numbers(given);
  check_length("keys", keys.size(), given.params.size(), false);
  for (size_t i = 0; i < given.params.size(); ++i) {
    const auto at = [i](const auto& values) { return values[values.size() == 1 ? 0 : i]; };
    const HyperParameters h{at(given.lr),  at(given.beta1),        at(given.beta2),
                            at(given.eps), at(given.weight_decay), at(given.step)};
    const int64_t numel = given.params[i].numel();
    BlockSegment s{};
    // What is written comes first: torch may copy a tensor when it is first asked for memory to write to.
    s.out_param = outputs.params[i].mutable_data_ptr();
    s.out_exp_avg = outputs.exp_avgs[i].mutable_data_ptr();
    s.out_exp_avg_sq = outputs.exp_avg_sqs[i].mutable_data_ptr();
    if (!given.lowp_outs.empty()) s.lowp_out = static_cast<uint16_t*>(given.lowp_outs[i].mutable_data_ptr());
    s.param = given.params[i].const_data_ptr();
    s.grad = given.grads[i].const_data_ptr();
    s.exp_avg = given.exp_avgs[i].const_data_ptr();
    s.exp_avg_sq = given.exp_avg_sqs[i].const_data_ptr();
    s.numel = numel;
    s.num_main = numel - (given.tail_width ? numel % given.tail_width : 0);
    s.key = uint64_t(keys[i]);
    s.scalars = make_scalars(h, given.unscale * given.clip_coefficient, given.decoupled);
    call.segments.push_back(s);
  }
  return call;
}

}  // namespace chunkmem
