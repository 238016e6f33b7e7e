"""What an engine does while an agent is away: it says the same, is late by a second at the most, and finds blocks again afterwards.

For engines that load and save between steps and for those that do it layer by layer.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator
from typing import Any

from cluster import Agent
from engine import BLOCK_TOKENS, Engine
from faults import (
    Moment,
    agent_that_goes,
    agent_that_hangs,
    crawling,
    drop_dram,
    eventually,
    freeze,
    has_served,
    is_saving,
    observer,
    thaw,
)
from serving import PROMPT_BLOCKS, counted, grown, prompt, see

LATE_S = 1.0
"""What an outage may cost a request beyond its computation."""

BUSY_MACHINE_S = 1.0
"""What other processes of a test machine may cost a request."""

BATCH, BATCH_BLOCKS = 6, 6
"""Prompts that are served at a time, and the whole blocks of each."""


def batch(seed: int) -> list[list[int]]:
    """Prompts to serve at a time."""
    return [prompt(seed + index, blocks=BATCH_BLOCKS) for index in range(BATCH)]


def computed(plain: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """What an engine says that computes everything, and how long it takes."""
    expected = plain.generate(prompts)["tokens"]
    return expected, plain.generate(prompts)["seconds"]


def check(told: dict[str, Any], expected: list[list[int]], within: float) -> None:
    """The answers are right and in time."""
    assert told["tokens"] == expected
    assert told["reasons"] == ["length"] * len(expected)
    assert told["seconds"] < within + LATE_S + BUSY_MACHINE_S


def finds_all(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> Callable[[], bool]:
    """Whether an engine without a memory of its own finds prompts whole; it saves what it does not find."""

    def found() -> bool:
        engine.forget()
        told = engine.generate(prompts)
        assert told["tokens"] == expected
        return bool(told["cached"] == [BATCH_BLOCKS * BLOCK_TOKENS] * len(prompts))

    return found


@contextlib.contextmanager
def going(agent: Agent, number: signal.Signals, moment: Moment) -> Iterator[None]:
    """An agent that is slow, and at a moment killed or stopped; afterwards it is there again."""
    if number == signal.SIGKILL:
        with agent_that_goes(agent, number, moment), crawling(agent):
            yield
    else:
        with agent_that_hangs(agent, moment):
            yield


def goes_during_loads(plain: Engine, engine: Engine, agent: Agent, number: signal.Signals, seed: int) -> None:
    """The engine's own agent is killed or stopped while it serves loads."""
    prompts = batch(seed)
    expected, recompute = computed(plain, prompts)
    found = finds_all(engine, prompts, expected)

    def loads_fail_under_way() -> bool:
        eventually(found, within=60.0)
        with observer(agent) as seen:
            drop_dram(seen)
        engine.forget()
        before = counted(engine)
        with going(agent, number, has_served(1)):
            told = engine.generate(prompts)
        check(told, expected, recompute)
        # Otherwise it went before or after them.
        return grown(before, counted(engine), "failed_blocks")

    eventually(loads_fail_under_way, within=120.0)
    eventually(found, within=60.0)


def goes_during_saves(plain: Engine, engine: Engine, agent: Agent, number: signal.Signals, seed: int) -> None:
    """The engine's own agent is killed or stopped while blocks are saved."""
    seeds = itertools.count(seed, BATCH)

    def saves_fail_under_way() -> bool:
        # New ones: what was saved before is not saved again.
        prompts = batch(next(seeds))
        expected, recompute = computed(plain, prompts)
        engine.forget()
        before = counted(engine)
        with going(agent, number, is_saving):
            told = engine.generate(prompts)
            # As soon as no save holds blocks any more; the agent is away until then.
            engine.forget()
        check(told, expected, recompute)
        failed = grown(before, counted(engine), "unsaved_blocks")
        # What was not kept is computed and kept, and what was kept is right.
        eventually(finds_all(engine, prompts, expected), within=60.0)
        return failed

    eventually(saves_fail_under_way, within=120.0)


def hangs_before_it_is_asked(plain: Engine, engine: Engine, agent: Agent, seed: int) -> None:
    """The engine's own agent answers nothing any more."""
    tokens = prompt(seed)
    expected, recompute = computed(plain, [tokens])
    see(engine, tokens)
    engine.forget()
    freeze(agent)
    try:
        hung = engine.generate([tokens])
    finally:
        thaw(agent)
    check(hung, expected, recompute)
    assert hung["cached"] == [0], "nobody said that it is there"


def peer_hangs_during_loads(plain: Engine, engine: Engine, agent: Agent, saver: Engine, peer: Agent, seed: int) -> None:
    """The agent of another node, which has the blocks, is stopped; the engine's own goes on.

    Args:
        plain: an engine that computes everything.
        engine: the one that loads.
        agent: its own.
        saver: an engine on the other node.
        peer: that engine's agent.
        seed: of the first prompt.
    """
    seeds = itertools.count(seed)

    def served(*, hangs: bool) -> tuple[dict[str, Any], bool]:
        # A new one each time: one that was missed or loaded is on the engine's own node as well.
        tokens = prompt(next(seeds))
        expected, recompute = computed(plain, [tokens])
        see(saver, tokens)
        engine.forget()
        before = counted(engine)
        if hangs:
            freeze(peer)
        try:
            told = engine.generate([tokens])
        finally:
            thaw(peer)
        check(told, expected, recompute)
        return told, grown(before, counted(engine), "failed_blocks")

    # Otherwise the directory had not heard of it yet, or the node asks the other for nothing for a while after the last time.
    eventually(lambda: served(hangs=True)[1], within=120.0)
    eventually(lambda: bool(served(hangs=False)[0]["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS]), within=60.0)
    # What it has cached of the other node's is on its own NVMe never: who waits until its memory is empty would wait for ever.
    with observer(agent) as seen:
        sessions = seen.stats()["sessions"]
    agent.restart()
    with observer(agent) as seen:
        eventually(lambda: seen.stats()["sessions"] >= sessions)
