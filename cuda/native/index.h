// A hash index of blocks as a GPU would keep it: open addressing, one thread per key.
//
// It exists for a comparison: Reprise keeps its index on the CPU, as the paper does (Tutti, Fig. 3).
#pragma once

#include "platform.h"

namespace reprise {

// States of an entry. A writer claims an empty entry, and publishes it with release semantics.
enum EntryState : uint32_t { kEmpty = 0, kClaimed = 1, kPublished = 2 };

// Key of 16 bytes, place of the block, state.
struct alignas(32) IndexEntry {
  uint64_t high;
  uint64_t low;
  uint64_t place;
  uint32_t state;
  uint32_t unused;
};
static_assert(sizeof(IndexEntry) == 32, "two entries are one line of memory");

// Key of a block; keys are uniform, so `low` is its hash.
struct IndexKey {
  uint64_t high;
  uint64_t low;
};
static_assert(sizeof(IndexKey) == 16, "a key has 16 bytes");

// Answer for a key that is not in the index.
constexpr uint64_t kNoPlace = ~0ull;

// Claims an empty entry; returns the state before.
REPRISE_BOTH inline uint32_t claim(uint32_t* state) {
#if defined(__CUDA_ARCH__)
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(state), "r"(uint32_t{kEmpty}), "r"(uint32_t{kClaimed})
               : "memory");
  return before;
#else
  uint32_t before = kEmpty;
  __atomic_compare_exchange_n(state, &before, kClaimed, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return before;
#endif
}

// Inserts a key, or replaces its place. Returns false if the table of `mask + 1` entries is full.
REPRISE_BOTH inline bool index_insert(IndexEntry* entries, uint64_t mask, IndexKey key, uint64_t place) {
  for (uint64_t step = 0; step <= mask; ++step) {
    IndexEntry* entry = entries + ((key.low + step) & mask);
    uint32_t state = claim(&entry->state);
    if (state == kEmpty) {
      entry->high = key.high;
      entry->low = key.low;
      entry->place = place;
      store_release(&entry->state, kPublished);
      return true;
    }
    // Another thread writes the key of this entry.
    while (state == kClaimed) {
      pause_for(20);
      state = load_acquire(&entry->state);
    }
    if (entry->high == key.high && entry->low == key.low) {
      entry->place = place;
      return true;
    }
  }
  return false;
}

// Returns the place of a key, or `kNoPlace`. Not at the same time as insertions.
REPRISE_BOTH inline uint64_t index_find(const IndexEntry* entries, uint64_t mask, IndexKey key) {
  for (uint64_t step = 0; step <= mask; ++step) {
    const IndexEntry* entry = entries + ((key.low + step) & mask);
    if (entry->state != kPublished) return kNoPlace;
    if (entry->high == key.high && entry->low == key.low) return entry->place;
  }
  return kNoPlace;
}

}  // namespace reprise
