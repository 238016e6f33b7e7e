// A warp that drives one queue pair of a ring: it takes batches, builds commands, and ends contexts.
//
// Lane 0 decides; all lanes build entries and take completions. State of a warp lies in `Warp`, which all its lanes
// share (shared memory on a GPU). Values that control loops are read between two `sync_lanes`, so lanes never diverge
// there. The order of memory accesses is explained in docs/GPU.md.
#pragma once

#include "nvme.h"
#include "ring_layout.h"

namespace reprise {

constexpr uint32_t NONE = 0xffffffff;
constexpr uint32_t DEPTH_MAX = 64;
// Polls without a completion before the warp pauses, and the lengths of pauses.
constexpr uint32_t SPINS = 16;
constexpr uint32_t PAUSE_NS = 32;
constexpr uint32_t BUSY_PAUSE_NS = 4096;
constexpr uint32_t IDLE_PAUSE_NS = 65536;
// Rounds between two looks at deadlines and cancellations.
constexpr uint32_t CHECK_ROUNDS = 64;

struct Warp {
  RingHeader* header;
  Queue* queue;
  uint8_t* shared;
  Slot* slots;
  uint16_t* free;
  BatchProgress* progress;
  uint32_t* statuses;
  uint32_t tail, head, phase, free_head, free_tail, taken, completed;
  // The batch of which contexts are submitted, the next of them, and the next command of it.
  uint32_t current, next_context, next_part, current_count;
  uint32_t active_count, finished_count;
  uint32_t request, broken, violation, victim, reason;
  uint32_t given_up, given_up_count;
  uint64_t commands, doorbells, polls, ended;
  uint32_t active[DEPTH_MAX];
  uint32_t finished[DEPTH_MAX];
  uint32_t flags[LANES];
  uint32_t parts[LANES];
  uint32_t last[LANES];
};

REPRISE_BOTH inline Batch* batch_of(const Warp& w, uint32_t index) {
  return reinterpret_cast<Batch*>(w.shared + w.header->batches_offset + index * BATCH_BYTES);
}

REPRISE_BOTH inline const Context* context_of(const Warp& w, uint32_t batch, uint32_t index) {
  return reinterpret_cast<const Context*>(batch_of(w, batch) + 1) + index;
}

REPRISE_BOTH inline uint32_t free_slots(const Warp& w) { return w.free_tail - w.free_head; }
REPRISE_BOTH inline uint32_t in_flight(const Warp& w) { return w.queue->entries - 1 - free_slots(w) - w.given_up; }

// Ends a context. The last one of a batch finishes the batch.
REPRISE_BOTH inline void end_context(Warp& w, uint32_t batch, uint32_t context, uint32_t code) {
  BatchProgress& progress = w.progress[batch];
  store_relaxed(w.statuses + batch * CONTEXTS_MAX + context, ENDED | code);
  if (code != 0) add_local(&progress.failed, 1);
  if (add_local(&progress.remaining, 0u - 1) == 1) w.finished[add_local(&w.finished_count, 1)] = batch;
}

// Ends commands of a context. The first error of them is that of the context.
REPRISE_BOTH inline void end_parts(Warp& w, uint32_t batch, uint32_t context, uint32_t count, uint32_t code) {
  uint32_t* parts = &w.progress[batch].parts[context];
  while (code != 0) {
    const uint32_t seen = add_local(parts, 0);
    if (seen >> 16 != 0 || exchange_local(parts, seen, seen | code << 16)) break;
  }
  const uint32_t before = add_local(parts, 0u - count);
  if ((before & 0xffff) == count) end_context(w, batch, context, before >> 16);
}

// Reports finished batches to the CPU: results and statuses first, then the number of completions.
REPRISE_BOTH inline void post_finished(Warp& w) {
  sync_lanes();
  if (w.finished_count == 0) return;
  sync_lanes();
  FIRST_LANE {
    const uint64_t now = now_ns();
    auto* completed = reinterpret_cast<uint32_t*>(w.shared + w.queue->completed_offset);
    auto* results = reinterpret_cast<BatchResult*>(w.shared + w.header->results_offset);
    for (uint32_t i = 0; i < w.finished_count; i++) {
      const uint32_t batch = w.finished[i];
      const BatchProgress& progress = w.progress[batch];
      store_relaxed(&results[batch].failed, progress.failed);
      store_relaxed(&results[batch].given_up, progress.given_up);
      store_relaxed(&results[batch].started_ns, progress.started_ns);
      store_relaxed(&results[batch].ended_ns, now);
      uint32_t kept = 0;
      for (uint32_t j = 0; j < w.active_count; j++) {
        if (w.active[j] != batch) w.active[kept++] = w.active[j];
      }
      w.active_count = kept;
      store_relaxed(completed + w.completed % w.header->depth, batch);
      w.completed++;
    }
    w.finished_count = 0;
    store_release(&w.queue->completed, w.completed);
  }
  sync_lanes();
}

// Lane 0 takes the next batch if none is being submitted.
REPRISE_BOTH inline void take_batch(Warp& w) {
  FIRST_LANE {
    if (w.current == NONE && w.active_count < w.header->depth && load_acquire(&w.queue->issued) != w.taken) {
      const auto* issued = reinterpret_cast<const uint32_t*>(w.shared + w.queue->issued_offset);
      const uint32_t index = load_relaxed(issued + w.taken % w.header->depth);
      w.taken++;
      // A process that writes an impossible index or count harms its own ring only.
      const uint32_t count = index < w.header->depth ? batch_of(w, index)->count : 0;
      if (count >= 1 && count <= CONTEXTS_MAX) {
        BatchProgress& progress = w.progress[index];
        progress.remaining = count;
        progress.failed = 0;
        progress.given_up = 0;
        progress.started_ns = now_ns();
        const uint64_t timeout = batch_of(w, index)->timeout_ns;
        progress.deadline_ns = timeout == 0 ? ~0ull : progress.started_ns + timeout;
        w.active[w.active_count++] = index;
        w.current = index;
        w.current_count = count;
        w.next_context = 0;
        w.next_part = 0;
      }
    }
  }
  sync_lanes();
}

// Returns the number of commands of a context; 0 if the context is invalid.
REPRISE_BOTH inline uint32_t parts_of(const Warp& w, uint32_t operation, const Context& context) {
  const uint32_t block = 1u << w.queue->block_power;
  const bool valid = context.kind == 0 && context.length > 0 && context.length <= context.bytes &&
                     context.length % block == 0 && context.address % 4 == 0 && (operation == 1 || operation == 2);
  const uint32_t parts = valid ? (context.length - 1) / w.queue->transfer_max + 1 : 0;
  return parts <= PARTS_MAX ? parts : 0;
}

// Builds a command: one lane for each.
REPRISE_BOTH inline void submit_part(Warp& w, uint32_t lane, uint32_t index, uint32_t part) {
  const Queue& queue = *w.queue;
  const Batch& batch = *batch_of(w, w.current);
  const Context& context = *context_of(w, w.current, index);
  const uint32_t slot = w.free[(w.free_head + lane) & queue.free_mask];
  const uint32_t id = w.slots[slot].word & 0xffff;
  w.slots[slot].owner = w.current << 16 | index;
  w.slots[slot].word = id | SLOT_BUSY;
  const uint64_t from = static_cast<uint64_t>(part) * queue.transfer_max;
  const uint64_t left = context.length - from;
  Transfer transfer;
  transfer.operation = batch.operation;
  transfer.namespace_id = batch.namespace_id;
  transfer.address = context.address + from;
  transfer.block = context.block + (from >> queue.block_power);
  transfer.bytes = left < queue.transfer_max ? static_cast<uint32_t>(left) : queue.transfer_max;
  transfer.blocks = transfer.bytes >> queue.block_power;
  transfer.id = id;
  uint32_t at = w.tail + lane;
  if (at >= queue.entries) at -= queue.entries;
  auto* entry = reinterpret_cast<uint64_t*>(queue.submissions + static_cast<uint64_t>(at) * SQE_BYTES);
  if (queue.sgl != 0) {
    write_sgl_entry(entry, transfer);
  } else {
    const uint64_t page = static_cast<uint64_t>(slot) * PAGE_BYTES;
    write_prp_entry(entry, transfer, reinterpret_cast<uint64_t*>(queue.lists + page), queue.lists_controller + page);
  }
}

// After the lanes have built `count` commands: lane 0 moves on.
REPRISE_BOTH inline void advance(Warp& w, uint32_t count) {
  w.tail += count;
  if (w.tail >= w.queue->entries) w.tail -= w.queue->entries;
  w.free_head += count;
  w.commands += count;
}

// Submits up to 32 commands of the current batch: one of each of several contexts, or several of one context.
REPRISE_BOTH inline void submit_group(Warp& w) {
  const uint32_t operation = batch_of(w, w.current)->operation;
  FOR_LANES(lane) {
    const uint32_t index = w.next_context + lane;
    const uint32_t parts =
        index < w.current_count ? parts_of(w, operation, *context_of(w, w.current, index)) : NONE;
    w.parts[lane] = parts;
    w.flags[lane] = parts == 1;
  }
  sync_lanes();
  const uint32_t single = leading_lanes(w.flags);
  const uint32_t room = free_slots(w);
  const uint32_t parts = w.parts[0];
  const uint32_t most = single > 0 ? single : parts - w.next_part;
  const uint32_t limit = room < LANES ? room : LANES;
  const uint32_t count = most < limit ? most : limit;
  if (single > 0) {
    FOR_LANES(lane) {
      if (lane < count) {
        w.progress[w.current].parts[w.next_context + lane] = 1;
        submit_part(w, lane, w.next_context + lane, 0);
      }
    }
    sync_lanes();
    FIRST_LANE {
      advance(w, count);
      w.next_context += count;
    }
  } else if (parts == 0) {
    FIRST_LANE {
      end_context(w, w.current, w.next_context, REASON_INVALID);
      w.next_context++;
    }
  } else {
    FIRST_LANE {
      if (w.next_part == 0) w.progress[w.current].parts[w.next_context] = parts;
    }
    sync_lanes();
    FOR_LANES(lane) {
      if (lane < count) submit_part(w, lane, w.next_context, w.next_part + lane);
    }
    sync_lanes();
    FIRST_LANE {
      advance(w, count);
      w.next_part += count;
      if (w.next_part == parts) {
        w.next_part = 0;
        w.next_context++;
      }
    }
  }
  sync_lanes();
  FIRST_LANE {
    if (w.next_context == w.current_count) w.current = NONE;
  }
  sync_lanes();
}

// Submits what fits of the current batch, and rings one doorbell for it. A batch that does not fit is continued when a
// quarter of the queue is free, so that doorbells stay few.
REPRISE_BOTH inline bool submit(Warp& w) {
  if (w.current == NONE) return false;
  const uint32_t quarter = (w.queue->entries + 3) / 4;
  const uint32_t left = w.current_count - w.next_context;
  const uint32_t wanted = left < quarter && w.next_part == 0 ? left : quarter;
  const uint32_t room = free_slots(w);
  if (room == 0 || (room < wanted && in_flight(w) > 0)) return false;
  const uint32_t before = w.tail;
  const uint64_t commands = w.commands;
  sync_lanes();
  while (w.current != NONE && free_slots(w) > 0) submit_group(w);
  FIRST_LANE {
    if (w.tail != before || w.commands != commands) {
      ring_doorbell(reinterpret_cast<uint32_t*>(w.queue->submission_doorbell), w.tail);
      w.doorbells++;
    }
  }
  post_finished(w);
  return true;
}

// Takes one completion: one lane for each. Only a completion with the identifier of the command in the slot ends it.
REPRISE_BOTH inline void take_completion(Warp& w, uint32_t last, uint32_t queue_id) {
  const uint32_t id = completion_id(last);
  const uint32_t index = id & SLOT_MASK;
  bool known = queue_id == w.queue->id && index < w.queue->entries - 1;
  const uint32_t word = known ? w.slots[index].word : 0;
  const uint32_t owner = known ? w.slots[index].owner : 0;
  known = known && (word & 0xffff) == id && (word & (SLOT_BUSY | SLOT_GIVEN_UP)) != 0 &&
          exchange_local(&w.slots[index].word, word, (id + (1u << SLOT_BITS)) & 0xffff);
  if (!known) {
    w.violation = 1;
    return;
  }
  w.free[add_local(&w.free_tail, 1) & w.queue->free_mask] = static_cast<uint16_t>(index);
  if ((word & SLOT_GIVEN_UP) != 0) {
    add_local(&w.given_up, 0u - 1);
    return;
  }
  const uint32_t status = completion_status(last);
  end_parts(w, owner >> 16, owner & 0xffff, 1, (status & 0x7ff) == 0 ? 0 : status);
}

// Takes completions; returns whether there were any.
REPRISE_BOTH inline bool poll(Warp& w) {
  const uint32_t entries = w.queue->entries;
  auto* completions = reinterpret_cast<uint32_t*>(w.queue->completions);
  uint32_t total = 0;
  uint32_t count = 0;
  do {
    const uint32_t head = w.head;
    const uint32_t phase = w.phase;
    FOR_LANES(lane) {
      const bool wraps = head + lane >= entries;
      const uint32_t at = wraps ? head + lane - entries : head + lane;
      const uint32_t last = lane < entries ? load_acquire(completions + at * 4 + 3) : 0;
      w.last[lane] = last;
      w.flags[lane] = lane < entries && completion_phase(last) == (wraps ? phase ^ 1 : phase);
    }
    sync_lanes();
    count = leading_lanes(w.flags);
    FOR_LANES(lane) {
      if (lane < count) {
        const uint32_t at = head + lane >= entries ? head + lane - entries : head + lane;
        take_completion(w, w.last[lane], load_relaxed(completions + at * 4 + 2) >> 16);
      }
    }
    sync_lanes();
    FIRST_LANE {
      w.polls++;
      w.ended += count;
      w.head = head + count;
      if (w.head >= entries) {
        w.head -= entries;
        w.phase = phase ^ 1;
      }
    }
    sync_lanes();
    total += count;
  } while (count == LANES && total < entries && w.violation == 0);
  if (total == 0) return false;
  FIRST_LANE { ring_doorbell(reinterpret_cast<uint32_t*>(w.queue->completion_doorbell), w.head); }
  post_finished(w);
  return true;
}

// Ends the contexts of the current batch that have no command yet.
REPRISE_BOTH inline void end_unsubmitted(Warp& w, uint32_t reason) {
  const uint32_t batch = w.current;
  sync_lanes();
  FIRST_LANE {
    if (w.next_part > 0) {
      const uint32_t operation = batch_of(w, batch)->operation;
      const uint32_t parts = parts_of(w, operation, *context_of(w, batch, w.next_context));
      end_parts(w, batch, w.next_context, parts - w.next_part, reason);
      w.next_context++;
    }
  }
  sync_lanes();
  FOR_LANES(lane) {
    for (uint32_t index = w.next_context + lane; index < w.current_count; index += LANES) {
      end_context(w, batch, index, reason);
    }
  }
  sync_lanes();
  FIRST_LANE { w.current = NONE; }
  sync_lanes();
}

// Gives up the commands of a batch. Their slots stay taken until the controller ends them.
REPRISE_BOTH inline void give_up(Warp& w, uint32_t batch, uint32_t reason) {
  auto* ids = reinterpret_cast<uint32_t*>(w.shared + w.queue->given_up_offset);
  FOR_LANES(lane) {
    for (uint32_t index = lane; index < w.queue->entries - 1; index += LANES) {
      const uint32_t word = w.slots[index].word;
      const uint32_t owner = w.slots[index].owner;
      if ((word & SLOT_BUSY) == 0 || owner >> 16 != batch) continue;
      w.slots[index].word = (word & 0xffff) | SLOT_GIVEN_UP;
      const uint32_t at = add_local(&w.given_up_count, 1);
      if (at < w.queue->entries) store_relaxed(ids + at, word & 0xffff);
      add_local(&w.given_up, 1);
      add_local(&w.progress[batch].given_up, 1);
      end_parts(w, batch, owner & 0xffff, 1, reason);
    }
  }
  sync_lanes();
}

// Ends a batch before its time: what has no command yet, and then, unless the batch is cancelled, its commands.
REPRISE_BOTH inline void end_batch(Warp& w, uint32_t batch, uint32_t reason) {
  if (w.current == batch) end_unsubmitted(w, reason);
  if (reason != REASON_CANCELLED) give_up(w, batch, reason);
  sync_lanes();
  FIRST_LANE {
    w.queue->given_up = w.given_up;
    const uint32_t most = w.queue->entries;
    store_release(&w.queue->given_up_count, w.given_up_count < most ? w.given_up_count : most);
  }
  post_finished(w);
}

// Ends all batches.
REPRISE_BOTH inline void end_all(Warp& w, uint32_t reason) {
  while (w.active_count > 0) {
    const uint32_t batch = w.active[0];
    sync_lanes();
    end_batch(w, batch, reason);
  }
}

// Ends batches whose deadline has passed, and cancels those that the CPU has cancelled.
REPRISE_BOTH inline void check_limits(Warp& w) {
  for (;;) {
    FIRST_LANE {
      w.victim = NONE;
      const uint64_t now = now_ns();
      for (uint32_t i = 0; i < w.active_count && w.victim == NONE; i++) {
        const uint32_t batch = w.active[i];
        const bool is_late = w.progress[batch].deadline_ns <= now;
        const bool is_cancelled = w.current == batch && load_relaxed(&batch_of(w, batch)->cancel) != 0;
        if (!is_late && !is_cancelled) continue;
        w.victim = batch;
        w.reason = is_late ? REASON_TIMED_OUT : REASON_CANCELLED;
      }
    }
    sync_lanes();
    const uint32_t victim = w.victim;
    const uint32_t reason = w.reason;
    sync_lanes();
    if (victim == NONE) return;
    end_batch(w, victim, reason);
  }
}

// A queue that the CPU has created (again): all slots are free.
REPRISE_BOTH inline void reset_slots(Warp& w) {
  const uint32_t slots = w.queue->entries - 1;
  FOR_LANES(lane) {
    for (uint32_t index = lane; index < slots; index += LANES) {
      w.slots[index].word = index;
      w.slots[index].owner = 0;
      w.free[index] = static_cast<uint16_t>(index);
    }
  }
  sync_lanes();
  FIRST_LANE {
    w.tail = 0;
    w.head = 0;
    w.phase = 1;
    w.free_head = 0;
    w.free_tail = slots;
    w.given_up = 0;
    w.given_up_count = 0;
    w.broken = 0;
    w.queue->known_epoch = w.queue->epoch;
    w.queue->broken = 0;
    w.queue->given_up = 0;
    store_release(&w.queue->given_up_count, 0);
  }
  sync_lanes();
}

REPRISE_BOTH inline void start_warp(Warp& w, uint8_t* shared, uint32_t index) {
  FIRST_LANE {
    w.shared = shared;
    w.header = reinterpret_cast<RingHeader*>(shared);
    Queue* queue = reinterpret_cast<Queue*>(shared + w.header->queues_offset) + index;
    auto* work = reinterpret_cast<uint8_t*>(w.header->work);
    w.queue = queue;
    w.slots = reinterpret_cast<Slot*>(work + queue->slots_offset);
    w.free = reinterpret_cast<uint16_t*>(work + queue->free_offset);
    w.progress = reinterpret_cast<BatchProgress*>(work + w.header->progress_offset);
    w.statuses = reinterpret_cast<uint32_t*>(shared + w.header->statuses_offset);
    w.tail = queue->tail;
    w.head = queue->head;
    w.phase = queue->phase;
    w.free_head = queue->free_head;
    w.free_tail = queue->free_tail;
    w.taken = queue->taken;
    w.completed = queue->completed;
    w.given_up = queue->given_up;
    w.given_up_count = queue->given_up_count;
    w.broken = queue->broken;
    w.commands = queue->commands;
    w.doorbells = queue->doorbells;
    w.polls = queue->polls;
    w.ended = queue->ended;
    w.current = NONE;
    w.active_count = 0;
    w.finished_count = 0;
    w.violation = 0;
  }
  sync_lanes();
  if (w.queue->known_epoch != w.queue->epoch) {
    sync_lanes();
    reset_slots(w);
  }
}

// Writes what the CPU reads at any time.
REPRISE_BOTH inline void publish(Warp& w) {
  FIRST_LANE {
    Queue& queue = *w.queue;
    store_relaxed(&queue.given_up, w.given_up);
    store_relaxed(&queue.commands, w.commands);
    store_relaxed(&queue.doorbells, w.doorbells);
    store_relaxed(&queue.polls, w.polls);
    store_relaxed(&queue.ended, w.ended);
  }
}

// Keeps the state for the next launch.
REPRISE_BOTH inline void stop_warp(Warp& w) {
  publish(w);
  FIRST_LANE {
    Queue& queue = *w.queue;
    queue.tail = w.tail;
    queue.head = w.head;
    queue.phase = w.phase;
    queue.free_head = w.free_head;
    queue.free_tail = w.free_tail;
    queue.taken = w.taken;
    store_release(&queue.state, STATE_PARKED);
  }
  sync_lanes();
}

// The queue cannot be used until the CPU has created it again.
REPRISE_BOTH inline void break_queue(Warp& w) {
  FIRST_LANE {
    w.violation = 0;
    w.broken = 1;
    store_release(&w.queue->broken, 1);
  }
  sync_lanes();
  end_all(w, REASON_VIOLATION);
}

// One round; returns whether anything was done.
REPRISE_BOTH inline bool run_round(Warp& w) {
  take_batch(w);
  if (w.broken != 0) {
    const bool had = w.active_count > 0;
    sync_lanes();
    end_all(w, REASON_VIOLATION);
    return had;
  }
  const bool submitted = submit(w);
  const bool polled = free_slots(w) < w.queue->entries - 1 && poll(w);
  if (w.violation != 0) {
    sync_lanes();
    break_queue(w);
  }
  return submitted || polled;
}

// Reports whether the warp ends: at once, or when there is nothing to do.
REPRISE_BOTH inline bool is_over(Warp& w) {
  FIRST_LANE {
    w.request = load_acquire(&w.queue->request);
    // Nothing is left if the CPU has issued nothing since.
    if (w.request == REQUEST_DRAIN && (w.active_count > 0 || load_acquire(&w.queue->issued) != w.taken)) {
      w.request = REQUEST_RUN;
    }
  }
  sync_lanes();
  const bool over = w.request != REQUEST_RUN;
  sync_lanes();
  return over;
}

REPRISE_BOTH inline void run_queue(Warp& w, uint8_t* shared, uint32_t index) {
  start_warp(w, shared, index);
  FIRST_LANE { store_release(&w.queue->state, STATE_RUNS); }
  uint32_t idle = 0;
  for (uint32_t round = 0;; round++) {
    // The request may lie on the other side of a bus: a busy queue looks seldom.
    if ((idle > 0 || round % SPINS == 0) && is_over(w)) break;
    if (run_round(w)) {
      idle = 0;
    } else {
      const uint32_t step = idle < SPINS ? 0 : (idle - SPINS) / 4;
      const uint32_t most = in_flight(w) > 0 ? BUSY_PAUSE_NS : IDLE_PAUSE_NS;
      const uint32_t pause = step < 12 ? PAUSE_NS << step : IDLE_PAUSE_NS;
      idle++;
      publish(w);
      pause_for(pause < most ? pause : most);
    }
    if (round % CHECK_ROUNDS == 0 || (idle > 0 && idle % SPINS == 0) || idle > CHECK_ROUNDS) check_limits(w);
    sync_lanes();
  }
  end_all(w, REASON_PARKED);
  stop_warp(w);
}

}  // namespace reprise
