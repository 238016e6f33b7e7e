"""Faults that tests inject into an agent, and waits for their effects."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from cluster import Agent

from reprise import Client, Layout, Namespace

PAGE = 4096

SLOW_STOPPED_S, SLOW_RUNNING_S = 0.006, 0.002
"""Cycle of a slowed agent: slow enough to observe steps of milliseconds, fast enough to answer matches in time."""


def eventually(holds: Callable[[], bool], within: float = 20.0) -> None:
    """Waits until the condition is true."""
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.05)


def freeze(agent: Agent) -> None:
    """Stops an agent: its socket stays open, but it does not answer."""
    agent.signal(signal.SIGSTOP)
    assert agent.child is not None
    # The signal is asynchronous; wait until the process has stopped.
    os.waitid(os.P_PID, agent.child.pid, os.WSTOPPED | os.WNOWAIT)


def thaw(agent: Agent) -> None:
    """Continues a stopped agent."""
    agent.signal(signal.SIGCONT)


def observer(agent: Agent) -> Client:
    """Opens a separate session, for the agent's statistics."""
    layout = Layout(layers=1, parts=1, kv_heads=1, head_dim=8, dtype="fp32", tokens_per_block=16)
    namespace = Namespace(
        model="observer", revision="1", layout=layout, hash_algorithm="none", hash_seed="", engine_format="none"
    )
    return Client(str(agent.socket), namespace, layout)


def drop_dram(agent: Client) -> None:
    """Waits until all blocks in DRAM were written to NVMe and dropped."""

    def is_empty() -> bool:
        agent.trim()
        return agent.stats()["dram_blocks"] == 0

    try:
        eventually(is_empty, within=60.0)
    except AssertionError as error:
        raise AssertionError(f"blocks stay in DRAM: {agent.stats()}") from error


def damage(pool: Path) -> None:
    """Flips a bit in every page of a pool's payloads."""
    with pool.open("r+b") as device:
        flip(device, range(0, device.seek(0, os.SEEK_END), PAGE))
        os.fsync(device.fileno())


def damage_memory(agent: Agent) -> None:
    """Flips a bit in every page of the blocks in an agent's DRAM."""
    # A block damaged before it is on NVMe is never written there and cannot be dropped.
    with observer(agent) as seen:
        eventually(lambda: seen.stats()["unsaved_blocks"] == 0, within=60.0)
    assert agent.child is not None
    process = Path(f"/proc/{agent.child.pid}")
    regions = [
        line.split()[0] for line in (process / "maps").read_text().splitlines() if "/memfd:reprise-region" in line
    ]
    assert regions, "the agent has no arena"
    with (process / "mem").open("r+b", buffering=0) as memory:
        for region in regions:
            begin, end = (int(address, 16) for address in region.split("-"))
            flip(memory, range(begin, end, PAGE))


def flip(bytes_of: BinaryIO, pages: range) -> None:
    """Flips a bit in the middle of every used page."""
    for page in pages:
        bytes_of.seek(page + PAGE // 2)
        byte = bytes_of.read(1)
        if byte and byte != b"\0":
            bytes_of.seek(page + PAGE // 2)
            bytes_of.write(bytes([byte[0] ^ 1]))


def found_damaged(agent: Client) -> int:
    """Returns the number of damaged blocks that an agent has dropped, in DRAM and on NVMe."""
    stats = agent.stats()
    return stats["dram_corrupt_blocks"] + stats["corrupt_blocks"]


def served(agent: Client) -> int:
    """Returns the number of blocks that an agent has served to engines of its node."""
    stats = agent.stats()
    return stats["hit_blocks_own_dram"] + stats["hit_blocks_own_nvme"]


Moment = Callable[[Client], Callable[[], bool]]
"""Function that observes an agent from its call on, and returns a check whether the moment is reached."""


def has_served(blocks: int) -> Moment:
    """Moment at which an agent has served this number of further blocks."""

    def begin(seen: Client) -> Callable[[], bool]:
        wanted = served(seen) + blocks
        return lambda: served(seen) >= wanted

    return begin


def is_saving(seen: Client) -> Callable[[], bool]:
    """Moment at which an agent's memory has reserved blocks that are being filled."""
    return lambda: seen.stats()["reserved_bytes"] > 0


@contextlib.contextmanager
def signalled_agent(agent: Agent, number: signal.Signals, moment: Moment) -> Iterator[None]:
    """Sends a signal to an agent at a moment, and restores the agent at the end."""
    with observer(agent) as seen:
        is_reached = moment(seen)
        is_over = threading.Event()

        def watch() -> None:
            while not is_reached() and not is_over.wait(0.001):
                pass
            agent.signal(number)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield
        finally:
            is_over.set()
            watching.join()
            if number == signal.SIGKILL:
                agent.restart()
            else:
                thaw(agent)


@contextlib.contextmanager
def slowed_agent(agent: Agent) -> Iterator[None]:
    """Lets an agent run only a small part of the time."""
    is_over = threading.Event()

    def slow_down() -> None:
        while not is_over.wait(SLOW_RUNNING_S):
            agent.signal(signal.SIGSTOP)
            is_over.wait(SLOW_STOPPED_S)
            agent.signal(signal.SIGCONT)

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def hanging_agent(agent: Agent, moment: Moment) -> Iterator[None]:
    """Lets an agent run a small part of the time until a moment, then stops it, and continues it at the end."""
    with observer(agent) as seen:
        is_reached = moment(seen)
        is_enough, is_over = threading.Event(), threading.Event()

        def slow_down() -> None:
            while not is_over.wait(SLOW_RUNNING_S):
                agent.signal(signal.SIGSTOP)
                if is_enough.is_set():
                    return
                is_over.wait(SLOW_STOPPED_S)
                thaw(agent)

        def watch() -> None:
            while not is_reached() and not is_over.wait(0.001):
                pass
            is_enough.set()

        threads = [threading.Thread(target=slow_down), threading.Thread(target=watch)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            # Lets the watcher get a pending answer of the stopped agent.
            thaw(agent)
            for thread in threads:
                thread.join()
            thaw(agent)
