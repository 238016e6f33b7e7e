"""Key generations: pages of an engine whose weights were updated, or whose storage was cleared, get keys of their own.

A generation is a suffix behind SGLang's page hashes. An engine starts with the empty one, under which engines with the same model
share pages. Each change of weights and each clear ends a generation for good: nothing that was saved under it is found again by this
engine. The next generation is random, so no other engine finds its pages, and no page is saved under it yet.

```text
current ── weights begin to change ──▶ suspended ── the cache holds KV of the current weights only ──▶ next generation
        ── clear ────────────────────────────────────────────────────────────────────────────────────▶ next generation
```

While a generation is suspended there is no key: nothing is saved and nothing is found. SGLang's own cache may hold KV of the old
weights then (an update with ``flush_cache: false``), or of half the new ones, and its backup thread would save it.

Pages of a latent are the same on every rank; one rank writes them and the others read them, so all must use the same generation. The
writer publishes it in the store over which SGLang's ranks have found each other, under the digest of all that has happened to its
weights so far. A rank that has not seen the same updates with the same outcomes asks for another name::

    rank 0   update, flush ── new generation ──▶ store: reprise/generation/GROUP/HISTORY
    rank n   update, flush ──────────────────────▶ waits for it: SGLang updates and flushes all ranks in the same step

A rank that finds no generation under its history takes a random one: it finds nothing, and therefore the engine nothing.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from datetime import timedelta

import torch.distributed
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from torch.distributed import distributed_c10d

logger = logging.getLogger("reprise")

FOLLOW_WITHIN_S = 5.0
"""How long a rank waits for the writer's generation. Both reach it in the same step, so milliseconds are the rule."""


class Generation:
    """The key generation of one rank's pages. SGLang runs each rank in a process of its own; it outlives a storage that is detached.

    The scheduler's thread changes it, SGLang's storage threads read it.
    """

    def __init__(self) -> None:
        self._config: HiCacheStorageConfig | None = None
        self._history = b""
        """Digest of all changes, in order; empty: none since the start."""
        self._resolved_history = b""
        self._suffix: bytes | None = b""

    @property
    def suffix(self) -> bytes | None:
        """What follows each page hash in a key; None: suspended, no page has a key."""
        return self._suffix

    @property
    def is_suspended(self) -> bool:
        """Whether no page has a key."""
        return self._suffix is None

    def attach(self, config: HiCacheStorageConfig) -> None:
        """Takes the rank of a storage that begins to use this generation."""
        self._config = config
        if not self.is_suspended and self._resolved_history != self._history:
            self.resume()

    def suspend(self) -> None:
        """Ends the generation, because weights are about to change."""
        self._suffix = None

    def note(self, change: str) -> None:
        """Adds a change of the weights, with its outcome, to the history."""
        self._history = hashlib.sha256(self._history + change.encode()).digest()

    def resume(self) -> None:
        """Begins the generation that belongs to the history, once SGLang's cache holds KV of the current weights only."""
        if self._config is None:
            # Nothing is saved before a storage is attached, which comes here again.
            self._suffix = b""
            return
        self._suffix = _following(self._config, self._history)
        self._resolved_history = self._history

    def clear(self) -> None:
        """Begins another generation of the same weights."""
        self.note("clear")
        if not self.is_suspended:
            self.resume()


def _following(config: HiCacheStorageConfig, history: bytes) -> bytes:
    if not config.is_mla_model or config.tp_size == 1:
        return uuid.uuid4().bytes
    group = f"{config.model_name}:dp{config.dp_rank}:pp{config.pp_rank}:cp{config.attn_cp_rank}"
    name = f"reprise/generation/{group}/{history.hex()}"
    return _publish(name) if config.is_storage_writer else _follow(name)


def _publish(name: str) -> bytes:
    """Makes a generation and publishes it to the other ranks."""
    generation = uuid.uuid4().bytes
    store = _store()
    if store is not None:
        store.set(name, generation.hex())
    return generation


def _follow(name: str) -> bytes:
    """The writer's generation, or one that no other rank has."""
    store = _store()
    try:
        if store is None:
            raise RuntimeError("torch.distributed is not initialized in this process")
        store.wait([name], timedelta(seconds=FOLLOW_WITHIN_S))
        return bytes.fromhex(store.get(name).decode())
    except RuntimeError as error:
        logger.warning(
            "this rank finds no pages from now on: the rank that writes them has published no generation for the updates and "
            "clears that this rank has seen; restart the engine (%s)",
            error,
        )
        return uuid.uuid4().bytes


def _store() -> torch.distributed.Store | None:
    """The store over which SGLang's ranks have found each other; None: there is none."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return distributed_c10d._get_default_store()
