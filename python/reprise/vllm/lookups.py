"""What the agent has of each request's chunks, asked a step's keys at a time.

```text
first look   ─▶ waiting   RETRY   vLLM goes on scanning, so that a prompt's keys come together
end of step  ─▶ asked     RETRY   one question, in the order of the prompt; later, where the step has no time left
next looks   ─▶ HIT for the leading ones that are there, MISS for the one behind them; what lies beyond is asked about
                if vLLM ever looks at it
```

A verdict is kept until its request ends; a HIT that could not be loaded is a MISS from then on. Without an agent that answers
everything is a MISS at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from reprise.vllm.asking import KEYS_PER_MATCH, Asker, Question


@dataclass
class RequestLookups:
    """What is known of one request's keys."""

    verdicts: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    waiting: dict[OffloadKey, None] = field(default_factory=dict)
    """To be asked about, in the order of their first look."""
    asked: dict[OffloadKey, None] = field(default_factory=dict)
    """Asked about, in this order."""
    question: Question | None = None
    looked_in: int = -1
    """The step in which the answer was looked for last: a step waits for it once."""
    last: OffloadKey | None = None
    """The last key of the request's chain that was found or stored."""


@dataclass
class Lookups:
    """See the module."""

    asker: Asker
    keys: Callable[[Collection[OffloadKey]], bytes]
    """Packed keys of vLLM's."""
    _requests: dict[str, RequestLookups] = field(default_factory=dict)
    _step: int = 0

    def look(self, request_id: str, key: OffloadKey) -> LookupResult:
        """Whether a chunk is there. Waits for what is left of the step's budget at the most."""
        state = self._requests.setdefault(request_id, RequestLookups())
        verdict = state.verdicts.get(key)
        if verdict is not None:
            return verdict
        if state.question is not None and state.looked_in != self._step:
            self._take_answer(state, state.question)
            verdict = state.verdicts.get(key)
            if verdict is not None:
                return verdict
        session = self.asker.session
        if state.question is None and (not session.connected or session.suspected):
            return LookupResult.MISS
        if state.question is None or key not in state.asked:
            state.waiting[key] = None
        return LookupResult.RETRY

    def end_step(self) -> None:
        """Asks about what has come together in this step, within the budget of the next; the rest is for the one after it."""
        self._step += 1
        self.asker.begin_step()
        for state in self._requests.values():
            if state.question is None and state.waiting and not self._ask(state):
                break

    def missed(self, keys: Collection[OffloadKey]) -> None:
        """These were found and could not be loaded."""
        for state in self._requests.values():
            for key in keys:
                if key in state.verdicts:
                    state.verdicts[key] = LookupResult.MISS

    def parent(self, request_id: str) -> OffloadKey | None:
        """The key that precedes the next one to be stored in the request's chain; None: there is none, or it is not known."""
        state = self._requests.get(request_id)
        return None if state is None else state.last

    def note_stored(self, request_id: str, key: OffloadKey) -> None:
        """This is the last key that was stored of a request."""
        state = self._requests.get(request_id)
        if state is not None:
            state.last = key

    def end_request(self, request_id: str) -> None:
        """A request is over."""
        self._requests.pop(request_id, None)

    def forget(self) -> None:
        """Nothing that was found before counts any more."""
        self._requests.clear()

    def _ask(self, state: RequestLookups) -> bool:
        """Asks about the keys of a request; whether there was time for it."""
        waiting = list(state.waiting)
        asked = waiting[:KEYS_PER_MATCH]
        question = self.asker.ask(lambda: self.keys(asked))
        if question is None:
            return False
        state.question = question
        state.asked = dict.fromkeys(asked)
        state.waiting = dict.fromkeys(waiting[KEYS_PER_MATCH:])
        return True

    def _take_answer(self, state: RequestLookups, question: Question) -> None:
        state.looked_in = self._step
        sources = self.asker.look(question)
        if sources is None:
            return
        asked = list(state.asked)
        if len(sources) > 0:
            state.last = asked[len(sources) - 1]
        state.verdicts.update(dict.fromkeys(asked[: len(sources)], LookupResult.HIT))
        state.verdicts.update(dict.fromkeys(asked[len(sources) : len(sources) + 1], LookupResult.MISS))
        state.asked = {}
        state.question = None
