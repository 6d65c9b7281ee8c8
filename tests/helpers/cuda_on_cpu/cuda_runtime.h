// As much of CUDA as the kernels use, on a CPU: blocks one after the other, and within each its warps. The threads of a
// warp are fibers: each runs until it waits for the others in a shuffle, or ends.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __grid_constant__

using std::isfinite;
using std::min;
using cudaStream_t = void*;

struct float4 {
  alignas(16) float x;
  float y, z, w;
};
struct uint4 {
  alignas(16) uint32_t x;
  uint32_t y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline void __stcs(uint4* to, uint4 value) { *to = value; }

struct Index {
  unsigned x = 0;
};
inline Index blockIdx, threadIdx;

namespace cuda_on_cpu {

constexpr int kLanes = 32;
constexpr size_t kStackNbytes = 128 << 10;

struct Warp {
  std::function<void()> body;
  ucontext_t scheduler;
  ucontext_t lanes[kLanes];
  std::vector<char> stacks = std::vector<char>(kLanes * kStackNbytes);
  bool done[kLanes];
  double given[kLanes];     // to the shuffle that a lane waits in
  double received[kLanes];  // what all had given when the last one came
  int lane = 0;
  unsigned first_thread = 0;
};
inline Warp warp;
inline int64_t num_launches = 0;

inline void run_lane() {
  warp.body();
  warp.done[warp.lane] = true;
}

inline void run_warp() {
  for (int lane = 0; lane < kLanes; ++lane) {
    getcontext(&warp.lanes[lane]);
    warp.lanes[lane].uc_stack.ss_sp = warp.stacks.data() + size_t(lane) * kStackNbytes;
    warp.lanes[lane].uc_stack.ss_size = kStackNbytes;
    warp.lanes[lane].uc_link = &warp.scheduler;
    makecontext(&warp.lanes[lane], run_lane, 0);
    warp.done[lane] = false;
  }
  while (!std::all_of(warp.done, warp.done + kLanes, [](bool done) { return done; })) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (warp.done[lane]) continue;
      warp.lane = lane;
      threadIdx.x = warp.first_thread + unsigned(lane);
      swapcontext(&warp.scheduler, &warp.lanes[lane]);
    }
    std::copy(warp.given, warp.given + kLanes, warp.received);
  }
}

}  // namespace cuda_on_cpu

inline double __shfl_down_sync(unsigned, double value, int by) {
  using cuda_on_cpu::warp;
  const int lane = warp.lane;
  warp.given[lane] = value;
  swapcontext(&warp.lanes[lane], &warp.scheduler);
  return lane + by < cuda_on_cpu::kLanes ? warp.received[lane + by] : value;
}

inline double __shfl_xor_sync(unsigned, double value, int by) {
  using cuda_on_cpu::warp;
  const int lane = warp.lane;
  warp.given[lane] = value;
  swapcontext(&warp.lanes[lane], &warp.scheduler);
  return warp.received[lane ^ by];
}

template <class Body>
void run_on_cpu(unsigned num_blocks, unsigned num_threads, const Body& body) {
  ++cuda_on_cpu::num_launches;
  cuda_on_cpu::warp.body = body;
  for (blockIdx.x = 0; blockIdx.x < num_blocks; ++blockIdx.x) {
    for (unsigned first = 0; first < num_threads; first += cuda_on_cpu::kLanes) {
      cuda_on_cpu::warp.first_thread = first;
      cuda_on_cpu::run_warp();
    }
  }
}
