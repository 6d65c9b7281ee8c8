// Exchanges the memory of two torch storages, one of which is empty: what UntypedStorage._swap_data_ptr_ does from
// torch 2.12 on. It reads the layout of c10::StorageImpl, so it is built against, and kept per, one torch version: the
// one exception to the stable ABI. Only c10 headers are used, and the storages come as plain addresses, so that it
// compiles in seconds and needs no Python headers.
#include <c10/core/StorageImpl.h>

#include <utility>

extern "C" int chunkmem_exchange_storages(void* first, void* second) {
  auto* a = static_cast<c10::StorageImpl*>(first);
  auto* b = static_cast<c10::StorageImpl*>(second);
  const size_t a_nbytes = a->nbytes();
  const size_t b_nbytes = b->nbytes();
  if (a_nbytes != 0 && b_nbytes != 0) {
    return 1;
  }
  at::DataPtr b_memory = b->set_data_ptr(a->set_data_ptr(at::DataPtr(nullptr, a->device())));
  a->set_data_ptr_noswap(std::move(b_memory));
  a->set_nbytes(b_nbytes);
  b->set_nbytes(a_nbytes);
  return 0;
}
