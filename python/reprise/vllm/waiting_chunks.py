"""Hints of the tier about requests that wait in vLLM's queue.

vLLM passes a tier only the keys of the request that it schedules next. ``RepriseOffloadingConnector`` sees the whole queue
and passes it here. A request is matched when it is within the agent's window, and again after some time. The matches and
the derivation of their keys share the time budget of the tier's look-ups, and nothing waits for their answers. What a step
has no time for, the next one continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reprise.lookahead import KEY_BYTES, REMATCH_S, Lookahead, blocks_ahead, blocks_here
from reprise.vllm.match_calls import KEYS_PER_MATCH, KeyDerivation, MatchCall, Matcher

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey


@dataclass(frozen=True)
class MissingChunks:
    """Chunks of a request from the first one on that vLLM does not have in host memory."""

    position: int | None
    """Number of chunks before the first one; None if it is unknown."""
    count: int
    keys: Callable[[int, int], Sequence[OffloadKey]]
    """Derives vLLM's keys of the chunks from one index to another."""


@dataclass
class WaitingChunks:
    """A waiting request."""

    missing: Callable[[], MissingChunks]
    """Returns its chunks that are missing now."""
    derivation: KeyDerivation | None = None
    """Keys of the next match, which are being derived."""
    position: int | None = None
    """Position of the first of these keys."""
    call: MatchCall | None = None
    matching: bytes = b""
    """Packed keys of the pending match."""
    matched_at: float | None = None
    keys: bytes = b""
    """Packed keys to read ahead."""
    here: bytes = b""
    """Packed keys of matches that are on this node, from the first missing chunk on."""


@dataclass
class WaitingRequests:
    """Waiting requests of an engine, and their hints."""

    matcher: Matcher
    pack: Callable[[Collection[OffloadKey]], bytes]
    """Converts vLLM's keys to packed keys."""
    now: Callable[[], float] = time.monotonic
    hints: Lookahead = field(init=False)
    _requests: dict[str, WaitingChunks] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hints = Lookahead(self.matcher.session, self._keys_ahead, blocks=self._blocks_begun)

    def arrived(self, request_id: str, missing: Callable[[], MissingChunks], rank: tuple[Any, ...] = ()) -> None:
        """Appends a request.

        Args:
            request_id: vLLM's name of the request.
            missing: returns its chunks that vLLM does not have in host memory.
            rank: as for :meth:`reprise.lookahead.Queue.arrived`.
        """
        self._requests[request_id] = WaitingChunks(missing)
        self.hints.arrived(request_id, rank)

    def finished(self, request_id: str) -> None:
        """Removes a request."""
        self._requests.pop(request_id, None)
        self.hints.finished(request_id)

    def step(self, begun: Collection[str], preempted: Iterable[str]) -> None:
        """Ends a step of vLLM's scheduler.

        Args:
            begun: requests that compute.
            preempted: requests that were preempted.
        """
        for request_id in preempted:
            if (request := self._requests.get(request_id)) is not None:
                # It has more chunks than before.
                self._requests[request_id] = WaitingChunks(request.missing, here=request.here)
            self.hints.preempted([request_id])
        self.hints.step(begun, is_idle=not begun)

    def invalidate(self) -> None:
        """Drops all matches, because the keys of chunks have changed."""
        self._requests = {name: WaitingChunks(request.missing) for name, request in self._requests.items()}
        for request_id in self._requests:
            self.hints.replaced(request_id)

    def _keys_ahead(self, request_id: str, is_near: bool) -> bytes:
        request = self._requests.get(request_id)
        if request is None:
            return b""
        if request.call is not None and request.call.pending is not None:
            self._take_answer(request_id, request)
        elif is_near and (request.matched_at is None or self.now() - request.matched_at > REMATCH_S):
            self._start_match(request)
        return request.keys

    def _blocks_begun(self, request_id: str, first: int) -> bytes:
        request = self._requests.get(request_id)
        if request is None:
            return b""
        before = request.here
        if request.call is not None and request.call.pending is not None:
            # It has begun before the answer to its match.
            self._take_answer(request_id, request)
        if not request.here.startswith(before):
            # The next list has other keys from the first one on.
            return b""
        return request.here[first * KEY_BYTES :]

    def _take_answer(self, request_id: str, request: WaitingChunks) -> None:
        """Takes the answer to the match of a request, if there is one."""
        assert request.call is not None
        sources = self.matcher.peek(request.call)
        if sources is None:
            return
        request.keys = request.matching[: blocks_ahead(sources) * KEY_BYTES]
        here = request.matching[: blocks_here(sources) * KEY_BYTES]
        request.call, request.matching = None, b""
        # The first missing chunk is another one if vLLM has dropped some since, or has loaded some.
        if not here.startswith(request.here) and not request.here.startswith(here):
            self.hints.replaced(request_id)
            request.here = here
        elif len(here) > len(request.here):
            request.here = here

    def _start_match(self, request: WaitingChunks) -> None:
        """Derives the keys of a request's missing chunks and matches them, as far as the step has time."""
        if request.derivation is None:
            missing = self.matcher.derive(request.missing)
            if missing is None:
                return
            count = min(missing.count, KEYS_PER_MATCH)
            request.derivation = KeyDerivation(lambda first, end: self.pack(missing.keys(first, end)), count)
            request.position = missing.position
        if not request.derivation.advance(self.matcher):
            return
        if packed := request.derivation.packed:
            request.call = self.matcher.start(lambda: packed, lambda: request.position)
            if request.call is None:
                return
            request.matching = packed
        request.derivation, request.matched_at = None, self.now()
