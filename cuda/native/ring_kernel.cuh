// The ring on a GPU: a warp for each queue pair.
#pragma once

#include "ring.h"

namespace reprise {
// Warps of a block: their states fit into 48 KiB of shared memory.
constexpr uint32_t RING_WARPS_MAX = 16;
static_assert(sizeof(Warp) * RING_WARPS_MAX <= 48 * 1024, "the states of a block lie in shared memory");
}  // namespace reprise

// Drives `count` queues from `first` on: one block has at most RING_WARPS_MAX warps. The grid bounds the SMs that the
// ring uses. A queue without a warp is not driven.
extern "C" __global__ void reprise_ring(uint8_t* shared, uint32_t first, uint32_t count) {
  __shared__ reprise::Warp warps[reprise::RING_WARPS_MAX];
  const uint32_t in_block = threadIdx.x / reprise::LANES;
  const uint32_t index = blockIdx.x * (blockDim.x / reprise::LANES) + in_block;
  if (index < count) reprise::run_queue(warps[in_block], shared, first + index);
}
