"""What a request asks of the cache: ``kv_transfer_params`` and KV hints of vLLM's requests, and the class of its blocks.

```text
kv_load_tiers    [{"medium": "CPU" | "STORAGE", "locality": "LOCAL" | "REMOTE"}, …]   sources to load from; []: none
kv_store_tiers   the same: blocks are stored in CPU and STORAGE, LOCAL; []: nothing is stored
kv_no_store      true: nothing is stored
kv_no_retain     true: stored blocks are evicted first
kv_hints         an envelope of KV hints (:mod:`reprise.kv_hints`)
```

``kv_load_tiers`` is vLLM's own parameter, read as vLLM's offloading reads it: an entry without a name matches everything
of that name. Unlike there, a parameter with an invalid entry is ignored as a whole, logged and counted.

vLLM has a field for KV hints in its Python interface (``kv_hints``), but none in HTTP. So they are also read from
``kv_transfer_params``, by the name ``kv_hints`` or by that of Dynamo, ``kv_hint``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from reprise import Source, kv_hints, tiers
from reprise.kv_hints import Hints, Priority
from reprise.repeated_log import RepeatedLog

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from reprise.vllm.metrics import CounterSink

ENTRIES_MAX = 16
"""Maximum number of entries of a list of tiers."""

HINT_NAMES = ("kv_hints", "kv_hint")
"""Names of an envelope of KV hints in ``kv_transfer_params``."""

_refused = RepeatedLog("parameters of a request were ignored")
_refused_hints = RepeatedLog("KV hints of a request were ignored")


@dataclass(frozen=True)
class RequestParams:
    """What a request asks of the cache."""

    sources: frozenset[int] = tiers.ALL
    """Sources to load from."""
    stores: bool = True
    """Whether its blocks are saved."""
    priority: Priority = "normal"
    """Eviction priority of its blocks, unless its hints have another one."""
    retains: bool = True
    """Whether hints may raise that priority."""
    hints: Hints = kv_hints.NONE
    """Valid KV hints."""

    @classmethod
    def of(cls, request: Request, counters: CounterSink, *, by_priority: bool) -> RequestParams:
        """Reads the parameters of a request; invalid ones are ignored, logged and counted.

        Args:
            request: the request.
            counters: counts ignored parameters.
            by_priority: whether vLLM schedules by the priorities of requests; only then do they count.
        """
        params, envelope = getattr(request, "kv_transfer_params", None), getattr(request, "kv_hints", None)
        return cls.read(params, envelope, counters, priority_of(request) if by_priority else "normal")

    @classmethod
    def read(cls, params: Any, envelope: Any, counters: CounterSink, priority: Priority = "normal") -> RequestParams:
        """Reads ``kv_transfer_params`` and KV hints; invalid ones are ignored, logged and counted.

        Args:
            params: the parameters, None without any.
            envelope: vLLM's own field of KV hints; None: they are read from the parameters.
            counters: counts ignored parameters.
            priority: eviction priority of the request's blocks.
        """
        read = _Reader(params or {}, counters)
        load, store = read.tiers("kv_load_tiers"), read.tiers("kv_store_tiers")
        no_store, no_retain = read.flag("kv_no_store"), read.flag("kv_no_retain")
        stores = not no_store and bool(store & {Source.OWN_DRAM, Source.OWN_NVME})
        hints = read.hints(envelope, stores=stores)
        if no_retain:
            hints = replace(hints, commands=tuple(command for command in hints.commands if not command.retains))
        return cls(load, stores, "low" if no_retain else priority, not no_retain, hints)

    def saves_generated(self, *, by_default: bool) -> bool:
        """Returns whether blocks of generated tokens are saved."""
        return by_default or self.hints.shares

    def classes(self, blocks: range, block_tokens: int, prompt_tokens: int) -> list[tuple[range, Priority]]:
        """Returns runs of blocks with equal eviction priorities, in order.

        Args:
            blocks: numbers of consecutive blocks.
            block_tokens: tokens of a block.
            prompt_tokens: tokens of the prompt.
        """
        if not self.retains or self.hints is kv_hints.NONE:
            return [(blocks, self.priority)] if blocks else []
        runs: list[tuple[range, Priority]] = []
        for block in blocks:
            priority = self.hints.priority(block * block_tokens, prompt_tokens, self.priority)
            if runs and runs[-1][1] == priority:
                runs[-1] = (range(runs[-1][0].start, block + 1), priority)
            else:
                runs.append((range(block, block + 1), priority))
        return runs

    def loadable(self, sources: Sequence[int]) -> int:
        """Returns the number of leading blocks that may be loaded."""
        return tiers.loadable(sources, self.sources)


@dataclass(frozen=True)
class _Reader:
    """Reads the parameters of one request."""

    given: Any
    counters: CounterSink

    def tiers(self, name: str) -> frozenset[int]:
        """Returns the sources that a list of tiers matches."""
        raw = self._get(name)
        if raw is None:
            return tiers.ALL
        is_list = isinstance(raw, list) and len(raw) <= ENTRIES_MAX
        if not is_list or not all(tiers.is_entry(entry) for entry in raw):
            self._refuse(
                f'invalid {name} {str(raw)[:100]!r}: expected a list of at most {ENTRIES_MAX} entries such as {{"medium": '
                '"STORAGE", "locality": "LOCAL"}'
            )
            return tiers.ALL
        return tiers.sources(raw)

    def flag(self, name: str) -> bool:
        """Returns a parameter that is true or false."""
        raw = self._get(name)
        if raw is not None and not isinstance(raw, bool):
            self._refuse(f"invalid {name} {str(raw)[:100]!r}: expected true or false")
        return raw is True

    def hints(self, envelope: Any, *, stores: bool) -> Hints:
        """Returns the valid KV hints of vLLM's own field, or of the parameters without one."""
        if envelope is None:
            envelope = next((self._get(name) for name in HINT_NAMES if self._get(name) is not None), None)
        hints = kv_hints.read(envelope, self._ignore_hint)
        if hints.shares and not stores:
            self._ignore_hint("kv.share of a request whose blocks are not stored (kv_no_store, kv_store_tiers)")
            return replace(hints, shares=False)
        return hints

    def _ignore_hint(self, reason: str) -> None:
        _refused_hints.note(reason)
        self.counters.add("ignored_hints", 1)

    def _get(self, name: str) -> Any:
        return self.given.get(name) if isinstance(self.given, dict) else None

    def _refuse(self, reason: str) -> None:
        _refused.note(reason)
        self.counters.add("ignored_parameters", 1)


def priority_of(request: Request) -> Priority:
    """Returns the class of a request's blocks: vLLM's smallest priorities are served first, 0 is the default."""
    if request.priority < 0:
        return "high"
    return "low" if request.priority > 0 else "normal"
