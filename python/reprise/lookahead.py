"""Hints about the requests that an engine runs next: the order of its queue, and when a hint is sent.

```text
arrived ──▶ waiting ──begun──▶ running ──finished──▶ (removed; cancelled if it was hinted)
               ▲                  │
               └────preempted─────┘  under a new number; the former one is cancelled
```

A hint lists the requests at the head of the queue. The agent reads their blocks from its devices into DRAM before they
run (docs/PROTOCOL.md, "Lookahead"). The keys of a request travel once, and again after a new session.

A hint also lists the requests that have begun, with the keys of their blocks. The agent evicts blocks of running requests
last and those of preempted requests early, until the requests end, or hints do (docs/adr/0012).

**Order.** ``k``, the iterations until a request runs, grows with its place in the queue by the mean number of iterations
between two starts. Any running request may end in the next iteration. So the first waiting request is always within the
agent's window.

**Cost.** While the queue is empty, only changes of the requests that have begun are sent, and these requests each
second. A hint follows only after the answer to the last one, after
:data:`INTERVAL_S`, and after a pause in proportion to its own cost: hints take at most one in :data:`COST_SHARE` of a
scheduler's time. Nothing here waits for the agent.

Out of scope: which blocks a request will load, which its caller decides, and the order within the agent.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reprise import RepriseError, Source

if TYPE_CHECKING:
    from reprise import PendingLookahead, Session

logger = logging.getLogger("reprise")

REQUESTS_MAX = 256
"""Maximum number of requests in a hint. The agent plans at most 64 iterations, in each of which several may start."""

KEYS_MAX = 16_384
"""Maximum number of keys of all requests that the agent keeps for a session (docs/PROTOCOL.md, part 1)."""

REQUEST_KEYS_MAX = KEYS_MAX // 2
"""Maximum number of keys of one request in a hint, so that a long one leaves room for those behind it. Only its leading blocks
are read ahead."""

CANCELLED_MAX = 1024
"""Maximum number of cancelled requests in a hint (docs/PROTOCOL.md, part 1). Others are missing in the next list."""

KEY_BYTES = 16

REMATCH_S = 2.0
"""Seconds after which a request that waits is matched again: its blocks may have left DRAM since."""

STARTS_WINDOW = 16
"""Number of starts that the mean of iterations between them covers, as the agent's mean of iteration times."""

WINDOW_MIN = 4
"""Iterations that an agent looks ahead at least; used until its first answer."""

INTERVAL_S = 0.002
"""Minimum seconds between two hints."""

COST_SHARE = 50
"""A hint is followed by a pause of this number of times the seconds that it took."""

FAILED_PAUSE_S = 1.0
"""Seconds without hints after one that failed, and without an agent."""

REPEAT_PAUSE_MIN_S = 1.0
"""Seconds until keys travel again to an agent that still ignores requests after they did; doubled with each repetition."""

REPEAT_PAUSE_MAX_S = 16.0
"""Longest pause between two repetitions of keys."""

BEGUN_INTERVAL_S = 1.0
"""Seconds between two lists of the requests that have begun. An agent forgets them 10 s after the last hint."""

BEGUN_CHANGED_S = 0.05
"""Minimum seconds between two such lists if a request has begun, was preempted or has finished."""

BEGUN_REQUESTS_MAX = 1024
"""Maximum number of such requests in a hint (docs/PROTOCOL.md, part 1)."""

BEGUN_KEYS_MAX = 32_768
"""Maximum number of their keys that the agent keeps for a session (docs/PROTOCOL.md, part 1)."""

BEGUN_KEYS_PER_HINT = 4_096
"""Maximum number of their keys in a hint, as many as an agent adds; others follow with the next one."""

ITERATION_MAX_S = 60.0
"""Longest time of an iteration in a hint; a longer one is sent as this time."""


