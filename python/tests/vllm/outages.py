"""Checks of an engine during an agent's outage: equal answers, at most a second of delay, and blocks afterwards.

For engines that load and save between steps, and for those that do it layer by layer.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator
from typing import Any

from cluster import Agent
from engine import BLOCK_TOKENS, Engine
from engine_checks import PROMPT_BLOCKS, counters, increased, prompt, serve_and_save
from faults import (
    Moment,
    drop_dram,
    eventually,
    freeze,
    hanging_agent,
    has_served,
    is_saving,
    observer,
    signalled_agent,
    slowed_agent,
    thaw,
)

LATE_S = 1.0
"""Allowed delay of a request by an outage, beyond its computation."""

BUSY_MACHINE_S = 1.0
"""Allowed delay of a request by other processes of a test machine."""

BATCH, BATCH_BLOCKS = 6, 6
"""Prompts per batch, and full blocks of each."""


def batch(seed: int) -> list[list[int]]:
    """Returns the prompts of a batch."""
    return [prompt(seed + index, blocks=BATCH_BLOCKS) for index in range(BATCH)]


def computed(plain: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Returns the answers of an engine that computes everything, and its time in seconds."""
    expected = plain.generate(prompts)["tokens"]
    return expected, plain.generate(prompts)["seconds"]


def check(answer: dict[str, Any], expected: list[list[int]], within: float) -> None:
    """Checks that the answers are correct and in time."""
    assert answer["tokens"] == expected
    assert answer["reasons"] == ["length"] * len(expected)
    assert answer["seconds"] < within + LATE_S + BUSY_MACHINE_S


def finds_all(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> Callable[[], bool]:
    """Returns a check whether an engine finds all blocks of prompts in Reprise; missing blocks are saved."""

    def is_found() -> bool:
        engine.clear_cache()
        answer = engine.generate(prompts)
        assert answer["tokens"] == expected
        return bool(answer["cached"] == [BATCH_BLOCKS * BLOCK_TOKENS] * len(prompts))

    return is_found


@contextlib.contextmanager
def outage(agent: Agent, number: signal.Signals, moment: Moment) -> Iterator[None]:
    """Slows an agent down, kills or stops it at a moment, and restores it at the end."""
    if number == signal.SIGKILL:
        with signalled_agent(agent, number, moment), slowed_agent(agent):
            yield
    else:
        with hanging_agent(agent, moment):
            yield


def check_outage_during_loads(plain: Engine, engine: Engine, agent: Agent, number: signal.Signals, seed: int) -> None:
    """Checks an engine whose agent is killed or stopped while it serves loads."""
    prompts = batch(seed)
    expected, recompute = computed(plain, prompts)
    found = finds_all(engine, prompts, expected)

    def loads_fail() -> bool:
        eventually(found, within=60.0)
        with observer(agent) as seen:
            drop_dram(seen)
        engine.clear_cache()
        before = counters(engine)
        with outage(agent, number, has_served(1)):
            answer = engine.generate(prompts)
        check(answer, expected, recompute)
        # Otherwise, the outage was before or after the loads.
        return increased(before, counters(engine), "failed_blocks")

    eventually(loads_fail, within=120.0)
    eventually(found, within=60.0)


def check_outage_during_saves(plain: Engine, engine: Engine, agent: Agent, number: signal.Signals, seed: int) -> None:
    """Checks an engine whose agent is killed or stopped while blocks are saved."""
    seeds = itertools.count(seed, BATCH)

    def saves_fail() -> bool:
        # New prompts, because saved blocks are not saved again.
        prompts = batch(next(seeds))
        expected, recompute = computed(plain, prompts)
        engine.clear_cache()
        before = counters(engine)
        with outage(agent, number, is_saving):
            answer = engine.generate(prompts)
            # Waits until no save uses blocks; the outage lasts until then.
            engine.clear_cache()
        check(answer, expected, recompute)
        failed = increased(before, counters(engine), "unsaved_blocks")
        # Unsaved blocks are computed and saved, and saved blocks are correct.
        eventually(finds_all(engine, prompts, expected), within=60.0)
        return failed

    eventually(saves_fail, within=120.0)


def check_hang_before_match(plain: Engine, engine: Engine, agent: Agent, seed: int) -> None:
    """Checks an engine whose agent hangs before the match."""
    tokens = prompt(seed)
    expected, recompute = computed(plain, [tokens])
    serve_and_save(engine, tokens)
    engine.clear_cache()
    freeze(agent)
    try:
        hung = engine.generate([tokens])
    finally:
        thaw(agent)
    check(hung, expected, recompute)
    assert hung["cached"] == [0], "the match has no answer"


def check_peer_hang_during_loads(
    plain: Engine, engine: Engine, agent: Agent, saver: Engine, peer: Agent, seed: int
) -> None:
    """Checks an engine while the agent of another node, which has the blocks, is stopped.

    Args:
        plain: engine that computes everything.
        engine: engine that loads.
        agent: agent of that engine.
        saver: engine on the other node.
        peer: agent of the other node.
        seed: seed of the first prompt.
    """
    seeds = itertools.count(seed)

    def serve(*, hangs: bool) -> tuple[dict[str, Any], bool]:
        # A new prompt each time, because a missed or loaded one is also on the engine's own node.
        tokens = prompt(next(seeds))
        expected, recompute = computed(plain, [tokens])
        serve_and_save(saver, tokens)
        engine.clear_cache()
        before = counters(engine)
        if hangs:
            freeze(peer)
        try:
            answer = engine.generate([tokens])
        finally:
            thaw(peer)
        check(answer, expected, recompute)
        return answer, increased(before, counters(engine), "failed_blocks")

    # Otherwise, the directory did not have the blocks yet, or the node still avoids the other after the last hang.
    eventually(lambda: serve(hangs=True)[1], within=120.0)
    eventually(lambda: bool(serve(hangs=False)[0]["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS]), within=60.0)
    # Cached blocks of the other node are never on the own NVMe, so waiting for empty DRAM would never end.
    with observer(agent) as seen:
        sessions = seen.stats()["sessions"]
    agent.restart()
    with observer(agent) as seen:
        eventually(lambda: seen.stats()["sessions"] >= sessions)
