"""Asking the agent what is there, within what a step of vLLM's scheduler may wait.

```text
ask ── answered in time ──▶ sources of the leading blocks
 │  └─ no agent ──────────▶ none, at once
 ├─ not yet: vLLM asks again in its next step; after ``match_deadline_ms`` none, and the agent is suspected
 └─ the step's budget is gone: not asked, so that it is asked about in a later step
```

Asking costs as well: keys are derived and queued, about 1 ms for 1,024 blocks of eight ranks. Both it and all waits are charged, those for
other things than answers as well (:meth:`Asker.wait`). What a step waits is bounded further by the patience of whoever looks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from reprise import PendingMatch, Session
from reprise.vllm.metrics import Counted
from reprise.vllm.ranks import RankSessions, RanksMatch

if TYPE_CHECKING:
    from reprise.vllm.options import MatchOptions

Found = TypeVar("Found")

KEYS_PER_MATCH = 8192
"""Keys of one question at the most (docs/PROTOCOL.md, part 1)."""


@dataclass
class Question:
    """A match under way; ``pending`` is None where there was nobody to ask."""

    pending: PendingMatch | RanksMatch | None
    asked_at: float
    waited: float = 0.0
    """Seconds that steps have waited for it."""


@dataclass
class Asker:
    """Asks, with one budget of time for each step over all requests."""

    session: Session | RankSessions
    options: MatchOptions
    counted: Counted
    _budget_left: float = field(init=False)
    _waited: float = field(init=False)

    def __post_init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        """A new step, with a budget of its own."""
        self._budget_left = self.options.match_budget_ms / 1e3
        self._waited = 0.0

    def ask(self, keys: Callable[[], bytes]) -> Question | None:
        """Asks about leading blocks; None: this step has no time left for it.

        Args:
            keys: derives their keys, at most :data:`KEYS_PER_MATCH`.
        """
        if self._budget_left <= 0.0:
            return None
        began = time.monotonic()
        pending = self.session.start_match(keys())
        asked_at = time.monotonic()
        self._budget_left -= asked_at - began
        self.counted.add("queries", 1)
        return Question(pending, asked_at)

    def look(self, question: Question, patience_ms: float = math.inf) -> Sequence[int] | None:
        """The answer: sources of the leading blocks. None: not yet, look again in the next step.

        Args:
            question: what was asked.
            patience_ms: how long the whole step waits at the most, in all its looks.
        """
        if question.pending is None:
            return ()
        pending = question.pending
        began = time.monotonic()
        sources = self.wait(pending.poll, patience_ms)
        now = time.monotonic()
        question.waited += now - began
        is_late = now - question.asked_at > self.options.match_deadline_ms / 1e3
        if sources is None and not is_late:
            return None
        self.counted.sample("match_seconds", question.waited)
        if sources is not None:
            return sources
        self.session.suspect()
        self.counted.add("queries_unanswered", 1)
        return ()

    def wait(self, look: Callable[[float], Found], patience_ms: float = math.inf) -> Found:
        """Waits for something, within what the step has left.

        Args:
            look: waits for so many seconds at the most.
            patience_ms: how long the whole step waits at the most, in all its looks.
        """
        began = time.monotonic()
        found = look(max(min(self._budget_left, patience_ms / 1e3 - self._waited), 0.0))
        waited = time.monotonic() - began
        self._budget_left -= waited
        self._waited += waited
        return found