def blocks_here(sources: Sequence[int]) -> int:
    """Returns the number of leading blocks that are on this node."""
    own = (Source.OWN_DRAM, Source.OWN_NVME)
    return next((at for at, source in enumerate(sources) if source not in own), len(sources))


def blocks_ahead(sources: Sequence[int]) -> int:
    """Returns the number of leading blocks to list in a hint: those of this node, if one of them is on a device."""
    count = blocks_here(sources)
    return count if Source.OWN_NVME in sources[:count] else 0


@dataclass(frozen=True)
class Waiting:
    """A waiting request."""

    request_id: str
    number: int
    """Number in hints; a preempted request gets another one."""
    order: tuple[Any, ...]
    """Place in the queue: the smallest runs first."""


@dataclass
class Begun:
    """A request that has begun and not finished."""

    number: int
    is_preempted: bool = False
    sent: int = 0
    """Number of its keys that the agent has, unless it ignored some."""
    confirmed: int = 0
    """Number of these keys that need not travel again."""


@dataclass
class Repetition:
    """Whether keys travel again that the agent ignored; each time, the next pause is longer."""

    is_needed: bool = False
    _at: float = 0.0
    _pause: float = REPEAT_PAUSE_MIN_S

    def answered(self, ignored: int) -> None:
        """Records the answer to a hint that had such requests."""
        self.is_needed = ignored > 0
        if not self.is_needed:
            self._at, self._pause = 0.0, REPEAT_PAUSE_MIN_S

    def is_due(self, now: float) -> bool:
        """Returns whether keys travel again now."""
        return self.is_needed and now >= self._at

    def take(self, now: float) -> bool:
        """As :meth:`is_due`, and begins the next pause."""
        if not self.is_due(now):
            return False
        self._at = now + self._pause
        self._pause = min(2 * self._pause, REPEAT_PAUSE_MAX_S)
        return True


@dataclass
class Queue:
    """An engine's waiting requests and the rate at which they start."""

    waiting: dict[str, Waiting] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    """Numbers of the requests that have begun."""
    between_starts: float = 1.0
    """Mean number of iterations between two starts of requests."""
    _since_start: int = 0
    _next_number: int = 1
    _preempted_turn: int = 0
    _ranks: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def arrived(self, request_id: str, rank: tuple[Any, ...] = ()) -> None:
        """Appends a request.

        Args:
            request_id: the engine's name of the request.
            rank: what the engine orders its queue by before the order of arrival; empty: nothing.
        """
        self._ranks[request_id] = rank
        self._append(request_id, self._next_number)

    def begun(self, request_ids: Iterable[str]) -> None:
        """Removes the requests that have left the queue to compute or to load."""
        for request_id in request_ids:
            if waiting := self.waiting.pop(request_id, None):
                self.running[request_id] = waiting.number

    def preempted(self, request_id: str) -> int | None:
        """Returns a request to the head of the queue, under a new number; returns its former number."""
        former = self.running.pop(request_id, None)
        if former is not None:
            # Before all arrivals, and in the order of numbers among each other: engines preempt the last request first.
            self._append(request_id, former - (1 << 62))
        return former

    def finished(self, request_id: str) -> int | None:
        """Removes a request; returns its number."""
        self._ranks.pop(request_id, None)
        waiting = self.waiting.pop(request_id, None)
        return self.running.pop(request_id, None) if waiting is None else waiting.number

    def iterated(self, starts: int) -> None:
        """Counts an iteration in which a number of waiting requests have begun.

        Call it only for iterations with waiting requests: the mean describes how fast the queue moves.
        """
        self._since_start += 1
        if starts > 0:
            sample = self._since_start / starts
            self.between_starts += 2 * (sample - self.between_starts) / (STARTS_WINDOW + 1)
            self._since_start = 0

    def head(self, count: int) -> list[Waiting]:
        """Returns the first waiting requests in their expected order."""
        return heapq.nsmallest(count, self.waiting.values(), key=lambda waiting: waiting.order)

    def iterations(self, place: int, window: int) -> int:
        """Returns the expected number of iterations until the request at a place of the queue runs."""
        first = min(1 + int(self.between_starts / 2), window)
        return first + int(place * self.between_starts)

    def _append(self, request_id: str, turn: int) -> None:
        number = self._next_number
        self._next_number += 1
        order = (*self._ranks.get(request_id, ()), turn)
        self.waiting[request_id] = Waiting(request_id, number, order)


