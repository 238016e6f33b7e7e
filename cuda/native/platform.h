// Differences between a GPU and the host, for sources that compile for both (C++17).
//
// On a GPU, memory that CPU or controller access needs system scope. A doorbell is a store to a device's register
// (`st.mmio`), which is neither combined nor duplicated. A warp has 32 lanes; on the host, one thread is the warp and
// loops over the lanes, so operations between lanes need no instruction there.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define REPRISE_BOTH __host__ __device__
#else
#define REPRISE_BOTH
#include <ctime>
#if defined(__linux__)
#include <sched.h>
#endif
#endif

// Runs a statement once for each lane. What one lane writes is visible for others after `sync_lanes`.
#if defined(__CUDA_ARCH__)
#define FOR_LANES(lane) if (const uint32_t lane = threadIdx.x % 32; true)
#define FIRST_LANE if (threadIdx.x % 32 == 0)
#else
#define FOR_LANES(lane) for (uint32_t lane = 0; lane < 32; lane++)
#define FIRST_LANE
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

// Loads a word that another processor may write at the same time.
REPRISE_BOTH inline uint32_t load_relaxed(const uint32_t* word) {
#if defined(__CUDA_ARCH__)
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

// Stores a word that another processor reads; a later `store_release` makes it visible.
template <typename Word>
REPRISE_BOTH inline void store_relaxed(Word* word, Word value) {
#if defined(__CUDA_ARCH__)
  *reinterpret_cast<volatile Word*>(word) = value;
#else
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
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

// Stores two words with one access where the processor has such a store.
REPRISE_BOTH inline void store_pair(uint64_t* words, uint64_t first, uint64_t second) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v2.u64 [%0], {%1, %2};" : : "l"(words), "l"(first), "l"(second) : "memory");
#else
  __atomic_store_n(words, first, __ATOMIC_RELAXED);
  __atomic_store_n(words + 1, second, __ATOMIC_RELAXED);
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

// Waits until all lanes are here; what they wrote is visible for all lanes then.
REPRISE_BOTH inline void sync_lanes() {
#if defined(__CUDA_ARCH__)
  __syncwarp();
#endif
}

// Returns the number of lanes from the first one on that have their flag set. `flags` is shared by the lanes.
REPRISE_BOTH inline uint32_t leading_lanes(const uint32_t* flags) {
#if defined(__CUDA_ARCH__)
  const uint32_t set = __ballot_sync(0xffffffff, flags[threadIdx.x % 32] != 0);
  return set == 0xffffffff ? 32 : __ffs(static_cast<int>(~set)) - 1;
#else
  uint32_t count = 0;
  while (count < 32 && flags[count] != 0) count++;
  return count;
#endif
}

// Atomic operations among the lanes of one warp, on memory that no other processor accesses.
REPRISE_BOTH inline uint32_t add_local(uint32_t* word, uint32_t value) {
#if defined(__CUDA_ARCH__)
  return atomicAdd(word, value);
#else
  const uint32_t old = *word;
  *word = old + value;
  return old;
#endif
}

REPRISE_BOTH inline bool exchange_local(uint32_t* word, uint32_t expected, uint32_t value) {
#if defined(__CUDA_ARCH__)
  return atomicCAS(word, expected, value) == expected;
#else
  if (*word != expected) return false;
  *word = value;
  return true;
#endif
}

// Returns a time in nanoseconds that only increases.
REPRISE_BOTH inline uint64_t now_ns() {
#if defined(__CUDA_ARCH__)
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
#elif defined(__CUDACC__)
  return 0;  // the host's half of device code is never called
#else
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
#endif
}

// Waits for about this time without use of memory bandwidth. On the host, waits of 256 ns and more give the processor
// to other threads, and those of 32 µs and more sleep.
REPRISE_BOTH inline void pause_for(uint32_t nanoseconds) {
#if defined(__CUDA_ARCH__)
  __nanosleep(nanoseconds);
#elif defined(__CUDACC__)
  (void)nanoseconds;
#else
  if (nanoseconds >= 32768) {
    const timespec time = {0, static_cast<long>(nanoseconds)};
    nanosleep(&time, nullptr);
  } else if (nanoseconds >= 256) {
    sched_yield();
  } else {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
#endif
}

}  // namespace reprise
