// The host build of the index: one thread that inserts and finds one key after another.
#include "index.h"

extern "C" {

// Returns the number of keys that were inserted.
uint64_t reprise_index_insert(reprise::IndexEntry* entries, uint64_t mask, const reprise::IndexKey* keys,
                              const uint64_t* places, uint64_t count) {
  uint64_t inserted = 0;
  for (uint64_t at = 0; at < count; ++at) {
    if (reprise::index_insert(entries, mask, keys[at], places[at])) ++inserted;
  }
  return inserted;
}

void reprise_index_find(const reprise::IndexEntry* entries, uint64_t mask, const reprise::IndexKey* keys,
                        uint64_t* places, uint64_t count) {
  for (uint64_t at = 0; at < count; ++at) places[at] = reprise::index_find(entries, mask, keys[at]);
}
}
