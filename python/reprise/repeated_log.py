"""Log of transfer errors: the first error of each kind at once, then a count once per interval.

A failed transfer only costs time, so nothing else reports it. Errors whose texts differ only in numbers are of one kind.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger("reprise")

INTERVAL_S = 60.0
"""Seconds between two lines about one kind of error."""

KINDS_MAX = 64
"""Maximum number of kinds with separate lines; further kinds share one."""


@dataclass
class _Condition:
    """A kind of error that still occurs."""

    latest: str
    reported: float
    counted: int = 0
    total: int = 1


class RepeatedLog:
    """Logs repeated errors at a limited rate. Thread-safe."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Creates a log; ``what`` begins each line, ``clock`` returns seconds."""
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._conditions: dict[str, _Condition] = {}

    def note(self, error: str | None) -> None:
        """Records the error of an attempt, or None for a success. Logs the lines that are due."""
        if error is None and not self._conditions:
            return
        with self._lock:
            now = self._clock()
            if error is not None:
                self._occurred(error, now)
            for kind, condition in list(self._conditions.items()):
                if now - condition.reported >= INTERVAL_S:
                    self._report(kind, condition, now)

    def _occurred(self, error: str, now: float) -> None:
        kind = re.sub(r"\d+", "0", error)
        if kind not in self._conditions and len(self._conditions) >= KINDS_MAX:
            kind = ""
        condition = self._conditions.get(kind)
        if condition is None:
            self._conditions[kind] = _Condition(error, now)
            logger.warning("%s: %s", self._what, error)
            return
        condition.latest = error
        condition.counted += 1
        condition.total += 1

    def _report(self, kind: str, condition: _Condition, now: float) -> None:
        if condition.counted > 0:
            seconds = now - condition.reported
            logger.warning(
                "%s: %s (repeated %d times within %.0f s)", self._what, condition.latest, condition.counted, seconds
            )
            condition.reported, condition.counted = now, 0
            return
        del self._conditions[kind]
        if condition.total > 1:
            logger.info("%s: no longer occurs (%d times in total): %s", self._what, condition.total, condition.latest)
