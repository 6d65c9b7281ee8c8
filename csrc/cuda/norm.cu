// The norm on CUDA. [Note: Order of the norm] A warp takes a block, a thread a lane. Blocks within one tensor are read
// where they are; pieces of blocks in which tensors meet, or the last one ends, are first put together in fp32. All on
// the current stream; nothing waits for the device.
#include <algorithm>

#include "common.h"

namespace chunkmem {
namespace {

constexpr int kWarp = 32;
static_assert(kNormLanes == kWarp);

__device__ void write_fold(double lane_sum, double* to) {
  for (int width = kWarp / 2; width > 0; width /= 2) lane_sum += __shfl_down_sync(0xffffffffu, lane_sum, width);
  if (threadIdx.x % kWarp == 0) *to = lane_sum;
}

__device__ double sum_squares(const void* block, Dtype dtype, float unscale) {
  double sum = 0.0;
#pragma unroll 8
  for (int i = int(threadIdx.x % kWarp); i < kNormBlock; i += kWarp) {
    const double x = load(block, dtype, i) * unscale;
    sum += x * x;
  }
  return sum;
}

__device__ int64_t warp_index() { return (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp; }

constexpr int kMostRuns = 96, kMostPieces = 96;

// Whole blocks of one tensor.
struct Run {
  const char* data;
  int64_t num_blocks;
  double* sums;
};
using Runs = Batch<Run, kMostRuns>;
static_assert(sizeof(Runs) <= kMostArgumentBytes - 64);

__global__ void whole_blocks(const __grid_constant__ Runs runs, Dtype dtype, float unscale) {
  const Dealt mine = dealt(runs);
  const Run& run = runs.work[mine.piece];
  const int64_t block = (mine.block * kThreads + threadIdx.x) / kWarp;
  if (block >= run.num_blocks) return;
  const int64_t nbytes = dtype == Dtype::kFloat ? 4 : 2;
  write_fold(sum_squares(run.data + block * kNormBlock * nbytes, dtype, unscale), run.sums + block);
}

// A piece of a block that is put together.
struct Piece {
  const char* data;
  int64_t numel;
  float* to;
};
using Pieces = Batch<Piece, kMostPieces>;
static_assert(sizeof(Pieces) <= kMostArgumentBytes - 64);

__global__ void copy_pieces(const __grid_constant__ Pieces pieces, Dtype dtype) {
  const Dealt mine = dealt(pieces);
  const Piece& piece = pieces.work[mine.piece];
  const int64_t i = mine.block * kThreads + threadIdx.x;
  if (i < piece.numel) piece.to[i] = load(piece.data, dtype, i);
}

constexpr int kMostTargets = 256;
struct Targets {  // an argument of a launch, so that nothing has to be copied to the device
  int64_t block[kMostTargets];
};

__global__ void gathered_blocks(const float* data, Targets targets, int num_blocks, float unscale, double* sums) {
  const int64_t block = warp_index();
  if (block >= num_blocks) return;
  write_fold(sum_squares(data + block * kNormBlock, Dtype::kFloat, unscale), sums + targets.block[block]);
}

__global__ void next_level(const double* values, int64_t num_values, double* sums, int64_t num_sums) {
  const int64_t block = warp_index();
  if (block >= num_sums) return;
  double sum = 0.0;
  const int64_t begin = block * kNormBlock, end = min(num_values, begin + kNormBlock);
  for (int64_t i = begin + threadIdx.x % kWarp; i < end; i += kWarp) sum += values[i];
  write_fold(sum, sums + block);
}

__global__ void write_result(const double* sum, double* result) {
  if (threadIdx.x > 0) return;
  result[0] = *sum;
  result[1] = isfinite(*sum) ? 1.0 : 0.0;
}

unsigned thread_blocks_of_warps(int64_t num_warps) { return num_thread_blocks(num_warps * kWarp); }

// Where the pieces of the blocks that are put together come from.
struct Rest {
  struct From {
    const char* data;
    int64_t numel;
    int64_t at;  // among the elements of all these blocks
  };
  std::vector<From> pieces;
  std::vector<int64_t> targets;  // of each such block: which one it is of all
};

// Launches the whole blocks of all tensors; returns what the others consist of.
Rest launch_whole_blocks(const Tensors& grads, float unscale, double* sums, cudaStream_t stream) {
  Rest rest;
  Runs runs;
  const Dtype dtype = dtype_of(grads[0].scalar_type());
  const int64_t nbytes = int64_t(grads[0].element_size());
  const auto launch_runs = [&] {
    if (runs.count > 0) launch(whole_blocks, runs.num_blocks(), stream, runs, dtype, unscale);
    runs = {};
  };
  int64_t begin = 0;
  for (const Tensor& grad : grads) {
    const char* data = static_cast<const char*>(grad.const_data_ptr());
    const int64_t end = begin + grad.numel();
    for (int64_t at = begin; at < end;) {
      const int64_t block = at / kNormBlock, num_blocks = end / kNormBlock - block;
      const char* from = data + (at - begin) * nbytes;
      if (at % kNormBlock == 0 && num_blocks > 0) {
        runs.add({from, num_blocks, sums + block}, thread_blocks_of_warps(num_blocks));
        if (runs.count == kMostRuns) launch_runs();
        at += num_blocks * kNormBlock;
      } else {
        const int64_t numel = std::min(end, (block + 1) * kNormBlock) - at;
        if (rest.targets.empty() || rest.targets.back() != block) rest.targets.push_back(block);
        rest.pieces.push_back({from, numel, int64_t(rest.targets.size() - 1) * kNormBlock + at % kNormBlock});
        at += numel;
      }
    }
    begin = end;
  }
  launch_runs();
  return rest;
}

void launch_gathered_blocks(const Tensors& grads, const Rest& rest, float unscale, double* sums, cudaStream_t stream) {
  const int64_t num_blocks = int64_t(rest.targets.size());
  if (num_blocks == 0) return;
  Tensor gathered = torch::stable::new_zeros(grads[0], {num_blocks * kNormBlock}, ScalarType::Float);
  float* data = gathered.mutable_data_ptr<float>();
  const Dtype dtype = dtype_of(grads[0].scalar_type());
  for (size_t first = 0; first < rest.pieces.size(); first += kMostPieces) {
    Pieces pieces;
    for (size_t i = first; i < std::min(rest.pieces.size(), first + kMostPieces); ++i) {
      const Rest::From& from = rest.pieces[i];
      pieces.add({from.data, from.numel, data + from.at}, num_thread_blocks(from.numel));
    }
    launch(copy_pieces, pieces.num_blocks(), stream, pieces, dtype);
  }
  for (int64_t first = 0; first < num_blocks; first += kMostTargets) {
    const int count = int(std::min<int64_t>(kMostTargets, num_blocks - first));
    Targets targets;
    std::copy_n(rest.targets.begin() + first, count, targets.block);
    launch(gathered_blocks, thread_blocks_of_warps(count), stream, data + first * kNormBlock, targets, count, unscale,
           sums);
  }
}

Tensor norm_and_finite(Tensors grads, double unscale, int64_t num_threads) {
  check_tensors("grads", grads, grads[0], true, true);
  check_num_threads(num_threads);
  const torch::stable::accelerator::DeviceGuard guard(grads[0].get_device_index());
  const cudaStream_t stream = current_stream(grads[0]);
  int64_t numel = 0;
  for (const Tensor& grad : grads) numel += grad.numel();
  int64_t num_sums = std::max<int64_t>(1, (numel + kNormBlock - 1) / kNormBlock);
  Tensor sums = torch::stable::new_zeros(grads[0], {num_sums}, ScalarType::Double);
  const Rest rest = launch_whole_blocks(grads, float(unscale), sums.mutable_data_ptr<double>(), stream);
  launch_gathered_blocks(grads, rest, float(unscale), sums.mutable_data_ptr<double>(), stream);
  while (num_sums > 1) {
    const int64_t num_values = num_sums;
    num_sums = (num_values + kNormBlock - 1) / kNormBlock;
    Tensor next = torch::stable::new_empty(grads[0], {num_sums}, ScalarType::Double);
    launch(next_level, thread_blocks_of_warps(num_sums), stream, sums.mutable_data_ptr<double>(), num_values,
           next.mutable_data_ptr<double>(), num_sums);
    sums = next;
  }
  Tensor result = torch::stable::new_empty(grads[0], {2}, ScalarType::Double);
  launch(write_result, 1, stream, sums.mutable_data_ptr<double>(), result.mutable_data_ptr<double>());
  return result;
}

}  // namespace
}  // namespace chunkmem

STABLE_TORCH_LIBRARY_IMPL(chunkmem, CUDA, m) { m.impl("norm_and_finite", TORCH_BOX(&chunkmem::norm_and_finite)); }
