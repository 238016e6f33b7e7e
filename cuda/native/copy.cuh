// Copy kernels: a warp takes units of work in steps of the number of warps, so that any grid copies everything.
#pragma once

#include "copy.h"

namespace reprise {

__device__ inline uint32_t global_warp() { return (blockIdx.x * blockDim.x + threadIdx.x) / kLanes; }
__device__ inline uint32_t global_warps() { return gridDim.x * blockDim.x / kLanes; }

template <bool kGather>
__device__ inline void copy_grid(const CopyArguments& arguments) {
  const uint32_t units = copy_units(arguments);
  const uint32_t lane = threadIdx.x % kLanes;
  for (uint32_t unit = global_warp(); unit < units; unit += global_warps()) {
    copy_unit<kGather>(arguments, unit, lane);
  }
}

template <CopyMode kMode>
__device__ inline void copy_grid_checked(const CopyArguments& arguments) {
  // Aligned here: the driver places its own memory before that of the kernel, so the start has no such alignment.
  __shared__ uint32_t storage[kTableWords + kTableAlignment / 4];
  const uint32_t start = static_cast<uint32_t>(__cvta_generic_to_shared(storage));
  uint32_t* table = storage + (0u - start) % kTableAlignment / 4;
  crc_fill_table(table, threadIdx.x, blockDim.x);
  __syncthreads();
  const uint32_t units = arguments.job_count * arguments.objects;
  const uint32_t lane = threadIdx.x % kLanes;
  for (uint32_t unit = global_warp(); unit < units; unit += global_warps()) {
    uint32_t sum = copy_object<kMode>(arguments, unit, lane, table);
    for (uint32_t distance = kLanes / 2; distance != 0; distance /= 2) {
      sum ^= __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    }
    if (lane == 0) copy_finish(arguments, unit, ~sum);
  }
}

}  // namespace reprise

// Blocks have 256 threads, or 1,024 where the grid is bounded: then one block uses all of its SM.
#define REPRISE_COPY_KERNEL extern "C" __global__ void __launch_bounds__(1024)

REPRISE_COPY_KERNEL reprise_gather(const __grid_constant__ reprise::CopyArguments arguments) {
  reprise::copy_grid<true>(arguments);
}

REPRISE_COPY_KERNEL reprise_scatter(const __grid_constant__ reprise::CopyArguments arguments) {
  reprise::copy_grid<false>(arguments);
}

REPRISE_COPY_KERNEL reprise_gather_checked(const __grid_constant__ reprise::CopyArguments arguments) {
  reprise::copy_grid_checked<reprise::CopyMode::kGather>(arguments);
}

REPRISE_COPY_KERNEL reprise_scatter_checked(const __grid_constant__ reprise::CopyArguments arguments) {
  reprise::copy_grid_checked<reprise::CopyMode::kScatter>(arguments);
}

REPRISE_COPY_KERNEL reprise_checksum(const __grid_constant__ reprise::CopyArguments arguments) {
  reprise::copy_grid_checked<reprise::CopyMode::kChecksumOfSlots>(arguments);
}

// Marks the SMs on which blocks of the grid run. Each block runs for `nanoseconds`, so that blocks spread over all SMs.
extern "C" __global__ void reprise_mark_sms(uint32_t* used, uint32_t count, uint64_t nanoseconds) {
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  if (threadIdx.x == 0 && sm < count) atomicAdd(used + sm, 1u);
  uint64_t began;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
  uint64_t now = began;
  while (now - began < nanoseconds) {
    __nanosleep(100);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  }
}
