"""What tests do to an agent, and how they wait for what comes of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from cluster import Agent

from reprise import Client, Layout, Namespace

PAGE = 4096


def eventually(holds: Callable[[], bool], within: float = 20.0) -> None:
    """Waits until something holds."""
    give_up = time.monotonic() + within
    while not holds():
        assert time.monotonic() < give_up, "it did not come to hold in time"
        time.sleep(0.05)


def freeze(agent: Agent) -> None:
    """Stops an agent where it is: its socket stays open, and nothing answers from now on."""
    agent.signal(signal.SIGSTOP)
    assert agent.child is not None
    # The signal is only on its way; this waits until it has stopped.
    os.waitid(os.P_PID, agent.child.pid, os.WSTOPPED | os.WNOWAIT)


def thaw(agent: Agent) -> None:
    """Lets a stopped agent go on."""
    agent.signal(signal.SIGCONT)


def observer(agent: Agent) -> Client:
    """A session beside the engine's, to ask the agent what it has done."""
    layout = Layout(layers=1, parts=1, kv_heads=1, head_dim=8, dtype="fp32", tokens_per_block=16)
    namespace = Namespace(
        model="observer", revision="1", layout=layout, hash_algorithm="none", hash_seed="", engine_format="none"
    )
    return Client(str(agent.socket), namespace, layout)


def drop_dram(agent: Client) -> None:
    """Waits until everything in DRAM was on NVMe and is there no more."""

    def is_empty() -> bool:
        agent.trim()
        stats = agent.stats()
        return stats["dram_blocks"] == 0

    eventually(is_empty)


def damage(pool: Path) -> None:
    """Flips a bit in every page of a pool's payloads."""
    with pool.open("r+b") as device:
        flip(device, range(0, device.seek(0, os.SEEK_END), PAGE))
        os.fsync(device.fileno())


def damage_memory(agent: Agent) -> None:
    """Flips a bit in every page of the blocks in an agent's DRAM."""
    assert agent.child is not None
    process = Path(f"/proc/{agent.child.pid}")
    regions = [line.split()[0] for line in (process / "maps").read_text().splitlines() if "/memfd:reprise" in line]
    assert regions, "the agent has no arena"
    with (process / "mem").open("r+b", buffering=0) as memory:
        for region in regions:
            begin, end = (int(address, 16) for address in region.split("-"))
            flip(memory, range(begin, end, PAGE))


def flip(bytes_of: BinaryIO, pages: range) -> None:
    """Flips a bit in the middle of every page that is in use."""
    for page in pages:
        bytes_of.seek(page + PAGE // 2)
        byte = bytes_of.read(1)
        if byte and byte != b"\0":
            bytes_of.seek(page + PAGE // 2)
            bytes_of.write(bytes([byte[0] ^ 1]))
