// The host build of the ring: one thread is the warp of a queue.
#include "ring.h"

extern "C" {

// Drives a queue until the CPU requests an end. `shared` is the memory of a ring whose header is valid.
void reprise_ring_run(uint8_t* shared, uint32_t queue) {
  reprise::Warp warp;
  reprise::run_queue(warp, shared, queue);
}

// Writes sizes and offsets of the structures, for a test that compares them with those of Rust; returns their number.
size_t reprise_ring_layout(uint64_t* values, size_t room) {
  using namespace reprise;
  const uint64_t all[] = {
      sizeof(Context),
      offsetof(Context, block),
      offsetof(Context, length),
      offsetof(Context, checksum),
      sizeof(Batch),
      offsetof(Batch, cancel),
      offsetof(Batch, timeout_ns),
      offsetof(Batch, token),
      BATCH_BYTES,
      sizeof(BatchResult),
      offsetof(BatchResult, started_ns),
      sizeof(RingHeader),
      offsetof(RingHeader, work),
      offsetof(RingHeader, progress_offset),
      sizeof(Queue),
      offsetof(Queue, entries),
      offsetof(Queue, slots_offset),
      offsetof(Queue, issued_offset),
      offsetof(Queue, issued),
      offsetof(Queue, request),
      offsetof(Queue, completed),
      offsetof(Queue, state),
      offsetof(Queue, given_up_offset),
      offsetof(Queue, given_up_count),
      offsetof(Queue, commands),
      sizeof(Slot),
      sizeof(BatchProgress),
      DEPTH_MAX,
  };
  const size_t count = sizeof(all) / sizeof(all[0]);
  for (size_t i = 0; i < count && i < room; i++) values[i] = all[i];
  return count;
}

// Builds one command, for tests: 8 words of the entry. `list` has 512 words.
void reprise_ring_build(uint64_t* entry, uint64_t* list, uint64_t list_controller, uint32_t sgl, uint32_t operation,
                        uint64_t address, uint64_t block, uint32_t bytes, uint32_t id) {
  reprise::Transfer transfer;
  transfer.operation = operation;
  transfer.namespace_id = 1;
  transfer.address = address;
  transfer.block = block;
  transfer.bytes = bytes;
  transfer.blocks = bytes / 512;
  transfer.id = id;
  if (sgl != 0) {
    reprise::write_sgl_entry(entry, transfer);
  } else {
    reprise::write_prp_entry(entry, transfer, list, list_controller);
  }
}

}  // extern "C"
