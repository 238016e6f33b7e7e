"""What a request asks of the cache: ``kv_transfer_params`` of vLLM's requests, and the class of its blocks.

```text
kv_load_tiers    [{"medium": "CPU" | "STORAGE", "locality": "LOCAL" | "REMOTE"}, …]   sources to load from; []: none
kv_store_tiers   the same: blocks are stored in CPU and STORAGE, LOCAL; []: nothing is stored
kv_no_store      true: nothing is stored
kv_no_retain     true: stored blocks are evicted first
```

``kv_load_tiers`` is vLLM's own parameter, read as vLLM's offloading reads it: an entry without a name matches everything
of that name. Unlike there, a parameter with an invalid entry is ignored as a whole, logged and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from reprise import Source
from reprise.repeated_log import RepeatedLog

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from reprise.vllm.metrics import CounterSink

Priority: TypeAlias = Literal["low", "normal", "high"]

PLACES = {
    Source.OWN_DRAM: ("CPU", "LOCAL"),
    Source.OWN_NVME: ("STORAGE", "LOCAL"),
    Source.PEER_DRAM: ("CPU", "REMOTE"),
    Source.PEER_NVME: ("STORAGE", "REMOTE"),
}
"""vLLM's medium and locality of each source."""

NAMES = {"medium": ("CPU", "STORAGE"), "locality": ("LOCAL", "REMOTE")}
"""Names of an entry of a list of tiers, with their values."""

ENTRIES_MAX = 16
"""Maximum number of entries of a list of tiers."""

_refused = RepeatedLog("parameters of a request were ignored")


@dataclass(frozen=True)
class RequestParams:
    """What a request asks of the cache."""

    sources: frozenset[int] = frozenset(Source)
    """Sources to load from."""
    stores: bool = True
    """Whether its blocks are saved."""
    priority: Priority = "normal"
    """Eviction priority of its blocks."""

    @classmethod
    def of(cls, request: Request, counters: CounterSink, *, by_priority: bool) -> RequestParams:
        """Reads the parameters of a request; invalid ones are ignored, logged and counted.

        Args:
            request: the request.
            counters: counts ignored parameters.
            by_priority: whether vLLM schedules by the priorities of requests; only then do they count.
        """
        given = getattr(request, "kv_transfer_params", None) or {}
        read = _Reader(given, counters)
        load, store = read.tiers("kv_load_tiers"), read.tiers("kv_store_tiers")
        no_store, no_retain = read.flag("kv_no_store"), read.flag("kv_no_retain")
        stores = not no_store and bool(store & {Source.OWN_DRAM, Source.OWN_NVME})
        priority = _priority(request.priority) if by_priority else "normal"
        return cls(load, stores, "low" if no_retain else priority)

    def loadable(self, sources: Sequence[int]) -> int:
        """Returns the number of leading blocks that may be loaded."""
        if len(self.sources) == len(Source):
            return len(sources)
        return sum(1 for _ in takewhile(self.sources.__contains__, sources))


@dataclass(frozen=True)
class _Reader:
    """Reads the parameters of one request."""

    given: Any
    counters: CounterSink

    def tiers(self, name: str) -> frozenset[int]:
        """Returns the sources that a list of tiers matches."""
        raw = self._get(name)
        if raw is None:
            return frozenset(Source)
        is_list = isinstance(raw, list) and len(raw) <= ENTRIES_MAX
        if not is_list or not all(_is_entry(entry) for entry in raw):
            self._refuse(
                f'invalid {name} {str(raw)[:100]!r}: expected a list of at most {ENTRIES_MAX} entries such as {{"medium": '
                '"STORAGE", "locality": "LOCAL"}'
            )
            return frozenset(Source)
        return frozenset(source for source in Source if any(_matches(entry, source) for entry in raw))

    def flag(self, name: str) -> bool:
        """Returns a parameter that is true or false."""
        raw = self._get(name)
        if raw is not None and not isinstance(raw, bool):
            self._refuse(f"invalid {name} {str(raw)[:100]!r}: expected true or false")
        return raw is True

    def _get(self, name: str) -> Any:
        return self.given.get(name) if isinstance(self.given, dict) else None

    def _refuse(self, reason: str) -> None:
        _refused.note(reason)
        self.counters.add("ignored_parameters", 1)


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        name in NAMES and isinstance(value, str) and value.upper() in NAMES[name] for name, value in entry.items()
    )


def _matches(entry: dict[str, str], source: Source) -> bool:
    medium, locality = PLACES[source]
    return entry.get("medium", medium).upper() == medium and entry.get("locality", locality).upper() == locality


def _priority(vllm_priority: int) -> Priority:
    """Returns the class of a request's blocks: vLLM's smallest priorities are served first, 0 is the default."""
    if vllm_priority < 0:
        return "high"
    return "low" if vllm_priority > 0 else "normal"
