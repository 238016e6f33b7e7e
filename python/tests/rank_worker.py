"""Worker process of one rank, for :mod:`test_ranks`: ``rank_worker.py SOCKET RANK RANKS FIRST LAST``.

Begins to save the rank's parts of the blocks ``FIRST..LAST`` layer by layer, and prints a line when all layers but one are
copied. On a line of input, it fills the last layer and prints the number of committed parts.
"""

from __future__ import annotations

import sys

from conftest import LAYERS, memory_of, tensors
from ranks import namespace_of, part_keys

from reprise import Session, Transfers

LONG_S = 60.0


def main() -> None:
    """Saves the parts."""
    socket, (rank, ranks, first, last) = sys.argv[1], map(int, sys.argv[2:])
    namespace, count = namespace_of(rank, ranks), last - first
    memory = memory_of(tensors(count, seed=rank), namespace.layout)
    with Session(socket, namespace, namespace.layout, name=f"rank-{rank}", timeout=LONG_S) as session:
        assert session.wait_connected(LONG_S)
        with Transfers(session, memory, save_stall=LONG_S, layer_wait=LONG_S, room_wait=LONG_S) as transfers:
            save = transfers.save_by_layers(part_keys(rank, ranks, range(first, last)), range(count))
            transfers.note_filled([save], LAYERS - 1)
            print("copying", flush=True)
            sys.stdin.readline()
            transfers.note_filled([save], LAYERS)
            assert transfers.wait([save], LONG_S)
            (ended,) = transfers.finished()
            print(ended.committed, flush=True)


if __name__ == "__main__":
    main()
