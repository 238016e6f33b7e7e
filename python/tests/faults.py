"""What tests do to an agent, and how they wait for what comes of it."""

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

CRAWL_STOPPED_S, CRAWL_RUNS_S = 0.006, 0.002
"""How an agent crawls: slow enough that what takes milliseconds can be seen under way, fast enough to answer questions in time."""


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
    # A block that is damaged before it is on NVMe never gets there, and cannot be dropped.
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
    """Flips a bit in the middle of every page that is in use."""
    for page in pages:
        bytes_of.seek(page + PAGE // 2)
        byte = bytes_of.read(1)
        if byte and byte != b"\0":
            bytes_of.seek(page + PAGE // 2)
            bytes_of.write(bytes([byte[0] ^ 1]))


def found_damaged(agent: Client) -> int:
    """Blocks that an agent has found damaged and dropped, in DRAM and on NVMe."""
    stats = agent.stats()
    return stats["dram_corrupt_blocks"] + stats["corrupt_blocks"]


def served(agent: Client) -> int:
    """Blocks that an agent has given to engines of its node."""
    stats = agent.stats()
    return stats["hit_blocks_own_dram"] + stats["hit_blocks_own_nvme"]


Moment = Callable[[Client], Callable[[], bool]]
"""Looks at an agent, and says from then on whether it has come."""


def has_served(blocks: int) -> Moment:
    """When an agent has served so many blocks more."""

    def begin(seen: Client) -> Callable[[], bool]:
        wanted = served(seen) + blocks
        return lambda: served(seen) >= wanted

    return begin


def is_saving(seen: Client) -> Callable[[], bool]:
    """When blocks have room in an agent's memory, and are being filled."""
    return lambda: seen.stats()["reserved_bytes"] > 0


@contextlib.contextmanager
def agent_that_goes(agent: Agent, number: signal.Signals, moment: Moment) -> Iterator[None]:
    """Sends a signal to an agent at a moment; afterwards it is there again."""
    with observer(agent) as seen:
        has_come = moment(seen)
        is_over = threading.Event()

        def watch() -> None:
            while not has_come() and not is_over.wait(0.001):
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
def crawling(agent: Agent) -> Iterator[None]:
    """Lets an agent run a small part of the time, while it lives."""
    is_over = threading.Event()

    def crawl() -> None:
        while not is_over.wait(CRAWL_RUNS_S):
            agent.signal(signal.SIGSTOP)
            is_over.wait(CRAWL_STOPPED_S)
            agent.signal(signal.SIGCONT)

    crawls = threading.Thread(target=crawl)
    crawls.start()
    try:
        yield
    finally:
        is_over.set()
        crawls.join()


@contextlib.contextmanager
def agent_that_hangs(agent: Agent, moment: Moment) -> Iterator[None]:
    """Lets an agent run a small part of the time until a moment, then not at all; afterwards it runs again."""
    with observer(agent) as seen:
        has_come = moment(seen)
        is_enough, is_over = threading.Event(), threading.Event()

        def crawl() -> None:
            while not is_over.wait(CRAWL_RUNS_S):
                agent.signal(signal.SIGSTOP)
                if is_enough.is_set():
                    return
                is_over.wait(CRAWL_STOPPED_S)
                thaw(agent)

        def watch() -> None:
            while not has_come() and not is_over.wait(0.001):
                pass
            is_enough.set()

        threads = [threading.Thread(target=crawl), threading.Thread(target=watch)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            # A watcher that waits for an answer of an agent that has stopped gets it now.
            thaw(agent)
            for thread in threads:
                thread.join()
            thaw(agent)
