// Structures of a ring in memory. `cuda/src/ring/layout.rs` has the same ones; a test compares sizes and offsets.
//
// Two pieces of memory: `shared`, which the CPU accesses too, and `work`, which only the ring's processor accesses. The
// CPU writes offsets into the header, so that this source calculates none.
#pragma once

#include "platform.h"

namespace reprise {

constexpr uint32_t RING_MAGIC = 0x52474e52;
constexpr uint32_t RING_VERSION = 1;
constexpr uint32_t CONTEXTS_MAX = 2048;
constexpr uint32_t LANES = 32;
// An identifier of a command: 12 bits of slot, 4 bits of generation, as in the driver.
constexpr uint32_t SLOT_BITS = 12;
constexpr uint32_t SLOT_MASK = (1u << SLOT_BITS) - 1;

// One transfer. The first 16 bytes are an SGL data block descriptor (Base 2.0, 4.1.2.1).
struct alignas(32) Context {
  uint64_t address;  // for the controller
  uint32_t bytes;    // of memory
  uint8_t reserved[3];
  uint8_t kind;       // 0: data block
  uint64_t block;     // first logical block
  uint32_t length;    // of the transfer in bytes, at most `bytes`
  uint32_t checksum;  // CRC32C of the data; the ring passes it on
};
static_assert(sizeof(Context) == 32, "a context has 32 bytes");

// Start of a batch; the CPU writes it. The contexts follow.
struct alignas(64) Batch {
  uint32_t count;  // 1 to CONTEXTS_MAX
  uint32_t operation;  // operation code of NVMe: 1 writes, 2 reads
  uint32_t namespace_id;
  uint32_t cancel;  // set while the batch runs: contexts that were not submitted end as cancelled
  uint64_t timeout_ns;
  uint64_t token;
  uint8_t reserved[32];
};
static_assert(sizeof(Batch) == 64, "a batch starts with 64 bytes");
constexpr uint64_t BATCH_BYTES = sizeof(Batch) + CONTEXTS_MAX * sizeof(Context);

// Result of a batch; the ring writes it.
struct alignas(32) BatchResult {
  uint32_t failed;    // contexts without success
  uint32_t given_up;  // commands that the controller may still run
  uint64_t started_ns;
  uint64_t ended_ns;
  uint8_t reserved[8];
};
static_assert(sizeof(BatchResult) == 32, "a result has 32 bytes");

// Status of a context: 0 while it runs; then ENDED, and either the status field of NVMe or RING_REASON and a reason.
constexpr uint32_t ENDED = 1u << 31;
constexpr uint32_t RING_REASON = 1u << 15;
enum Reason : uint32_t {
  REASON_CANCELLED = RING_REASON | 1,
  REASON_TIMED_OUT = RING_REASON | 2,
  REASON_VIOLATION = RING_REASON | 3,
  REASON_INVALID = RING_REASON | 4,
  REASON_PARKED = RING_REASON | 5,
};

// What the CPU wants of a queue, and what the queue does.
enum Request : uint32_t { REQUEST_RUN = 0, REQUEST_DRAIN = 1, REQUEST_PARK = 2 };
enum State : uint32_t { STATE_PARKED = 0, STATE_RUNS = 1 };

// A queue pair. Each part has cache lines of its own: constant, written by the CPU, written by the ring, private.
struct alignas(128) Queue {
  // Constant while the queue runs; addresses are those of the ring's processor if not stated otherwise.
  uint64_t submissions;
  uint64_t completions;
  uint64_t submission_doorbell;
  uint64_t completion_doorbell;
  uint64_t lists;             // pages of PRP lists, one for each slot; 0 with SGL
  uint64_t lists_controller;  // the same for the controller
  uint32_t entries;
  uint32_t id;
  uint32_t block_power;   // a logical block has 1 << block_power bytes
  uint32_t transfer_max;  // bytes of a command, a multiple of 4,096
  uint32_t sgl;           // 1: SGL, 0: PRP
  uint32_t epoch;         // changes when the queue pair was created again
  uint64_t slots_offset;  // in `work`: struct Slot[entries]
  uint64_t free_offset;   // in `work`: uint16_t[free_mask + 1]
  uint32_t free_mask;
  uint32_t reserved0;
  uint64_t issued_offset;     // in `shared`: uint32_t[depth], indices of batches
  uint64_t completed_offset;  // in `shared`: uint32_t[depth]
  // Written by the CPU.
  alignas(128) uint32_t issued;  // number of batches issued until now
  uint32_t request;
  // Written by the ring.
  alignas(128) uint32_t completed;  // number of batches completed until now
  uint32_t state;
  uint32_t given_up;  // commands that were given up and have not ended
  uint32_t broken;    // the controller has violated the specification
  uint64_t given_up_offset;  // written by the CPU: in `shared`, uint32_t[entries], identifiers that were given up
  uint32_t given_up_count;   // number of them since the start of the epoch, at most entries
  uint32_t reserved1;
  uint64_t commands;
  uint64_t doorbells;
  uint64_t polls;
  uint64_t ended;
  // Private to the ring: kept between two launches.
  alignas(128) uint32_t tail;
  uint32_t head;
  uint32_t phase;
  uint32_t free_head;
  uint32_t free_tail;
  uint32_t taken;  // batches taken until now
  uint32_t known_epoch;
};
static_assert(sizeof(Queue) == 512, "a queue has 512 bytes");

struct alignas(128) RingHeader {
  uint32_t magic;
  uint32_t version;
  uint32_t depth;   // batches, a power of two
  uint32_t queues;
  uint64_t work;    // address of `work`
  uint64_t queues_offset;
  uint64_t batches_offset;
  uint64_t statuses_offset;   // uint32_t[depth][CONTEXTS_MAX]
  uint64_t results_offset;    // BatchResult[depth]
  uint64_t progress_offset;   // in `work`: BatchProgress[depth]
};
static_assert(sizeof(RingHeader) == 128, "a header has 128 bytes");

// A slot of a queue.
struct Slot {
  uint32_t word;   // identifier of the current or next command, and flags
  uint32_t owner;  // batch and context
};
constexpr uint32_t SLOT_BUSY = 1u << 16;
constexpr uint32_t SLOT_GIVEN_UP = 1u << 17;

// Progress of a batch.
struct alignas(128) BatchProgress {
  uint32_t remaining;  // contexts that have not ended
  uint32_t failed;
  uint32_t given_up;
  uint32_t reserved;
  uint64_t deadline_ns;
  uint64_t started_ns;
  // Bits 0 to 15: commands that have not ended; bits 16 to 31: the first error.
  alignas(128) uint32_t parts[CONTEXTS_MAX];
};
static_assert(sizeof(BatchProgress) == 128 + 4 * CONTEXTS_MAX, "parts follow");

// Submission and completion queue entries (Base 2.0, 3.3.3).
constexpr uint32_t SQE_BYTES = 64;
constexpr uint32_t CQE_BYTES = 16;
constexpr uint64_t PAGE_BYTES = 4096;
constexpr uint32_t PARTS_MAX = 0xffff;

}  // namespace reprise
