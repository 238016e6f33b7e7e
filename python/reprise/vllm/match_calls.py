"""Match calls to the agent, within the time budget of a step of vLLM's scheduler.

```text
start ── answered in time ──▶ sources of the leading blocks
  │  └── no agent ──────────▶ no blocks, at once
  ├── pending: vLLM polls again in its next step; after ``match_deadline_ms`` no blocks, and the agent is suspected
  └── the step's budget is used up: not started; a later step starts it
```

One match covers the blocks of all ranks. The agent finds a block only if every rank has saved its part.

Starting a match also takes time, because keys are derived and queued: about 1 ms for 1,024 blocks of eight ranks. The
budget is charged for this and for all waits, also those for other results (:meth:`Matcher.wait`). The caller can limit
the wait of a step further. Keys for hints are derived in parts (:class:`KeyDerivation`) with at most half of the budget,
because the matches of the next step need the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from reprise import PendingMatch, Session
from reprise.vllm.metrics import CounterSink

if TYPE_CHECKING:
    from reprise.vllm.options import MatchOptions

Result = TypeVar("Result")

KEYS_PER_MATCH = 8192
"""Maximum number of keys of one match (docs/PROTOCOL.md, part 1)."""

KEYS_PER_PART = 512
"""Number of keys of one part of a derivation, which a step does not interrupt: about 0.1 to 0.5 ms."""


@dataclass
class MatchCall:
    """A started match; ``pending`` is None if there was no agent."""

    pending: PendingMatch | None
    started_at: float
    waited: float = 0.0
    """Seconds that steps have waited for the answer."""


@dataclass
class Matcher:
    """Starts and polls matches, with one time budget per step for all requests."""

    session: Session
    options: MatchOptions
    counters: CounterSink
    all_ranks: bool = False
    """Whether each block has parts of several ranks, with a key each."""
    _budget_left: float = field(init=False)
    _waited: float = field(init=False)

    def __post_init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        """Begins a step with a new budget."""
        self._budget_left = self.options.match_budget_ms / 1e3
        self._waited = 0.0

    def start(self, keys: Callable[[], bytes], position: Callable[[], int | None]) -> MatchCall | None:
        """Starts a match; returns None if the step has no time left.

        Args:
            keys: derives the keys, at most :data:`KEYS_PER_MATCH`: first those of rank 0, then those of rank 1, and so on.
            position: returns the number of blocks before the first one in its chain; None if it is unknown.
        """
        if self._budget_left <= 0.0:
            return None
        began = time.monotonic()
        pending = self.session.start_match(keys(), all_ranks=self.all_ranks, position=position())
        started_at = time.monotonic()
        self._budget_left -= started_at - began
        self.counters.add("queries", 1)
        return MatchCall(pending, started_at)

    def poll(self, call: MatchCall, step_wait_ms: float = math.inf) -> Sequence[int] | None:
        """Returns the sources of the leading blocks; None if the answer is still pending.

        Args:
            call: the started match.
            step_wait_ms: maximum wait of the whole step, over all polls.
        """
        if call.pending is None:
            return ()
        pending = call.pending
        began = time.monotonic()
        sources = self.wait(pending.poll, step_wait_ms)
        now = time.monotonic()
        call.waited += now - began
        is_late = now - call.started_at > self.options.match_deadline_ms / 1e3
        if sources is None and not is_late:
            return None
        self.counters.sample("match_seconds", call.waited)
        if sources is not None:
            return sources
        self.session.suspect()
        self.counters.add("queries_unanswered", 1)
        return ()

    def derive(self, derive: Callable[[], Result]) -> Result | None:
        """Calls a function that computes something for a hint; returns None if the step has no time left for it."""
        if self._budget_left <= self.options.match_budget_ms / 2e3:
            return None
        began = time.monotonic()
        result = derive()
        self._budget_left -= time.monotonic() - began
        return result

    def peek(self, call: MatchCall) -> Sequence[int] | None:
        """Returns an answer that has arrived; None if it is pending or there is no agent. Does not wait."""
        sources = None if call.pending is None else call.pending.poll(0.0)
        if sources is not None:
            self.counters.sample("match_seconds", call.waited)
        return sources

    def wait(self, poll: Callable[[float], Result], step_wait_ms: float = math.inf) -> Result:
        """Polls within the remaining budget of the step.

        Args:
            poll: waits for at most the given seconds.
            step_wait_ms: maximum wait of the whole step, over all polls.
        """
        began = time.monotonic()
        result = poll(max(min(self._budget_left, step_wait_ms / 1e3 - self._waited), 0.0))
        waited = time.monotonic() - began
        self._budget_left -= waited
        self._waited += waited
        return result


@dataclass
class KeyDerivation:
    """Keys for a hint, which are derived in parts: each step continues as long as its budget allows."""

    derive: Callable[[int, int], bytes]
    """Returns the packed keys from one index to another."""
    count: int
    """Number of indices."""
    packed: bytes = b""
    """Keys derived so far."""
    _done: int = 0

    def advance(self, matcher: Matcher) -> bool:
        """Derives keys within the budget of the step; returns whether all are derived."""
        while self._done < self.count:
            first, end = self._done, min(self._done + KEYS_PER_PART, self.count)
            part = matcher.derive(lambda first=first, end=end: self.derive(first, end))  # type: ignore[misc]
            if part is None:
                return False
            self.packed += part
            self._done = end
        return True
