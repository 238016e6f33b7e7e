"""SGLang's storage interface; it delegates each call to the store of its pool.

SGLang's first interface (one pool) and its second (one pool per kind of state) produce the same blocks. With
``interface_v1``, pages are copied directly between SGLang's memory and the agent's arena.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from reprise.recompute import LoadChooser, NoCounters
from reprise.sglang import identity, pools, steps, weight_updates
from reprise.sglang.options import StorageOptions
from reprise.sglang.store import UNKNOWN_PLACE, Place, Store


class RepriseStorage(HiCacheStorage):
    """Saves SGLang's pages to Reprise and loads them from it.

    Raises:
        ValueError: the configuration is not supported; the message has the remedy.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        self._options = StorageOptions.read(extra)
        self._wants_direct = bool(extra.get("interface_v1", 0))
        self._config = storage_config
        if storage_config.dcp_size > 1 or storage_config.should_split_heads:
            raise ValueError(
                "RepriseStorage does not support decode context parallelism or tp_lcm_size: remove these options"
            )
        self._revision = identity.model_revision(self._options.model_digest, self._options.multimodal)
        self._generation = weight_updates.observe().generation
        self._generation.attach(storage_config)
        self._stores: dict[str, Store] = {}
        self._registered: dict[str, Any] = {}

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Registers SGLang's memory.

        Raises:
            ValueError: the memory's pages are not supported; the message has the remedy.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)
        if self._wants_direct and not self._store(PoolName.KV).is_direct:
            raise ValueError(
                f"--hicache-mem-layout {mem_pool_host.layout} is not supported with interface_v1: set one of "
                f"{', '.join(pools.DIRECT_LAYOUTS)}, or set interface_v1 to 0 to copy pages through staging memory"
            )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Registers the memory of another kind of state."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    # The first interface

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Loads pages directly into SGLang's memory; returns for each page whether it was loaded."""
        return self._move(PoolName.KV, keys, lambda store, hashes: store.load(hashes, host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Saves pages directly from SGLang's memory; returns for each page whether Reprise has it."""
        place = self._place(extra_info)
        return self._move(PoolName.KV, keys, lambda store, hashes: store.save(hashes, host_indices, place))

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """Loads a flat page; returns None if it is not available."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: Any | None = None,
    ) -> list[torch.Tensor | None]:
        """Loads flat pages into the target tensors; returns None for pages that are not available."""
        given = target_locations or [None] * len(keys)
        places = [self.mem_pool_host.get_dummy_flat_data_page() if place is None else place for place in given]
        ok = self._move(PoolName.KV, keys, lambda store, hashes: store.load_flat(hashes, places))
        return [place if is_ok else None for place, is_ok in zip(places, ok, strict=True)]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Saves a flat page; returns whether Reprise has it."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor | None] | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Saves flat pages; returns whether Reprise has all of them."""
        tensors = [value for value in values or () if value is not None]
        if values is None or len(tensors) < len(values):
            raise ValueError("batch_set needs a value for each key; use batch_set_v1 to save pages of SGLang's memory")
        return all(self._move(PoolName.KV, keys, lambda store, hashes: store.save_flat(hashes, tensors)))

    def exists(self, key: str) -> bool:
        """Returns whether a page is available."""
        hashes = self._hashes([key])
        return hashes is not None and self._store(PoolName.KV).leading(hashes) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Returns the number of leading pages that are available and cheaper to load than to compute."""
        hashes = self._hashes(keys)
        if hashes is None:
            return 0
        position = self._place(extra_info).position
        return self._store(PoolName.KV).to_load(hashes, _prefix_pages(extra_info), position)

    # The second interface

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Returns the number of leading pages that are available with the states that each pool needs for them."""
        hashes = self._hashes(keys)
        if hashes is None:
            return PoolTransferResult(0, {}, [])
        position = self._place(extra_info).position
        kv_pages = self._store(PoolName.KV).to_load(hashes, _prefix_pages(extra_info), position)
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        usable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if not usable:
                break
            found = self._usable(transfer, hashes[:kv_pages], position)
            if found:
                hits[transfer.name] = max(found)
            usable &= found
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Loads pages of several pools."""
        return self._each_pool(transfers, Store.load)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Saves pages of several pools."""
        place = self._place(extra_info)
        return self._each_pool(transfers, lambda store, hashes, indices: store.save(hashes, indices, place))

    def clear(self) -> bool:
        """Begins a new key generation, so that this engine does not find earlier pages.

        Pages of other engines remain, and running saves finish. SGLang calls this on every rank.
        """
        self._generation.clear()
        return True

    def close(self) -> None:
        """Ends threads and sessions, and releases SGLang's memory."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    def _register(self, name: str, pool: Any) -> None:
        if self._registered.get(name) is pool:
            return
        config = self._config
        if config.is_mla_model and config.tp_size > 1 and _has_heads_of_a_draft(name, pool):
            # SGLang's HybridCacheController.should_backup saves pages of the other ranks only to a storage named mooncake.
            raise ValueError(
                f"pool {name} has the heads of each rank of the draft model next to the model's latent, but SGLang saves only those "
                "of rank 0 to this storage: use a draft with a latent (MTP), tp_size 1, or no --hicache-storage-backend"
            )
        # Pages of a latent are equal on all ranks, and one rank writes them; all other pages are specific to their rank.
        is_shared = config.is_mla_model and name != PoolName.MAMBA
        shape = f"{name}:pp{config.pp_rank}/{config.pp_size}:cp{config.attn_cp_rank}/{config.attn_cp_size}"
        described = {
            "model": config.model_name or "",
            "revision": self._revision,
            "rank": 0 if is_shared else config.tp_rank,
            "ranks": 1 if is_shared else config.tp_size,
            "shape": shape,
        }
        # Pools other than KV have different shapes and few bytes, so staging is sufficient for them.
        direct = pools.runs(pool, config.is_mla_model) if name == PoolName.KV else None
        if name in self._stores:
            self._stores.pop(name).close()
        store = Store(pool, direct, self._options, described)
        if name == PoolName.KV:
            store.chooser = LoadChooser.create(
                self._options, store.layout.tokens_per_block, store.page_bytes, NoCounters()
            )
        if store.chooser is not None:
            steps.measure(store.chooser)
        self._stores[name] = store
        self._registered[name] = pool

    def _store(self, name: str) -> Store:
        store = self._stores.get(name)
        if store is None:
            raise ValueError(f"SGLang has not registered memory for pool {name}")
        return store

    def _hashes(self, keys: Sequence[str]) -> list[bytes] | None:
        """Returns the hashes of pages in keys; None while the generation is suspended."""
        suffix = self._generation.suffix
        return None if suffix is None else [key.encode() + suffix for key in keys]

    def _place(self, extra_info: HiCacheStorageExtraInfo | None) -> Place:
        """Returns the place of the pages of a call, if SGLang passes it (``hicache_storage_pass_prefix_keys``)."""
        before = extra_info.prefix_keys if extra_info is not None else None
        if before is None:
            return UNKNOWN_PLACE
        hashes = self._hashes(before[-1:])
        return Place(hashes[0] if hashes else None, len(before))

    def _move(self, name: str, keys: Sequence[str], move: Callable[[Store, list[bytes]], list[bool]]) -> list[bool]:
        hashes = self._hashes(keys)
        return [False] * len(keys) if hashes is None else move(self._store(name), hashes)

    def _usable(self, transfer: PoolTransfer, hashes: list[bytes], position: int | None) -> builtins.set[int]:
        """Returns the prefix lengths for which a pool has the pages that it needs."""
        store = self._store(transfer.name)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return set(range(1, store.leading(hashes, position) + 1))
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            found = store.each(hashes)
            trailing = max(1, len(transfer.keys or ()))
            return {end for end in range(1, len(found) + 1) if all(found[max(0, end - trailing) : end])}
        raise ValueError(
            f"RepriseStorage does not support the hit policy {transfer.hit_policy} of pool {transfer.name}"
        )

    def _each_pool(
        self,
        transfers: list[PoolTransfer],
        move: Callable[[Store, Sequence[bytes], torch.Tensor], list[bool]],
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys = transfer.keys or []
            pages = int(self._registered[transfer.name].page_size) * len(keys)
            if not keys or transfer.host_indices is None or transfer.host_indices.numel() != pages:
                results[transfer.name] = [False] * len(keys)
                continue
            indices = transfer.host_indices
            results[transfer.name] = self._move(
                transfer.name, keys, lambda store, hashes, indices=indices: move(store, hashes, indices)
            )
        return results


def _prefix_pages(extra_info: HiCacheStorageExtraInfo | None) -> int:
    """Returns the number of pages before those of a call, if SGLang passes them."""
    return len(extra_info.prefix_keys or ()) if extra_info is not None else 0


def _has_heads_of_a_draft(name: str, pool: Any) -> bool:
    # Compared by name, because importing the class needs SGLang's compiled kernels.
    is_draft = name in (PoolName.DRAFT, PoolName.DRAFT_SWA)
    return is_draft and any(base.__name__ == "MHATokenToKVPoolHost" for base in type(pool).__mro__)
