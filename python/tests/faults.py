"""What tests do to an agent, and how they wait for what comes of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from cluster import Agent

from reprise import Client, Layout, Namespace


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
        size = device.seek(0, os.SEEK_END)
        for page in range(0, size, 4096):
            device.seek(page + 2048)
            byte = device.read(1)
            if byte and byte != b"\0":
                device.seek(page + 2048)
                device.write(bytes([byte[0] ^ 1]))
        device.flush()
        os.fsync(device.fileno())
