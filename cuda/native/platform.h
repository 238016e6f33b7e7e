// Differences between a GPU and the host, for sources that compile for both (C++17).
//
// On a GPU, memory that CPU or controller access needs system scope. A doorbell is a store to a device's register
// (`st.mmio`), which is neither combined nor duplicated.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define REPRISE_BOTH __host__ __device__
#else
#define REPRISE_BOTH
#endif

namespace reprise {

// Loads a word that another processor writes; later accesses are not moved before it.
REPRISE_BOTH inline uint32_t load_acquire(const uint32_t* word) {
#if defined(__CUDA_ARCH__)
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

// Stores a word that another processor reads; earlier accesses are not moved behind it.
REPRISE_BOTH inline void store_release(uint32_t* word, uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

// Makes all earlier stores visible to the whole system, then writes a device's register.
REPRISE_BOTH inline void ring_doorbell(uint32_t* doorbell, uint32_t value) {
#if defined(__CUDA_ARCH__)
  __threadfence_system();
  asm volatile("st.mmio.relaxed.sys.global.u32 [%0], %1;" : : "l"(doorbell), "r"(value) : "memory");
#else
  __atomic_store_n(doorbell, value, __ATOMIC_SEQ_CST);
#endif
}

// Waits for a moment without use of memory bandwidth.
REPRISE_BOTH inline void pause_for(unsigned nanoseconds) {
#if defined(__CUDA_ARCH__)
  __nanosleep(nanoseconds);
#else
  (void)nanoseconds;
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
#endif
}

}  // namespace reprise
