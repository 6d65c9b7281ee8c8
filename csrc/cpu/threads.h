// Over which threads a call is spread.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace chunkmem {

// Runs `body(begin, end)` over pieces of `grain` of [0, total), on the calling thread and up to `num_threads` - 1
// others that end with the call. What one of them throws is thrown again here.
template <typename Body>
void run_on_own_threads(int64_t total, int64_t grain, int64_t num_threads, const Body& body) {
  const int64_t num_pieces = (total + grain - 1) / grain;
  const int64_t num_others = std::min(num_threads, num_pieces) - 1;
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr thrown;
  // Whoever is free takes the next piece: overlapped with backward a thread may not get a core for a while.
  const auto work = [&] {
    try {
      for (int64_t piece; (piece = next.fetch_add(1)) < num_pieces;) {
        body(piece * grain, std::min(total, (piece + 1) * grain));
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      thrown = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  try {
    if (num_others > 0) others.reserve(size_t(num_others));
    while (int64_t(others.size()) < num_others) others.emplace_back(work);
  } catch (const std::exception&) {
    // The process may have no more threads, or no memory for them: those that there are take all pieces.
  }
  work();
  for (std::thread& other : others) other.join();
  if (thrown) std::rethrow_exception(thrown);
}

// The same; with 0 threads on torch's, as many as it is set to use, each one piece of at least `grain`.
template <typename Body>
void for_pieces(int64_t total, int64_t grain, int64_t num_threads, const Body& body) {
  if (num_threads == 0) {
    torch::stable::parallel_for(0, total, grain, body);
  } else {
    run_on_own_threads(total, grain, num_threads, body);
  }
}

}  // namespace chunkmem
