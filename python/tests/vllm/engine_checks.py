"""Helpers for tests with engines."""

from __future__ import annotations

import random
from typing import Any

from engine import BLOCK_TOKENS, Engine
from engine_model import VOCABULARY

from reprise.vllm.metrics import COUNTERS

PROMPT_BLOCKS = 8
TRIES = 5
"""Tries before a test fails: an agent may be slow while engines use all cores of the machine."""


def prompt(seed: int, blocks: int = PROMPT_BLOCKS, tail: int = 5) -> list[int]:
    """Returns a prompt of full blocks and a tail."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK_TOKENS + tail)]


def serve_and_save(engine: Engine, tokens: list[int], ranks: int = 1, **more: Any) -> dict[str, Any]:
    """Serves a prompt of ``PROMPT_BLOCKS`` blocks until every rank has saved all of them, and clears the cache.

    Returns the first answer. While engines use all cores, an agent may be too slow to save a block; then the prompt is
    served again.
    """
    # Wait for earlier saves, which would be counted and use blocks.
    engine.clear_cache()
    answers = []
    for _ in range(TRIES):
        before = counters(engine)
        answers.append(engine.generate([tokens], **more))
        engine.clear_cache()
        after = counters(engine)
        is_cached = answers[-1]["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS]
        if is_cached or in_reprise(after) >= in_reprise(before) + ranks * PROMPT_BLOCKS:
            return answers[0]
    raise AssertionError(f"blocks were not saved in {TRIES} tries: {after}")


def serve_from_reprise(engine: Engine, tokens: list[int], **more: Any) -> dict[str, Any]:
    """Serves a prompt with all blocks from Reprise, after clearing the engine's cache.

    While engines use all cores, an agent may answer too late, which the engine counts; then the prompt is served again.
    """
    for _ in range(TRIES):
        engine.clear_cache()
        before = counters(engine)
        answer = engine.generate([tokens], **more)
        if answer["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS]:
            return answer
        after = counters(engine)
        assert increased(before, after, "queries_unanswered", "failed_blocks"), f"before {before}, after {after}"
    raise AssertionError(f"no answer of the agent in time in {TRIES} tries: {counters(engine)}")


def counters(engine: Engine) -> dict[str, float]:
    """Returns the connector's counters, by their names in ``reprise.vllm.metrics``."""
    metrics = engine.metrics()
    return {name: metrics.get(f"vllm:reprise_{name}", 0) for name in COUNTERS}


def increased(before: dict[str, float], after: dict[str, float], *names: str) -> bool:
    """Returns whether any of these counters has increased."""
    return any(after[name] > before[name] for name in names)


def in_reprise(counts: dict[str, float]) -> float:
    """Returns the number of blocks in Reprise after saves, new or not; each rank counts its own."""
    return counts["saved_blocks"] + counts["duplicate_blocks"]


def preempt_each_other(plain: Engine, engine: Engine, seed: int) -> None:
    """Serves more requests than 63 blocks can hold, twice; they share prefixes and answer like single requests.

    Requests that were preempted load their blocks when they run again.
    """
    stems = [prompt(seed + stem, blocks=4, tail=0) for stem in range(3)]
    prompts = [stems[index % 3] + prompt(seed + 10 + index, blocks=2) for index in range(12)]
    # 9.2 blocks at the end, 4 of them shared: the first requests still run when 12 + 12 x 6 of 63 blocks are needed.
    max_tokens = 96
    expected = plain.generate(prompts, max_tokens=max_tokens)["tokens"]
    preempted = engine.metrics()["vllm:num_preemptions"]
    for round_ in range(TRIES):
        engine.clear_cache()
        before = counters(engine)
        answer = engine.generate(prompts, max_tokens=max_tokens)
        assert answer["tokens"] == expected
        assert answer["reasons"] == ["length"] * len(prompts)
        # While engines use all cores, an agent may answer too late.
        if round_ > 0 and increased(before, counters(engine), "swapped_in_blocks"):
            break
    else:
        raise AssertionError(f"no preempted request loaded its blocks in {TRIES} rounds: {counters(engine)}")
    assert engine.metrics()["vllm:num_preemptions"] > preempted, "no request was preempted"
