"""Key generations: after an update of weights or a clear of the storage, an engine's pages get different keys.

A generation is a suffix of SGLang's page hashes. An engine starts with the empty generation, under which engines with the
same model share pages. Each change of weights and each clear ends a generation permanently: this engine never finds pages
of an earlier generation again. The next generation is random, so that no other engine shares its pages.

```text
current ── weights begin to change ──▶ suspended ── the cache holds KV of the current weights only ──▶ next generation
        ── clear ────────────────────────────────────────────────────────────────────────────────────▶ next generation
```

While a generation is suspended, pages have no keys: no page is saved or found. In this state, SGLang's own cache may have
KV of the old weights (an update with ``flush_cache: false``) or of partly updated weights, which its backup thread would
save.

Pages of a latent are equal on all ranks. One rank writes them and the others read them, so all must use the same
generation. The writer publishes it in the store of ``torch.distributed`` that SGLang's ranks share. The name includes a
digest of the history of all updates and clears, so a rank with another history looks up another name::

    rank 0   update, flush ── new generation ──▶ store: reprise/generation/GROUP/HISTORY
    rank n   update, flush ──────────────────────▶ waits for it: SGLang updates and flushes all ranks in the same step

A rank that finds no generation for its history uses a random one. It then finds no pages, and so the engine finds none.
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
"""Seconds that a rank waits for the writer's generation. Both get there in the same step, usually within milliseconds."""


class Generation:
    """Key generation of one rank's pages. It outlives a detached storage; SGLang runs each rank in a separate process.

    The scheduler's thread changes it, and SGLang's storage threads read it.
    """

    def __init__(self) -> None:
        self._config: HiCacheStorageConfig | None = None
        self._history = b""
        """Digest of all changes in order; empty before the first change."""
        self._resolved_history = b""
        self._suffix: bytes | None = b""

    @property
    def suffix(self) -> bytes | None:
        """Suffix of each page hash in keys; None while suspended, when pages have no keys."""
        return self._suffix

    @property
    def is_suspended(self) -> bool:
        """Whether the generation is suspended, so that pages have no keys."""
        return self._suffix is None

    def attach(self, config: HiCacheStorageConfig) -> None:
        """Sets the configuration of the storage that uses this generation."""
        self._config = config
        if not self.is_suspended and self._resolved_history != self._history:
            self.resume()

    def suspend(self) -> None:
        """Ends the generation before the weights change."""
        self._suffix = None

    def note(self, change: str) -> None:
        """Adds a change and its outcome to the history."""
        self._history = hashlib.sha256(self._history + change.encode()).digest()

    def resume(self) -> None:
        """Begins the generation of the current history, once SGLang's cache has KV of the current weights only."""
        if self._config is None:
            # No page is saved before a storage is attached, and attaching calls this method again.
            self._suffix = b""
            return
        self._suffix = _following(self._config, self._history)
        self._resolved_history = self._history

    def clear(self) -> None:
        """Begins a new generation with the same weights."""
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
    """Creates a generation and publishes it to the other ranks."""
    generation = uuid.uuid4().bytes
    store = _store()
    if store is not None:
        store.set(name, generation.hex())
    return generation


def _follow(name: str) -> bytes:
    """Returns the writer's generation, or a random one if the writer does not publish one in time."""
    store = _store()
    try:
        if store is None:
            raise RuntimeError("torch.distributed is not initialized in this process")
        store.wait([name], timedelta(seconds=FOLLOW_WITHIN_S))
        return bytes.fromhex(store.get(name).decode())
    except RuntimeError as error:
        logger.warning(
            "this rank no longer finds pages: the writing rank has not published a generation for this rank's history of updates "
            "and clears; restart the engine (%s)",
            error,
        )
        return uuid.uuid4().bytes


def _store() -> torch.distributed.Store | None:
    """Returns the store of ``torch.distributed`` that SGLang's ranks share; None if it is not initialized."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return distributed_c10d._get_default_store()
