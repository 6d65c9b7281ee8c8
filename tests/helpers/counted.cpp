// An allocator for torch's tensors in RAM that counts as an accelerator's does: the bytes of now, and their peak.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <unordered_map>

namespace {

std::mutex mutex;
struct Block {
  int64_t nbytes;
  int64_t run;
};

std::unordered_map<void*, Block>& blocks() {
  static auto* all = new std::unordered_map<void*, Block>;  // memory may outlive what is destroyed at exit
  return *all;
}
int64_t run = 0;  // what is left of earlier runs does not count in this one
int64_t now_nbytes = 0;
int64_t peak_nbytes = 0;

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto block = blocks().find(data);
    now_nbytes -= block->second.run == run ? block->second.nbytes : 0;
    blocks().erase(block);
  }
  std::free(data);
}

struct Counted final : at::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    if (nbytes != 0) {
      if (posix_memalign(&data, 64, nbytes) != 0) {
        throw std::bad_alloc();
      }
      const std::lock_guard<std::mutex> guard(mutex);
      blocks()[data] = {static_cast<int64_t>(nbytes), run};
      now_nbytes += static_cast<int64_t>(nbytes);
      peak_nbytes = std::max(peak_nbytes, now_nbytes);
    }
    return {data, data, &release, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }
};

Counted counted;
at::Allocator* usual = nullptr;

}  // namespace

extern "C" void counted_begin() {
  const std::lock_guard<std::mutex> guard(mutex);
  ++run;
  now_nbytes = peak_nbytes = 0;
  usual = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&counted, 255);
}

extern "C" void counted_end() { c10::SetCPUAllocator(usual, 255); }

extern "C" int64_t counted_now() {
  const std::lock_guard<std::mutex> guard(mutex);
  return now_nbytes;
}

// The peak since the last call.
extern "C" int64_t counted_take_peak() {
  const std::lock_guard<std::mutex> guard(mutex);
  const int64_t peak = peak_nbytes;
  peak_nbytes = now_nbytes;
  return peak;
}
