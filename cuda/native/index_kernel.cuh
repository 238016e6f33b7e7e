// Kernels of the index: one thread per key.
#pragma once

#include "index.h"

extern "C" __global__ void reprise_index_insert_kernel(reprise::IndexEntry* entries, uint64_t mask,
                                                       const reprise::IndexKey* keys, const uint64_t* places,
                                                       uint64_t count, unsigned long long* inserted) {
  const uint64_t at = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x;
  if (at < count && reprise::index_insert(entries, mask, keys[at], places[at])) atomicAdd(inserted, 1ull);
}

extern "C" __global__ void reprise_index_find_kernel(const reprise::IndexEntry* entries, uint64_t mask,
                                                     const reprise::IndexKey* keys, uint64_t* places, uint64_t count) {
  const uint64_t at = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x;
  if (at < count) places[at] = reprise::index_find(entries, mask, keys[at]);
}
