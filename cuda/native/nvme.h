// Commands of NVMe (Base 2.0, 3.3.3.1 and 4.1; NVM Command Set 1.0, 3.2.4 and 3.2.6).
#pragma once

#include "ring_layout.h"

namespace reprise {

// One read or write.
struct Transfer {
  uint32_t operation;
  uint32_t namespace_id;
  uint64_t address;  // for the controller
  uint64_t block;
  uint32_t blocks;
  uint32_t bytes;
  uint32_t id;
};

// Returns the second entry of a PRP pair. The first is the address. Pages after the second one are listed in `list`, a
// page of `list_controller` for the controller; a transfer has at most 512 of them.
REPRISE_BOTH inline uint64_t second_prp(const Transfer& transfer, uint64_t* list, uint64_t list_controller) {
  const uint64_t first_bytes = PAGE_BYTES - transfer.address % PAGE_BYTES;
  if (transfer.bytes <= first_bytes) return 0;
  const uint64_t second = transfer.address + first_bytes;
  const uint64_t left = transfer.bytes - first_bytes;
  if (left <= PAGE_BYTES) return second;
  const uint64_t pages = (left + PAGE_BYTES - 1) / PAGE_BYTES;
  for (uint64_t page = 0; page < pages; page++) store_relaxed(list + page, second + page * PAGE_BYTES);
  return list_controller;
}

// Writes a submission queue entry with an SGL data block: the descriptor lies in the command.
REPRISE_BOTH inline void write_entry(uint64_t* entry, const Transfer& transfer, uint32_t psdt, uint64_t first,
                                     uint64_t second) {
  const uint64_t start = transfer.operation | psdt << 14 | transfer.id << 16;
  store_pair(entry, start | static_cast<uint64_t>(transfer.namespace_id) << 32, 0);
  store_pair(entry + 2, 0, first);
  store_pair(entry + 4, second, transfer.block);
  store_pair(entry + 6, transfer.blocks - 1, 0);
}

REPRISE_BOTH inline void write_sgl_entry(uint64_t* entry, const Transfer& transfer) {
  write_entry(entry, transfer, 1, transfer.address, transfer.bytes);
}

REPRISE_BOTH inline void write_prp_entry(uint64_t* entry, const Transfer& transfer, uint64_t* list,
                                         uint64_t list_controller) {
  write_entry(entry, transfer, 0, transfer.address, second_prp(transfer, list, list_controller));
}

// The last dword of a completion: identifier, phase bit, status field (Base 2.0, 3.3.3.2).
REPRISE_BOTH inline uint32_t completion_id(uint32_t last) { return last & 0xffff; }
REPRISE_BOTH inline uint32_t completion_phase(uint32_t last) { return last >> 16 & 1; }
REPRISE_BOTH inline uint32_t completion_status(uint32_t last) { return last >> 17; }

}  // namespace reprise
