"""Load or recompute: the policy of :class:`reprise.LoadPolicy` with an engine's measurements, counters and log.

```text
step ── time, tokens ───────────▶ rate of the computation ─┐
ended load ── time, sources ────▶ rate of each source ─────┴▶ choose: leading blocks to load, and a limit of the wait
```

Nothing here waits. The decision itself is native (`policy/src/recompute.rs`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from reprise import LoadDecision, LoadPolicy, Source
from reprise.options import SharedOptions

logger = logging.getLogger("reprise")

Counts: TypeAlias = Sequence[int]
"""Number of blocks of each of the four sources, in the order of ``Source``."""

Limit: TypeAlias = tuple[float, float]
"""Limit of the wait for a load, as of ``LoadDecision``."""

COUNTERS = {
    "decisions_unmeasured": "Number of requests whose found blocks were all loaded, because a rate was not measured.",
    "decisions_load": "Number of requests whose found blocks were all loaded, because that was expected to be faster.",
    "decisions_part": "Number of requests of which only leading found blocks were loaded and the others computed.",
    "decisions_compute": "Number of requests whose found blocks were computed, because that was expected to be faster.",
    "recomputed_blocks": "Number of found blocks that were computed, because that was expected to be faster.",
    "ignored_measurements": "Number of impossible times of steps and loads, which were ignored.",
}
"""Descriptions of the counters, by name."""


class Counting(Protocol):
    """Receiver of the counters above."""

    def add(self, name: str, count: int) -> None:
        """Adds to a counter."""


class NoCounters:
    """Counters of an engine whose metrics cannot be extended."""

    def add(self, name: str, count: int) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class Prefill:
    """Tokens of prompts that a step computes."""

    tokens: int
    context: float
    """Mean number of tokens before each of them."""

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int]]) -> Prefill:
        """Returns the sum of parts of requests: number of computed tokens, and of tokens before them."""
        tokens = before = 0.0
        for count, prefix in parts:
            tokens += count
            before += count * (prefix + count / 2)
        return cls(int(tokens), before / tokens if tokens else 0.0)


COMPUTING_S = 1.0
"""Seconds after the begin of a step in which an engine is expected to compute."""

NO_PREFILL = Prefill(0, 0.0)


def counts_of(sources: Iterable[int | None]) -> Counts:
    """Returns the number of blocks of each source."""
    counted = Counter(sources)
    return (
        counted[Source.OWN_DRAM],
        counted[Source.OWN_NVME],
        counted[Source.PEER_DRAM],
        counted[Source.PEER_NVME],
    )


@dataclass(eq=False)
class LoadChooser:
    """Decisions of one engine. Not thread-safe: all calls are from the thread of its scheduler."""

    policy: LoadPolicy
    counters: Counting
    delay: int = 0
    """Number of steps that an engine schedules ahead of the one that computes."""
    now: Callable[[], float] = time.monotonic
    _steps: list[Prefill] = field(default_factory=list)
    """Tokens of the last steps, of which the first one computes; empty after a pause of the engine."""
    _step_at: float = 0.0
    """Time of the last step."""
    _started: dict[str, list[Counts]] = field(default_factory=dict)
    """Running loads by name, with the number of their blocks from each source."""
    _logged: set[str] = field(default_factory=set)
    """Reasons of decisions that were logged."""
    _ignored: int = 0

    @classmethod
    def create(
        cls, options: SharedOptions, block_tokens: int, block_bytes: int, counters: Counting, delay: int = 0
    ) -> LoadChooser | None:
        """Creates the decisions of an engine; None if they are turned off.

        Args:
            options: options of the adapter.
            block_tokens: tokens of a block.
            block_bytes: bytes that a load moves for each block.
            counters: receiver of the counters.
            delay: number of steps that the engine schedules ahead.
        """
        if not options.load_or_recompute:
            return None
        policy = LoadPolicy(
            block_tokens,
            block_bytes,
            wait_cap=options.recompute_wait_cap_ms / 1e3,
            wait_base=options.recompute_wait_base_ms / 1e3,
            wait_per_token=options.recompute_wait_per_token_us / 1e6,
        )
        return cls(policy, counters, delay)

    def step(self, prefill: Prefill | None) -> None:
        """Begins a step of the scheduler, which ends the one before.

        Args:
            prefill: tokens that the step computes; None if it computes nothing.
        """
        now = self.now()
        if len(self._steps) > self.delay:
            self.observe_step(self._steps.pop(0), now - self._step_at)
        self._step_at = now
        if prefill is None:
            self._steps.clear()
        else:
            self._steps.append(prefill)

    @property
    def is_computing(self) -> bool:
        """Whether the engine has begun a step lately."""
        return bool(self._steps) and self.now() - self._step_at < COMPUTING_S

    def pause(self) -> None:
        """Notes that the time until the next step is not that of a computation."""
        self._steps.clear()

    def observe_step(self, prefill: Prefill, seconds: float) -> None:
        """Adds the measured time of a step."""
        self.policy.observe_step(prefill.tokens, prefill.context, seconds)
        self._count_ignored()

    def forget_steps(self) -> None:
        """Drops the measured steps, if no others will follow: all found blocks are loaded, without a limit."""
        self._steps.clear()
        self.policy.forget_steps()

    def choose(self, sources: Sequence[int], prefix_tokens: int, *, is_computing: bool) -> LoadDecision:
        """Decides about the blocks that a request could load.

        Args:
            sources: source of each block.
            prefix_tokens: tokens before the first one.
            is_computing: whether other requests compute.
        """
        decision = self.policy.decide(sources, prefix_tokens, is_computing)
        self.counters.add(f"decisions_{decision.reason}", 1)
        if decision.reason in ("part", "compute"):
            self.counters.add("recomputed_blocks", len(sources) - decision.blocks)
        if decision.reason not in self._logged:
            self._logged.add(decision.reason)
            logger.info("load or recompute, first case of its kind: %s", _described(decision, len(sources)))
        return decision

    def started(self, load: str, requested: Counts) -> None:
        """Counts a load that was submitted.

        Args:
            load: name of the load or its request; several loads may have one name.
            requested: number of its blocks from each source.
        """
        self.policy.load_started(requested)
        self._started.setdefault(load, []).append(requested)

    def measured(self, load: str, loaded: Counts, seconds: float) -> None:
        """Adds a measured load that was started.

        Args:
            load: its name.
            loaded: number of loaded blocks of each source.
            seconds: time that the load ran; 0 if it did not run, so that it does not count.
        """
        started = self._started.get(load)
        if started and any(started[0]) and seconds != 0:
            self.policy.observe_load(started[0], loaded, seconds)
            self._count_ignored()

    def ended(self, load: str) -> None:
        """Counts the end of all loads of this name."""
        for requested in self._started.pop(load, ()):
            self.policy.load_ended(requested)

    def _count_ignored(self) -> None:
        ignored = self.policy.ignored
        if ignored > self._ignored:
            if self._ignored == 0:
                logger.warning("ignoring impossible times of steps or loads; ignored_measurements counts them")
            self.counters.add("ignored_measurements", ignored - self._ignored)
            self._ignored = ignored


def _described(decision: LoadDecision, found: int) -> str:
    if decision.reason == "unmeasured":
        return f"loading all {found} found blocks, because a rate was not measured yet or lately"
    return (
        f"loading {decision.blocks} of {found} found blocks; loading them is expected to take "
        f"{decision.load_time * 1e3:.1f} ms, computing all {decision.compute_time * 1e3:.1f} ms"
    )
