// Slabs that are kept for reuse, and that torch's allocator may have back. Where none of its free blocks fits, it calls
// what is registered with it before it asks the driver for memory, and an allocation of the model fails if the driver
// has none. So a kept slab is written down here, by its storage, and its memory freed if the device has little left.
//
// A callback runs in the allocating thread, under the allocator's lock and without Python's. So nothing here calls
// Python or takes memory, and what frees memory does so either under that lock, or without ours.
//
// The declarations below are those of c10/cuda/CUDACachingAllocator.h, which cannot be read without CUDA's headers.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Registry.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace c10 {
class FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};
}  // namespace c10

namespace {

using Storage = c10::intrusive_ptr<c10::StorageImpl>;
using Callbacks = c10::Registry<std::string, std::unique_ptr<c10::FreeMemoryCallback>>;

// Of the device's memory: with more free, the driver has what most allocations ask for.
constexpr std::size_t kLittle = 8;

struct Kept {
  Storage storage;
  c10::Stream stream;          // that its memory is handed on in the order of
  std::vector<void*> events;   // the ends of copies that may use it yet
};

struct AllKept {
  std::mutex mutex;
  std::unordered_map<void*, Kept> by_storage;
};

AllKept& all_kept() {
  static auto* all = new AllKept;  // storages outlive what is destroyed at the end of the process
  return *all;
}

std::int64_t give_back(c10::Device device) {
  AllKept& all = all_kept();
  std::int64_t nbytes = 0;
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (auto it = all.by_storage.begin(); it != all.by_storage.end();) {
    Kept& kept = it->second;
    if (kept.storage->device() != device) {
      ++it;
      continue;
    }
    if (!kept.events.empty()) {
      const c10::impl::VirtualGuardImpl guard(device.type());
      for (void* event : kept.events) {
        guard.block(event, kept.stream);
      }
    }
    nbytes += static_cast<std::int64_t>(kept.storage->nbytes());
    kept.storage->set_nbytes(0);
    kept.storage->set_data_ptr_noswap(at::DataPtr(nullptr, device));
    it = all.by_storage.erase(it);
  }
  return nbytes;
}

class GiveBack : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    {
      AllKept& all = all_kept();
      const std::lock_guard<std::mutex> lock(all.mutex);
      if (all.by_storage.empty()) {
        return false;
      }
    }
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    const c10::Device device = guard.getDevice();
    const auto [free, total] = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
    return free < total / kLittle && give_back(device) > 0;
  }
};

}  // namespace

// Writes a storage down; `events` are those of the device, `stream_id` a stream of it.
extern "C" void chunkmem_keep(void* storage, void** events, std::int64_t num_events, std::int64_t stream_id) {
  auto kept = Storage::reclaim_copy(static_cast<c10::StorageImpl*>(storage));
  const c10::Stream stream(c10::Stream::UNSAFE, kept->device(), stream_id);
  AllKept& all = all_kept();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_storage.insert_or_assign(storage, Kept{std::move(kept), stream, std::vector<void*>(events, events + num_events)});
}

// Crosses a storage out, if it is written down; returns whether it has its memory.
extern "C" int chunkmem_take(void* storage) {
  AllKept& all = all_kept();
  Storage kept;  // given up without the lock
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_storage.find(storage);
  if (found != all.by_storage.end()) {
    kept = std::move(found->second.storage);
    all.by_storage.erase(found);
  }
  return static_cast<c10::StorageImpl*>(storage)->nbytes() != 0;
}

// Frees the memory of all that is written down of a device; returns its bytes.
extern "C" std::int64_t chunkmem_give_back(int device_type, int device_index) {
  return give_back(c10::Device(static_cast<c10::DeviceType>(device_type), static_cast<c10::DeviceIndex>(device_index)));
}

// Registers with torch's allocator of CUDA, whose callbacks `callbacks_of` returns.
extern "C" void chunkmem_offer(Callbacks* (*callbacks_of)()) {
  constexpr char kName[] = "chunkmem";
  if (!callbacks_of()->Has(kName)) {
    callbacks_of()->Register(kName, []() -> std::unique_ptr<c10::FreeMemoryCallback> {
      return std::make_unique<GiveBack>();
    });
  }
}
