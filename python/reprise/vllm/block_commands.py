"""Commands of KV hints on blocks: pin, prefetch and demote, sent to the agent by a thread.

The scheduler only queues a command, which takes microseconds. The thread derives the keys, sends one message of them at a
time and polls its answer. Commands are advice: without an agent, or beyond the queue's limit, they are dropped and counted.

```text
submit ─▶ queue ─▶ for each part of at most 8,192 keys: sent ─▶ answered ─▶ counted
                                                          └ blocks in use ─▶ demote: sent again after a pause
```

A block is demoted only when it is on a device, and an agent may write it some seconds after its save. So a demotion is
repeated for the blocks that are still in use.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reprise import RepriseError
from reprise.kv_hints import CommandName
from reprise.repeated_log import RepeatedLog
from reprise.vllm.match_calls import KEYS_PER_MATCH
from reprise.vllm.metrics import CounterSink

if TYPE_CHECKING:
    from reprise import BlocksReport, Session

logger = logging.getLogger("reprise")

QUEUED_MAX = 256
"""Maximum number of queued commands."""

POLL_S = 0.005
"""Seconds between two polls of an answer."""

DEMOTE_TRIES = 8
"""Number of demotions of the same blocks; they end after about 14 s."""

DEMOTE_PAUSE_S = 2.0
"""Seconds between two of them."""

CLOSED_WITHIN_S = 5.0
"""Maximum wait for the end of the thread."""

_refused = RepeatedLog("commands of KV hints were not executed")


@dataclass(frozen=True)
class BlockCommand:
    """A command on consecutive blocks of a request."""

    action: CommandName
    keys: Callable[[int, int], bytes]
    """Returns the packed keys of the blocks from one number to another, those of all ranks together."""
    first: int
    end: int
    ttl: float | None = None
    tries: int = 1
    not_before: float = 0.0


@dataclass
class BlockCommands:
    """Queue of commands, and the thread that sends them."""

    session: Session
    ranks: int = 1
    """Number of ranks whose keys each block has."""
    _queue: queue.Queue[BlockCommand | None] = field(default_factory=lambda: queue.Queue(QUEUED_MAX))
    _later: list[BlockCommand] = field(default_factory=list)
    """Demotions to repeat."""
    _thread: threading.Thread | None = None
    _counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)

    def submit(self, command: BlockCommand) -> None:
        """Queues a command, or drops it if the queue is full. Does not wait."""
        if command.end <= command.first:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="reprise-hints", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(command)
        except queue.Full:
            self._ignore(f"more than {QUEUED_MAX} commands are queued")

    def take_counts(self, counters: CounterSink) -> None:
        """Adds the counts since the last call."""
        if not self._counts:
            return
        with self._lock:
            counts, self._counts = self._counts, Counter()
        for name, count in counts.items():
            counters.add(name, count)

    def close(self) -> None:
        """Ends the thread; queued commands are dropped."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSED_WITHIN_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            command = self._next()
            if command is not None:
                self._execute(command)

    def _next(self) -> BlockCommand | None:
        now = time.monotonic()
        due = next((command for command in self._later if command.not_before <= now), None)
        if due is not None:
            self._later.remove(due)
            return due
        try:
            # Short, so that the thread ends soon after `close`.
            return self._queue.get(timeout=0.1)
        except queue.Empty:
            return None

    def _execute(self, command: BlockCommand) -> None:
        step = KEYS_PER_MATCH // self.ranks
        for first in range(command.first, command.end, step):
            end = min(first + step, command.end)
            try:
                report = self._ask(command, command.keys(first, end))
            except RepriseError as error:
                self._ignore(f"{command.action}: {error}")
                return
            if report is None:
                self._ignore(f"{command.action}: no agent answers")
                return
            self._account(command, first, end, report)

    def _ask(self, command: BlockCommand, keys: bytes) -> BlocksReport | None:
        """Sends one part and returns its answer; None without an agent. The session limits the wait."""
        pending = self.session.start_command(command.action, keys, ttl=command.ttl, all_ranks=self.ranks > 1)
        if pending is None:
            return None
        while (report := pending.poll()) is None:
            if self._closed.wait(POLL_S):
                return None
        return report

    def _account(self, command: BlockCommand, first: int, end: int, report: BlocksReport) -> None:
        refused = report.refused
        if (
            command.action == "demote"
            and report.in_use
            and command.tries < DEMOTE_TRIES
            and len(self._later) < QUEUED_MAX
        ):
            at = time.monotonic() + DEMOTE_PAUSE_S
            again = BlockCommand(command.action, command.keys, first, end, tries=command.tries + 1, not_before=at)
            self._later.append(again)
            refused -= report.in_use
        if report.over_limit:
            _refused.note(
                f"{command.action}: {report.over_limit} blocks are beyond the limits of the tenant ([retention] of the agent)"
            )
        with self._lock:
            self._counts["hint_blocks"] += report.affected
            self._counts["hint_refused_blocks"] += refused

    def _ignore(self, reason: str) -> None:
        _refused.note(reason)
        with self._lock:
            self._counts["ignored_hints"] += 1
