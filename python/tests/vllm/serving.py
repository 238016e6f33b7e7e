"""What tests do with engines."""

from __future__ import annotations

import random
from typing import Any

from engine import BLOCK_TOKENS, Engine
from engine_model import VOCABULARY

from reprise.vllm.metrics import COUNTERS

PROMPT_BLOCKS = 8
TRIES = 5
"""How often an agent may be too slow, because engines take all cores of the machine, before a test fails."""


def prompt(seed: int, blocks: int = PROMPT_BLOCKS, tail: int = 5) -> list[int]:
    """A prompt of whole blocks and a tail."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK_TOKENS + tail)]


def see(engine: Engine, tokens: list[int], ranks: int = 1, **more: Any) -> dict[str, Any]:
    """Has an engine serve a prompt of ``PROMPT_BLOCKS`` blocks until every rank has saved each of them, and forget it.

    Returns what it said the first time. Where engines take all cores, an agent may be too slow to save something: then the prompt
    is served again.
    """
    # Once nothing of what came before is being saved any more: it would be counted, and leave no room for these.
    engine.forget()
    said = []
    for _ in range(TRIES):
        before = counted(engine)
        said.append(engine.generate([tokens], **more))
        engine.forget()
        after = counted(engine)
        if kept(after) >= kept(before) + ranks * PROMPT_BLOCKS or said[-1]["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS]:
            return said[0]
    raise AssertionError(f"blocks were not saved in {TRIES} tries: {after}")


def see_again(engine: Engine, tokens: list[int], **more: Any) -> dict[str, Any]:
    """Has an engine without a memory of its own serve a prompt that it finds in Reprise, whole.

    Where engines take all cores, an agent may not get to answer in time, which the engine counts: then it is asked again.
    """
    for _ in range(TRIES):
        engine.forget()
        before = counted(engine)
        told = engine.generate([tokens], **more)
        if told["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS]:
            return told
        after = counted(engine)
        assert grown(before, after, "queries_unanswered", "failed_blocks"), f"counted before {before} and after {after}"
    raise AssertionError(f"the agent has not answered in time in {TRIES} tries: {counted(engine)}")


def counted(engine: Engine) -> dict[str, float]:
    """What the connector has counted, by the names in ``reprise.vllm.metrics``."""
    metrics = engine.metrics()
    return {name: metrics.get(f"vllm:reprise_{name}", 0) for name in COUNTERS}


def grown(before: dict[str, float], after: dict[str, float], *names: str) -> bool:
    """Whether any of these has grown."""
    return any(after[name] > before[name] for name in names)


def kept(counts: dict[str, float]) -> float:
    """Blocks that are in Reprise after a save, new or not; each rank counts its own."""
    return counts["saved_blocks"] + counts["duplicate_blocks"]


def preempt_each_other(plain: Engine, engine: Engine, seed: int) -> None:
    """Has an engine of 63 blocks serve more than they hold, twice: requests that share prefixes, and say what they say alone."""
    stems = [prompt(seed + stem, blocks=4, tail=0) for stem in range(3)]
    prompts = [stems[index % 3] + prompt(seed + 10 + index, blocks=2) for index in range(12)]
    # 9.2 blocks in the end, of which 4 are shared: 12 + 12 x 6 of the engine's 63, while the first is still at work.
    max_tokens = 96
    expected = plain.generate(prompts, max_tokens=max_tokens)["tokens"]
    preempted = engine.metrics()["vllm:num_preemptions"]
    for round_ in range(TRIES):
        engine.forget()
        before = counted(engine)
        told = engine.generate(prompts, max_tokens=max_tokens)
        assert told["tokens"] == expected
        assert told["reasons"] == ["length"] * len(prompts)
        # Where engines take all cores, an agent may not get to answer in time.
        if round_ > 0 and grown(before, counted(engine), "loaded_blocks"):
            break
    else:
        raise AssertionError(f"nothing was loaded in {TRIES} rounds: {counted(engine)}")
    assert engine.metrics()["vllm:num_preemptions"] > preempted, "the engine has too much memory for this test"
