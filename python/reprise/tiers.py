"""Filters of sources by vLLM's names of tiers: a medium and a locality.

```text
source            medium     locality
DRAM of the node  CPU        LOCAL
NVMe of the node  STORAGE    LOCAL
DRAM of a peer    CPU        REMOTE
NVMe of a peer    STORAGE    REMOTE
```

An entry without one of the two names matches everything of that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import takewhile
from typing import Any

from reprise import Source

PLACES = {
    Source.OWN_DRAM: ("CPU", "LOCAL"),
    Source.OWN_NVME: ("STORAGE", "LOCAL"),
    Source.PEER_DRAM: ("CPU", "REMOTE"),
    Source.PEER_NVME: ("STORAGE", "REMOTE"),
}
"""Medium and locality of each source."""

NAMES = {"medium": ("CPU", "STORAGE"), "locality": ("LOCAL", "REMOTE")}
"""Names of an entry, with their values."""

ALL = frozenset(Source)
"""All sources."""


def is_entry(entry: Any) -> bool:
    """Returns whether an entry has only known names and values."""
    return isinstance(entry, dict) and all(
        name in NAMES and isinstance(value, str) and value.upper() in NAMES[name] for name, value in entry.items()
    )


def sources(entries: Sequence[Mapping[str, str]]) -> frozenset[int]:
    """Returns the sources that any of the valid entries matches."""
    return frozenset(source for source in Source if any(_matches(entry, source) for entry in entries))


def parse(text: str) -> frozenset[int]:
    """Returns the sources of a list such as ``CPU:LOCAL,STORAGE``; ``none`` for no source.

    Raises:
        ValueError: an entry is invalid.
    """
    if text.strip().lower() == "none":
        return frozenset()
    entries = []
    for part in text.split(","):
        words = [word.strip().upper() for word in part.split(":")]
        entry = {name: word for word in words for name, values in NAMES.items() if word in values}
        if len(entry) != len(words):
            raise ValueError(
                f"invalid tier {part.strip()!r}: expected CPU or STORAGE, LOCAL or REMOTE, or both such as STORAGE:LOCAL"
            )
        entries.append(entry)
    return sources(entries)


def loadable(found: Sequence[int], allowed: Set[int]) -> int:
    """Returns the number of leading blocks whose sources are allowed."""
    if len(allowed) == len(ALL):
        return len(found)
    return sum(1 for _ in takewhile(allowed.__contains__, found))


def _matches(entry: Mapping[str, str], source: Source) -> bool:
    medium, locality = PLACES[source]
    return entry.get("medium", medium).upper() == medium and entry.get("locality", locality).upper() == locality
