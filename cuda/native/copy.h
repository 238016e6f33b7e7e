// Copies between paged KV memory of an engine and slots, for GPU and host.
//
// A block of KV is one piece (object) for each layer and each part (K and V, or one part for MLA). In a slot, the
// objects of a block are contiguous, in order of layer and part. In paged memory, object `o` of block `b` is at
// `bases[o] + b * block_stride`. This covers all layouts: one tensor for each layer or for all layers, K and V split or
// interleaved, and blocks first or layers first.
#pragma once

#include "crc.h"

namespace reprise {

// One block of paged memory and its slot.
struct CopyJob {
  uint32_t block;
  uint32_t slot;
};

// Arguments of all copy kernels; `cuda/src/kernels.rs` has the same structure.
//
// All addresses, strides and sizes are multiples of 16 bytes. `objects` objects of each job are copied, from
// `first_object`. Arrays of checksums have `job_count * objects` entries, in order of jobs.
struct CopyArguments {
  uint64_t bases;         // addresses (uint64_t) of the objects of block 0; the index is the object
  uint64_t block_stride;  // bytes
  uint64_t slots;         // address of slot 0
  uint64_t slot_stride;   // bytes
  uint64_t jobs;          // CopyJob[job_count]
  uint64_t expected;      // uint32_t CRC32C of each object, or 0
  uint64_t checksums;     // uint32_t CRC32C of each object (output), or 0
  uint64_t mismatches;    // uint32_t for each job: the number of objects with another CRC32C than expected, or 0
  uint32_t job_count;
  uint32_t first_object;
  uint32_t objects;
  uint32_t object_bytes;
};
static_assert(sizeof(CopyArguments) == 80, "shared with Rust");

// Bytes that a warp copies before it takes the next unit of work: 8 independent accesses of each lane.
constexpr uint32_t kVectorsAtOnce = 8;
constexpr uint32_t kChunkBytes = kVectorsAtOnce * kRowBytes;

template <typename T>
REPRISE_BOTH inline T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

struct CopyPair {
  const uint8_t* source;
  uint8_t* destination;
};

// Addresses of an object of a job. `kGather`: from pages to slots.
template <bool kGather>
REPRISE_BOTH inline CopyPair copy_pair(const CopyArguments& arguments, uint32_t job, uint32_t object) {
  const CopyJob entry = pointer<const CopyJob>(arguments.jobs)[job];
  const uint32_t index = arguments.first_object + object;
  const uint64_t page = pointer<const uint64_t>(arguments.bases)[index] + entry.block * arguments.block_stride;
  const uint64_t slot = arguments.slots + entry.slot * arguments.slot_stride +
                        static_cast<uint64_t>(index) * arguments.object_bytes;
  return kGather ? CopyPair{pointer<const uint8_t>(page), pointer<uint8_t>(slot)}
                 : CopyPair{pointer<const uint8_t>(slot), pointer<uint8_t>(page)};
}

REPRISE_BOTH inline uint32_t copy_chunks(const CopyArguments& arguments) {
  return (arguments.object_bytes + kChunkBytes - 1) / kChunkBytes;
}

// Units of work without checksums: one for each chunk of each object.
REPRISE_BOTH inline uint32_t copy_units(const CopyArguments& arguments) {
  return arguments.job_count * arguments.objects * copy_chunks(arguments);
}

// Copies one lane's part of one unit.
template <bool kGather>
REPRISE_BOTH inline void copy_unit(const CopyArguments& arguments, uint32_t unit, uint32_t lane) {
  const uint32_t chunks = copy_chunks(arguments);
  const uint32_t which = unit / chunks;
  const uint32_t start = (unit - which * chunks) * kChunkBytes + lane * kVectorBytes;
  const uint32_t job = which / arguments.objects;
  const CopyPair pair = copy_pair<kGather>(arguments, job, which - job * arguments.objects);
  Vector vectors[kVectorsAtOnce];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (uint32_t index = 0; index < kVectorsAtOnce; ++index) {
    const uint32_t at = start + index * kRowBytes;
    if (at < arguments.object_bytes) vectors[index] = load_vector(pair.source + at);
  }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (uint32_t index = 0; index < kVectorsAtOnce; ++index) {
    const uint32_t at = start + index * kRowBytes;
    if (at < arguments.object_bytes) store_vector(pair.destination + at, vectors[index]);
  }
}

// What a kernel with checksums does with an object.
enum class CopyMode { kGather, kScatter, kChecksumOfSlots };

// Copies one lane's part of one object; returns its part of the checksum.
template <CopyMode kMode>
REPRISE_BOTH inline uint32_t copy_object(const CopyArguments& arguments, uint32_t unit, uint32_t lane,
                                         const uint32_t* table) {
  const uint32_t job = unit / arguments.objects;
  const CopyPair pair = copy_pair<kMode == CopyMode::kGather>(arguments, job, unit - job * arguments.objects);
  constexpr bool kCopy = kMode != CopyMode::kChecksumOfSlots;
  return crc_lane<kCopy>(pair.source, pair.destination, arguments.object_bytes, lane, table);
}

// Stores or compares the checksum of an object; one lane calls it.
REPRISE_BOTH inline void copy_finish(const CopyArguments& arguments, uint32_t unit, uint32_t checksum) {
  if (arguments.checksums != 0) pointer<uint32_t>(arguments.checksums)[unit] = checksum;
  if (arguments.expected == 0 || arguments.mismatches == 0) return;
  if (pointer<const uint32_t>(arguments.expected)[unit] == checksum) return;
  uint32_t* count = pointer<uint32_t>(arguments.mismatches) + unit / arguments.objects;
#if defined(__CUDA_ARCH__)
  atomicAdd(count, 1u);
#else
  __atomic_fetch_add(count, 1u, __ATOMIC_RELAXED);
#endif
}

}  // namespace reprise
