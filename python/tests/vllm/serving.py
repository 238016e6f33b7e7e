"""What tests do with engines."""

from __future__ import annotations

import random
from typing import Any

from engine import BLOCK_TOKENS, Engine
from engine_model import VOCABULARY
from faults import eventually

PROMPT_BLOCKS = 8


def prompt(seed: int, blocks: int = PROMPT_BLOCKS, tail: int = 5) -> list[int]:
    """A prompt of whole blocks and a tail."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK_TOKENS + tail)]


def see(engine: Engine, tokens: list[int], ranks: int = 1, **more: Any) -> dict[str, Any]:
    """Has an engine serve a prompt of ``PROMPT_BLOCKS`` blocks, and waits until every rank's save of each has ended."""
    before = ended_saves(engine)
    told = engine.generate([tokens], **more)
    eventually(lambda: ended_saves(engine) >= before + ranks * PROMPT_BLOCKS)
    return told


def ended_saves(engine: Engine) -> int:
    """Blocks whose save has ended, new or not; each rank counts its own."""
    metrics = engine.metrics()
    return int(
        sum(metrics.get(f"vllm:reprise_{name}", 0) for name in ("saved_blocks", "duplicate_blocks", "unsaved_blocks"))
    )