@dataclass
class Lookahead:
    """Hints of one engine. Not thread-safe: all calls are from the thread of its scheduler."""

    session: Session
    keys: Callable[[str, bool], bytes]
    """Returns the keys of the blocks that a request will load from this node, block after block; empty if none is on a
    device or that is unknown. The second argument is whether the request is within the agent's window. Does not wait."""
    ranks: int = 1
    """Number of ranks whose keys each block has."""
    now: Callable[[], float] = time.monotonic
    blocks: Callable[[str, int], bytes] | None = None
    """Returns the keys of the blocks of a request that has begun from a number of a key on, block after block; empty
    without any so far. Does not wait. None: requests that have begun are not listed."""
    queue: Queue = field(default_factory=Queue)
    _sent: dict[int, bytes] = field(default_factory=dict)
    """Keys that the agent has, by the numbers of requests."""
    _cancelled: list[int] = field(default_factory=list)
    _begun: dict[str, Begun] = field(default_factory=dict)
    _begun_number: int = 0
    """Number of the last request that has begun."""
    _begun_changed: bool = False
    """Whether a request has begun, was preempted or has finished since the last list."""
    _begun_listed: bool = False
    """Whether the agent has such requests."""
    _begun_at: float = 0.0
    """Time of the last list."""
    _begun_resends: bool = False
    """Whether the last list had keys that travel again, and the next one has more."""
    _begun_repetition: Repetition = field(default_factory=Repetition)
    """For requests that have begun: only an answer to a list of them shows that the agent has their keys."""
    _is_listed: bool = False
    """Whether the last hint listed a request, which the next one may omit."""
    _repetition: Repetition = field(default_factory=Repetition)
    """For requests that wait."""
    _asked: tuple[bool, bool] = (False, False)
    """Whether the last hint listed requests that wait, and those that have begun."""
    _pending: PendingLookahead | None = None
    _sessions: int = 0
    """Number of sessions at the last hint; an agent forgets hints at the end of a session."""
    _window: int = WINDOW_MIN
    _next_at: float = 0.0
    _step_at: float | None = None
    """Time of the last step that computed; None after a pause of the engine."""
    _seconds: float = 0.0
    _iterations: int = 0
    """Iterations since the last hint, and their total time."""
    _iteration: float | None = None
    """Time of an iteration in the last hint."""

    def arrived(self, request_id: str, rank: tuple[Any, ...] = ()) -> None:
        """Appends a request to the queue; arguments as for :meth:`Queue.arrived`."""
        self.queue.arrived(request_id, rank)

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Returns requests to the queue, and cancels their hints."""
        for request_id in request_ids:
            self._cancel(self.queue.preempted(request_id))
            if (begun := self._begun.get(request_id)) is not None:
                begun.is_preempted = self._begun_changed = True

    def finished(self, request_id: str) -> None:
        """Removes a request from the queue, and cancels its hint."""
        self._cancel(self.queue.finished(request_id))
        if self._begun.pop(request_id, None) is not None:
            self._begun_changed = True
        if not self.queue.waiting and not self.queue.running:
            # The time until the next step is not that of an iteration.
            self._step_at = None

    def replaced(self, request_id: str) -> None:
        """Records that the blocks of a request are others than before: its keys travel again from the first one on."""
        if (begun := self._begun.get(request_id)) is not None:
            begun.sent = begun.confirmed = 0

    def step(self, begun: Iterable[str], *, is_idle: bool) -> None:
        """Ends a step of the scheduler, and sends a hint if one is due.

        Args:
            begun: requests that compute or load, those that began earlier included.
            is_idle: whether the step computes nothing.
        """
        before = len(self.queue.waiting)
        begun = tuple(begun)
        self.queue.begun(begun)
        self._note_begun(begun)
        now = self.now()
        if self._step_at is not None:
            self._seconds += now - self._step_at
            self._iterations += 1
        self._step_at = None if is_idle else now
        if before and not is_idle:
            self.queue.iterated(before - len(self.queue.waiting))
        if self._is_due(now):
            self._send()
            ended = self.now()
            self._next_at = max(self._next_at, ended + max(INTERVAL_S, COST_SHARE * (ended - now)))

    def _note_begun(self, request_ids: Iterable[str]) -> None:
        if self.blocks is None:
            return
        for request_id in request_ids:
            begun = self._begun.get(request_id)
            if begun is None and request_id in self.queue.running:
                self._begun_number += 1
                self._begun[request_id] = Begun(self._begun_number)
                self._begun_changed = True
            elif begun is not None and begun.is_preempted:
                begun.is_preempted, self._begun_changed = False, True

    def _is_begun_due(self, now: float) -> bool:
        """Returns whether the requests that have begun are listed in the next hint."""
        if not self._begun and not self._begun_listed:
            return False
        is_changed = self._begun_changed or self._begun_resends or self._begun_repetition.is_due(now)
        return now - self._begun_at >= (BEGUN_CHANGED_S if is_changed else BEGUN_INTERVAL_S)

    def _cancel(self, number: int | None) -> None:
        if number is not None and self._sent.pop(number, None) is not None and len(self._cancelled) < CANCELLED_MAX:
            self._cancelled.append(number)

    def _is_due(self, now: float) -> bool:
        """Returns whether a hint may be sent now; reads the answer to the last one."""
        if now < self._next_at:
            return False
        if self._pending is not None:
            try:
                report = self._pending.poll()
            except RepriseError as error:
                logger.debug("a hint was not answered: %s", error)
                self._pause(now)
                return False
            if report is None:
                return False
            self._window, self._pending = max(report.window, 1), None
            waiting, begun = self._asked
            # The answer does not name the ignored ones.
            if begun:
                self._begun_repetition.answered(report.ignored)
            if waiting or not begun:
                self._repetition.answered(report.ignored)
        if not (self.queue.waiting or self._is_listed or self._cancelled or self._is_begun_due(now)):
            return False
        if not self.session.connected or self.session.suspected:
            self._pause(now)
            return False
        if self._iterations:
            self._iteration = min(max(self._seconds / self._iterations, 1e-6), ITERATION_MAX_S)
        return self._iteration is not None

    def _pause(self, now: float) -> None:
        """Forgets what the agent has, and sends nothing for some time."""
        self._sent, self._cancelled, self._pending, self._is_listed = {}, [], None, False
        self._forget_begun()
        self._next_at = now + FAILED_PAUSE_S

    def _forget_begun(self) -> None:
        """Records that the agent has no keys of requests that have begun."""
        self._begun_listed = self._begun_resends = False
        for begun in self._begun.values():
            begun.sent = begun.confirmed = 0

    def _send(self) -> None:
        if self._sessions != (sessions := self.session.sessions):
            self._sent, self._sessions, self._cancelled = {}, sessions, []
            self._forget_begun()
        requests, sent = self._requests(repeats=self._repetition.take(self.now()))
        begun = self._list_begun() if self._is_begun_due(self.now()) else None
        if not requests and not self._is_listed and not self._cancelled and begun is None:
            return
        assert self._iteration is not None
        arguments = (self._iteration, requests, self._cancelled, self.ranks > 1)
        self._asked = bool(requests), begun is not None
        self._pending = self.session.start_lookahead(*arguments, begun=begun)
        if self._pending is None:
            self._pause(self.now())
            return
        # Requests that have begun stay known until they finish or are preempted, which cancels them.
        begun = {number: self._sent[number] for number in self.queue.running.values() if number in self._sent}
        self._sent = {**begun, **sent}
        self._cancelled, self._is_listed = [], bool(requests)
        self._seconds, self._iterations = 0.0, 0

    def _list_begun(self) -> list[tuple[int, bool, int, bytes]] | None:
        """Returns the requests that have begun and have blocks; None without any here and at the agent.

        Keys that travel again change nothing at an agent that has them. A request stays listed until it is its turn, because
        the agent ends those that a list omits.
        """
        assert self.blocks is not None
        now = self.now()
        if not self._begun_resends and self._begun_repetition.take(now):
            for begun in self._begun.values():
                begun.confirmed = 0
        self._begun_at, self._begun_changed, self._begun_resends = now, False, False
        room, total = BEGUN_KEYS_PER_HINT, BEGUN_KEYS_MAX - sum(begun.sent for begun in self._begun.values())
        listed: list[tuple[int, bool, int, bytes]] = []
        has_resent = has_more = False
        for request_id, begun in self._begun.items():
            if len(listed) == BEGUN_REQUESTS_MAX:
                # The agent ends it.
                begun.sent = begun.confirmed = 0
                continue
            again = begun.sent - begun.confirmed
            first, keys = begun.confirmed, self._blocks_within(request_id, begun.confirmed, min(room, again + total))
            count = len(keys) // KEY_BYTES
            room -= count
            if not keys:
                first = begun.sent
            begun.confirmed += count
            total -= max(begun.confirmed - begun.sent, 0)
            begun.sent = max(begun.sent, begun.confirmed)
            has_resent |= again > 0 and count > 0
            has_more |= begun.confirmed < begun.sent
            if begun.sent:
                listed.append((begun.number, begun.is_preempted, first, keys))
        was_listed, self._begun_listed = self._begun_listed, bool(listed)
        self._begun_resends = has_resent and has_more
        return listed if listed or was_listed else None

    def _blocks_within(self, request_id: str, first: int, room: int) -> bytes:
        """Returns the keys of whole blocks of a request that has begun, from a number on, for which there is room."""
        assert self.blocks is not None
        if room < self.ranks:
            return b""
        return self.blocks(request_id, first)[: (room - room % self.ranks) * KEY_BYTES]

    def _requests(self, *, repeats: bool) -> tuple[list[tuple[int, int, float, bytes]], dict[int, bytes]]:
        """Returns the requests of a hint, and the keys that the agent has after it."""
        requests: list[tuple[int, int, float, bytes]] = []
        sent: dict[int, bytes] = {}
        room = KEYS_MAX * KEY_BYTES
        for place, waiting in enumerate(self.queue.head(REQUESTS_MAX)):
            iterations = self.queue.iterations(place, self._window)
            known = self._sent.get(waiting.number, b"")
            keys = self.keys(waiting.request_id, iterations <= self._window)
            listed = self._within(keys or known, known, room)
            if not listed:
                continue
            room -= len(listed)
            is_known = listed == known and not repeats
            requests.append((waiting.number, iterations, 1.0, b"" if is_known else listed))
            sent[waiting.number] = listed
        return requests, sent

    def _within(self, keys: bytes, known: bytes, room: int) -> bytes:
        """Returns the keys of the leading blocks for which there is room.

        Args:
            keys: keys of a request.
            known: those of its keys that the agent has; they stay listed, so that the keys do not travel again whenever
                the requests before this one need less room.
            room: bytes left for the keys of all requests.
        """
        block = KEY_BYTES * self.ranks
        limit = min(room, REQUEST_KEYS_MAX * KEY_BYTES)
        if len(keys) <= limit:
            return keys
        if known and len(known) <= limit and keys.startswith(known):
            return known
        return keys[: limit - limit % block]
