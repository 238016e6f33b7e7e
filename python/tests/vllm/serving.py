"""What tests do with engines and with the agents under them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from cluster import Agent
from engine import BLOCK_TOKENS, VOCABULARY, Engine

from reprise import Client, Layout, Namespace

PROMPT_BLOCKS = 8
PAGE = 4096


def prompt(seed: int, blocks: int = PROMPT_BLOCKS, tail: int = 5) -> list[int]:
    """A prompt of whole blocks and a tail."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK_TOKENS + tail)]


def eventually(holds: Callable[[], bool], within: float = 20.0) -> None:
    """Waits until something holds."""
    give_up = time.monotonic() + within
    while not holds():
        assert time.monotonic() < give_up, "it did not come to hold in time"
        time.sleep(0.05)


def see(engine: Engine, tokens: list[int], **more: Any) -> dict[str, Any]:
    """Has an engine serve a prompt of ``PROMPT_BLOCKS`` blocks, and waits until the save of each has ended."""
    before = ended_saves(engine)
    told = engine.generate([tokens], **more)
    eventually(lambda: ended_saves(engine) >= before + PROMPT_BLOCKS)
    return told


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


def ended_saves(engine: Engine) -> int:
    metrics = engine.metrics()
    return int(
        sum(metrics.get(f"vllm:reprise_{name}", 0) for name in ("saved_blocks", "duplicate_blocks", "unsaved_blocks"))
    )
