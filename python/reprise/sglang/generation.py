"""Which generation an engine's pages are of after SGLang has cleared its storage.

Clearing erases nothing: hashes get a new generation behind them, which nobody has saved anything of. Pages of a latent are the
same on every rank; one rank writes them and the others read them, so all must mean the same generation. The writer makes it and
the others follow, over the store with which SGLang's ranks have found each other::

    rank 0   clear ── new generation ──▶ store: reprise/clear/GROUP/NUMBER
    rank n   clear ──────────────────────▶ waits for it, a moment: SGLang clears on all ranks in the same step

A rank that cannot follow gets a generation of its own: it finds nothing, and therefore the engine nothing, which is safe.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from datetime import timedelta

import torch.distributed
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from torch.distributed import distributed_c10d

logger = logging.getLogger("reprise")

FOLLOW_WITHIN_S = 5.0
"""How long a rank waits for the writer's generation. Its clear belongs to the same step, so milliseconds are the rule."""

_clears: Counter[tuple[str, int]] = Counter()
"""Clears of each group's ranks in this process, which outlive a storage: one that is attached anew goes on counting."""


def following_clear(config: HiCacheStorageConfig) -> bytes:
    """The generation after one more clear of this rank's storage."""
    if not config.is_mla_model or config.tp_size == 1:
        return uuid.uuid4().bytes
    group = f"{config.model_name}:dp{config.dp_rank}:pp{config.pp_rank}:cp{config.attn_cp_rank}"
    _clears[group, config.tp_rank] += 1
    name = f"reprise/clear/{group}/{_clears[group, config.tp_rank]}"
    if config.is_storage_writer:
        return _told(name)
    return _heard(name)


def _told(name: str) -> bytes:
    """A new generation, which the others are told."""
    generation = uuid.uuid4().bytes
    store = _store()
    if store is not None:
        store.set(name, generation.hex())
    return generation


def _heard(name: str) -> bytes:
    """The generation that the writer has told, or one that nobody else has."""
    store = _store()
    try:
        if store is None:
            raise RuntimeError("torch.distributed is not initialized in this process")
        store.wait([name], timedelta(seconds=FOLLOW_WITHIN_S))
        return bytes.fromhex(store.get(name).decode())
    except RuntimeError as error:
        logger.warning(
            "this rank finds no pages any more, because it was not told what the writer's clear has begun: %s", error
        )
        return uuid.uuid4().bytes


def _store() -> torch.distributed.Store | None:
    """Where SGLang's ranks have found each other; None: they have not."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return distributed_c10d._get_default_store()
