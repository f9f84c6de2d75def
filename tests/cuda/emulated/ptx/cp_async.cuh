// kernels/ptx/cp_async.cuh for emulate.h.
#pragma once
#include "ptx/smem.cuh"

namespace plait::ptx {

inline const unsigned char* opaque(const unsigned char* address) { return address; }
inline void cp_async_16(unsigned smem, const void* global, int bytes) {
  unsigned char* to = emulate::dynamic_smem + smem;
  emulate::check_aligned(to, 16);
  if (bytes > 0) emulate::check_aligned(global, 16);
  emulate::cta->copy(to, global, bytes);
}
inline void cp_async_16_if(bool wanted, unsigned smem, const void* global, int bytes) {
  if (wanted) cp_async_16(smem, global, bytes);
}
inline void cp_async_16(unsigned smem, const void* global) { cp_async_16(smem, global, 16); }
inline void cp_async_commit() { emulate::cta->commit_copies(); }
template <int kPending>
void cp_async_wait() {
  emulate::cta->wait_copies(kPending);
}
inline void cp_async_wait_all() {
  emulate::cta->commit_copies();
  emulate::cta->wait_copies(0);
}

}  // namespace plait::ptx
