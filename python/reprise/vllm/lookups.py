"""Look-ups of requests' chunks, with one match per request and step.

```text
first lookup  ─▶ waiting   RETRY   vLLM continues its scan, so that the keys of a prompt are collected
end of step   ─▶ matching  RETRY   one match, in the order of the prompt; later if the step has no time left
next lookups  ─▶ HIT for the leading keys that were found, MISS for the key after them; keys beyond that are matched
                 only if vLLM looks them up again
```

A verdict is valid until its request ends, but a HIT that could not be loaded becomes a MISS. If no agent answers, every
key is a MISS at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from reprise.recompute import Limit
from reprise.vllm.match_calls import KEYS_PER_MATCH, MatchCall, Matcher
from reprise.vllm.request_params import RequestParams


@dataclass
class RequestLookups:
    """State of one request's keys."""

    verdicts: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    waiting: dict[OffloadKey, None] = field(default_factory=dict)
    """Keys to match, in the order of their first lookup."""
    matching: dict[OffloadKey, None] = field(default_factory=dict)
    """Keys of the pending match, in order."""
    call: MatchCall | None = None
    polled_in_step: int = -1
    """Step in which the match was last polled; each step waits for it once."""
    sources: dict[OffloadKey, int] = field(default_factory=dict)
    """Sources of the keys that were found."""
    prefix_tokens: int = 0
    """Tokens of the request that vLLM has on the GPU."""
    limit: Limit | None = None
    """Limit of the wait for loads of the request."""
    last: OffloadKey | None = None
    """Last key of the request's chain that was found or stored."""
    position: Callable[[OffloadKey], int | None] | None = None
    """Returns the number of chunks before a key in the request's chain; None if it is unknown."""
    params: RequestParams = field(default_factory=RequestParams)
    """What the request asks of the cache."""


@dataclass
class Lookups:
    """Look-ups of all requests."""

    matcher: Matcher
    keys: Callable[[Collection[OffloadKey]], bytes]
    """Converts vLLM's keys to packed keys."""
    choose: Callable[[RequestLookups, Sequence[int]], int] | None = None
    """Returns the number of leading keys to load of those with these sources; None: all."""
    _requests: dict[str, RequestLookups] = field(default_factory=dict)
    _step: int = 0

    def begin_request(self, request_id: str, params: RequestParams) -> None:
        """Records a new request."""
        self._requests[request_id] = RequestLookups(params=params)

    def note_position(self, request_id: str, position: Callable[[OffloadKey], int | None]) -> None:
        """Records how to find the place of a key in the chain of a request."""
        self._requests.setdefault(request_id, RequestLookups()).position = position

    def position(self, request_id: str, key: OffloadKey) -> int | None:
        """Returns the number of chunks before a key in a request's chain; None if it is unknown."""
        state = self._requests.get(request_id)
        return None if state is None or state.position is None else state.position(key)

    def lookup(self, request_id: str, key: OffloadKey) -> LookupResult:
        """Looks up a chunk. Waits at most for the remaining budget of the step."""
        state = self._requests.setdefault(request_id, RequestLookups())
        verdict = state.verdicts.get(key)
        if verdict is not None:
            return verdict
        if not state.params.sources:
            return LookupResult.MISS
        if state.call is not None and state.polled_in_step != self._step:
            self._poll(state, state.call)
            verdict = state.verdicts.get(key)
            if verdict is not None:
                return verdict
        session = self.matcher.session
        if state.call is None and (not session.connected or session.suspected):
            return LookupResult.MISS
        if state.call is None or key not in state.matching:
            state.waiting[key] = None
        return LookupResult.RETRY

    def end_step(self) -> None:
        """Starts matches of the keys collected in this step, within the budget of the next step; the rest waits."""
        self._step += 1
        self.matcher.begin_step()
        for state in self._requests.values():
            if state.call is None and state.waiting and not self._start_match(state):
                break

    def note_prefix(self, request_id: str, tokens: int) -> None:
        """Records the number of a request's tokens that vLLM has on the GPU."""
        self._requests.setdefault(request_id, RequestLookups()).prefix_tokens = tokens

    def limit(self, request_id: str) -> Limit | None:
        """Returns the limit of the wait for loads of a request; None: no limit."""
        state = self._requests.get(request_id)
        return None if state is None else state.limit

    def sources(self, request_id: str, keys: Collection[OffloadKey]) -> list[int | None]:
        """Returns the sources of a request's keys; None for those that were not found."""
        state = self._requests.get(request_id)
        return [None if state is None else state.sources.get(key) for key in keys]

    def missed(self, keys: Collection[OffloadKey]) -> None:
        """Records that these keys were found but could not be loaded."""
        for state in self._requests.values():
            for key in keys:
                if key in state.verdicts:
                    state.verdicts[key] = LookupResult.MISS

    def parent(self, request_id: str) -> OffloadKey | None:
        """Returns the key before the next one to store in the request's chain; None if there is no such key or it is unknown."""
        state = self._requests.get(request_id)
        return None if state is None else state.last

    def note_stored(self, request_id: str, key: OffloadKey) -> None:
        """Records the last stored key of a request."""
        state = self._requests.get(request_id)
        if state is not None:
            state.last = key

    def preempted(self, request_id: str) -> None:
        """Drops the verdicts of a preempted request: it has stored chunks that it may load when it runs again."""
        state = self._requests.get(request_id)
        if state is not None:
            state.verdicts, state.waiting, state.matching, state.call = {}, {}, {}, None

    def end_request(self, request_id: str) -> None:
        """Drops the state of a finished request."""
        self._requests.pop(request_id, None)

    def invalidate(self) -> None:
        """Drops all verdicts."""
        self._requests = {
            name: RequestLookups(position=state.position, params=state.params) for name, state in self._requests.items()
        }

    def _start_match(self, state: RequestLookups) -> bool:
        """Starts a match of a request's keys; returns whether the step had time for it."""
        waiting = list(state.waiting)
        matching = waiting[:KEYS_PER_MATCH]
        position = state.position
        call = self.matcher.start(
            lambda: self.keys(matching), lambda: None if position is None else position(matching[0])
        )
        if call is None:
            return False
        state.call = call
        state.matching = dict.fromkeys(matching)
        state.waiting = dict.fromkeys(waiting[KEYS_PER_MATCH:])
        return True

    def _poll(self, state: RequestLookups, call: MatchCall) -> None:
        state.polled_in_step = self._step
        sources = self.matcher.poll(call)
        if sources is None:
            return
        matched = list(state.matching)
        if len(sources) > 0:
            state.last = matched[len(sources) - 1]
        hits = state.params.loadable(sources)
        sources = sources[:hits]
        if sources and self.choose is not None:
            hits = self.choose(state, sources)
        state.sources.update(zip(matched[:hits], sources, strict=False))
        state.verdicts.update(dict.fromkeys(matched[:hits], LookupResult.HIT))
        state.verdicts.update(dict.fromkeys(matched[hits : hits + 1], LookupResult.MISS))
        state.matching = {}
        state.call = None
