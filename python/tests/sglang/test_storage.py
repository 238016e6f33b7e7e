"""Tests SGLang's storage interface with a real agent: bytes are preserved, and a failing agent only costs time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster import SALTED_TENANT, Cluster
from engine import another_process, extra_config
from faults import damage, drop_dram, eventually, freeze, observer, thaw
from pool import PAGES, HostPool
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from reprise.sglang import RepriseStorage, generation
from reprise.sglang.options import StorageOptions

LONG_S = 60.0
"""Timeout that only a hang exceeds."""

NOWHERE = Path("/nonexistent/agent.sock")
BUSY_MACHINE_S = 0.5
"""Allowed delay of a call by other processes of a test machine."""

Make = Callable[..., RepriseStorage]


def storage_config(
    socket: Path = NOWHERE, changes: dict[str, Any] | None = None, **engine: Any
) -> HiCacheStorageConfig:
    """Returns SGLang's configuration of the storage."""
    extra = extra_config(socket, {"model_digest": "weights-1", **(changes or {})})
    flat = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "test/model",
        **engine,
    }
    return HiCacheStorageConfig(**flat, extra_config=extra)


def make_storage(config: HiCacheStorageConfig, pool: HostPool) -> RepriseStorage:
    """Creates a storage as SGLang does."""
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    assert isinstance(made, RepriseStorage)
    made.register_mem_pool_host(pool)
    return made


@pytest.fixture
def make(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Factory of connected storages, each as if in its own process."""
    made: list[RepriseStorage] = []

    def storage(pool: HostPool, changes: dict[str, Any] | None = None, **engine: Any) -> RepriseStorage:
        another_process(monkeypatch)
        made.append(make_storage(storage_config(cluster.agents[0].socket, changes, **engine), pool))
        wait_connected(made[-1])
        return made[-1]

    yield storage
    for each in made:
        each.close()


def wait_connected(storage: RepriseStorage) -> None:
    """Waits until each pool has a session."""
    for store in storage._stores.values():
        assert store.session.wait_connected(LONG_S)


def hashes(seed: int, pages: int) -> list[str]:
    """Returns page hashes of a prompt, in SGLang's format."""
    return [f"{seed:032x}{page:032x}" for page in range(pages)]


def same(pool: HostPool, pages: list[int], other: HostPool, others: list[int]) -> bool:
    """Returns whether pages of two pools have the same bytes."""
    return all(
        torch.equal(pool.get_data_page(page * pool.page_size), other.get_data_page(theirs * other.page_size))
        for page, theirs in zip(pages, others, strict=True)
    )


@pytest.mark.parametrize(
    ("layout", "is_latent"),
    [
        ("layer_first", False),
        ("page_first", False),
        ("page_first_direct", False),
        ("page_head", False),
        ("layer_first", True),
        ("page_first", True),
        ("page_first_direct", True),
    ],
)
def test_pages_are_preserved_by_every_combination_of_calls(layout: str, is_latent: bool, make: Make) -> None:
    written, read = HostPool(layout, is_latent), HostPool(layout, is_latent)
    written.fill(1)
    keys, pages, places = hashes(1, 20), list(range(20)), list(range(PAGES - 1, PAGES - 21, -1))
    writer = make(written, is_mla_model=is_latent)
    assert writer._store(PoolName.KV).is_direct
    assert writer.batch_set_v1(keys[:10], written.indices(pages[:10])) == [True] * 10
    assert writer.batch_set(keys[10:], [written.get_data_page(page * written.page_size) for page in pages[10:]])
    reader = make(read, is_mla_model=is_latent)
    assert reader.batch_exists([*keys, *hashes(2, 2)]) == 20
    assert reader.batch_get_v1(keys, read.indices(places)) == [True] * 20
    assert same(written, pages, read, places)
    flat = reader.batch_get(keys, [read.get_dummy_flat_data_page() for _ in keys])
    for page, value in zip(pages, flat, strict=True):
        assert value is not None
        assert torch.equal(value, written.get_data_page(page * written.page_size))


def test_missing_pages_are_reported_and_their_memory_is_unchanged(make: Make) -> None:
    pool = HostPool()
    pool.fill(1)
    before = pool.kv_buffer.clone()
    storage = make(pool)
    keys = hashes(1, 4)
    assert storage.set(keys[0], pool.get_data_page(0))
    assert (storage.exists(keys[0]), storage.exists(keys[1])) == (True, False)
    assert storage.batch_exists(keys) == 1
    assert storage.get(keys[1], pool.get_dummy_flat_data_page()) is None
    found = storage.get(keys[0])
    assert found is not None
    assert torch.equal(found, pool.get_data_page(0))
    assert storage.batch_get_v1(keys, pool.indices([0, 1, 2, 3])) == [True, False, False, False]
    assert torch.equal(pool.kv_buffer, before)


def test_existing_pages_count_as_saved(make: Make) -> None:
    pool = HostPool()
    storage = make(pool)
    assert all(storage.batch_set_v1(hashes(1, 3), pool.indices([0, 1, 2])))
    assert all(storage.batch_set_v1(hashes(1, 3), pool.indices([0, 1, 2])))


def test_an_instance_loads_only_from_the_sources_of_its_options(make: Make, cluster: Cluster) -> None:
    pool, keys = HostPool(), hashes(1, 3)
    storage = make(pool)
    assert all(storage.batch_set_v1(keys, pool.indices([0, 1, 2])))
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
    for load_tiers, found in (("STORAGE:LOCAL", 3), ("remote, cpu", 0), ("none", 0)):
        reader = make(pool, {"load_tiers": load_tiers})
        assert reader.batch_exists(keys) == found
        assert [reader.exists(key) for key in keys] == [found > 0] * 3


def test_an_instance_that_stores_nothing_still_loads(make: Make) -> None:
    pool, keys = HostPool(), hashes(1, 3)
    reader = make(pool, {"no_store": True})
    assert reader.batch_set_v1(keys, pool.indices([0, 1, 2])) == [False] * 3
    assert not reader.batch_set(keys, [pool.get_data_page(page * pool.page_size) for page in range(3)])
    assert reader.batch_exists(keys) == 0
    assert all(make(pool, {"priority": "high"}).batch_set_v1(keys, pool.indices([0, 1, 2])))
    assert reader.batch_exists(keys) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"priority": "urgent"}, "expected low, normal, high"),
        ({"load_tiers": "TAPE"}, "load_tiers: invalid tier 'TAPE'"),
    ],
)
def test_invalid_limits_of_an_instance_are_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StorageOptions.read(changes)


def test_memory_without_contiguous_pages_is_copied_through_staging(make: Make) -> None:
    pool, other = HostPool("page_unified"), HostPool("page_unified")
    pool.fill(1)
    storage = make(pool, {"interface_v1": 0})
    assert not storage._store(PoolName.KV).is_direct
    assert all(storage.batch_set_v1(hashes(1, 3), pool.indices([0, 1, 2])))
    assert all(make(other, {"interface_v1": 0}).batch_get_v1(hashes(1, 3), other.indices([5, 6, 7])))
    assert same(pool, [0, 1, 2], other, [5, 6, 7])


def test_concurrent_threads_get_their_own_results(make: Make) -> None:
    pool = HostPool()
    pool.fill(1)
    storage = make(pool)
    wrong: list[str] = []

    def move(first: int) -> None:
        for turn in range(20):
            keys = hashes(100 * first + turn, 2)
            if not all(storage.batch_set_v1(keys, pool.indices([first, first + 1]))):
                wrong.append(f"{keys} not saved")
            if not all(storage.batch_get_v1(keys, pool.indices([first, first + 1]))):
                wrong.append(f"{keys} not loaded")

    threads = [threading.Thread(target=move, args=(first,)) for first in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_another_kind_of_state_is_stored_in_a_separate_pool(make: Make) -> None:
    kv, state = HostPool(), HostPool("layer_first", dtype=torch.float32)
    kv.fill(1)
    state.fill(2)
    storage = make(kv)
    storage.register_mem_host_pool_v2(kv, PoolName.KV)
    storage.register_mem_host_pool_v2(state, PoolName.MAMBA)
    wait_connected(storage)
    keys = hashes(1, 6)

    def transfers(kv_pages: list[int], state_pages: list[int], state_keys: list[str]) -> list[PoolTransfer]:
        return [
            PoolTransfer(PoolName.KV, host_indices=kv.indices(kv_pages), keys=keys),
            PoolTransfer(PoolName.MAMBA, host_indices=state.indices(state_pages), keys=state_keys),
        ]

    # The state is saved after page 1 and after pages 3 and 4.
    saved = storage.batch_set_v2(transfers(list(range(6)), [1, 3, 4], [keys[1], keys[3], keys[4]]))
    assert saved == {PoolName.KV: [True] * 6, PoolName.MAMBA: [True] * 3}
    trailing = PoolTransfer(PoolName.MAMBA, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = storage.batch_exists_v2(keys, [trailing])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [2, 4, 5])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 5}
    two = PoolTransfer(PoolName.MAMBA, keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert storage.batch_exists_v2(keys, [two]).restorable_prefix_pages == [5]
    everywhere = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert storage.batch_exists_v2(keys, [everywhere]).kv_hit_pages == 0
    assert storage.batch_exists_v2(keys).kv_hit_pages == 6
    loaded = storage.batch_get_v2(transfers([20, 21, 22, 23, 24, 25], [30, 31, 32], [keys[1], keys[3], keys[5]]))
    assert loaded == {PoolName.KV: [True] * 6, PoolName.MAMBA: [True, True, False]}
    assert same(kv, list(range(6)), kv, [20, 21, 22, 23, 24, 25])
    assert same(state, [1, 3], state, [30, 31])


def test_a_query_of_more_pages_than_a_session_allows_is_split(make: Make) -> None:
    pool = HostPool()
    pool.fill(1)
    storage = make(pool)
    keys = hashes(1, 1_500)
    ends = [keys[0], keys[-1]]
    assert storage.batch_set_v1(ends, pool.indices([0, 1])) == [True, True]
    there = storage._store(PoolName.KV).each(storage._hashes(keys))
    assert [page for page, is_there in enumerate(there) if is_there] == [0, 1_499]


def test_nothing_that_changes_kv_is_shared(make: Make) -> None:
    pool = HostPool()
    assert all(make(pool).batch_set_v1(hashes(1, 2), pool.indices([0, 1])))
    same_engine = make(pool)
    others = {
        "other weights": make(pool, {"model_digest": "weights-2"}),
        "another model": make(pool, model_name="n"),
        "another tenant": make(pool, {"tenant": SALTED_TENANT}),
        "another layout": make(HostPool("layer_first")),
        "another dtype": make(HostPool(dtype=torch.float16)),
        "another rank": make(pool, tp_rank=1, tp_size=2),
        "another stage": make(pool, pp_rank=1, pp_size=2),
    }
    assert same_engine.batch_exists(hashes(1, 2)) == 2
    assert {name: other.batch_exists(hashes(1, 2)) for name, other in others.items()} == dict.fromkeys(others, 0)


def test_after_a_clear_the_engine_does_not_find_earlier_pages(make: Make) -> None:
    pool = HostPool()
    storage = make(pool)
    assert all(storage.batch_set_v1(hashes(1, 2), pool.indices([0, 1])))
    assert storage.clear()
    assert storage.batch_exists(hashes(1, 2)) == 0
    assert make(pool).batch_exists(hashes(1, 2)) == 2


LATENT = {"is_mla_model": True, "tp_size": 2}


def test_ranks_that_share_pages_still_share_them_after_clears(make: Make, process_group: None) -> None:
    written, read = HostPool(is_latent=True), HostPool(is_latent=True)
    written.fill(1)
    writer, reader = make(written, tp_rank=0, **LATENT), make(read, tp_rank=1, **LATENT)
    for turn in range(2):
        assert all(writer.batch_set_v1(hashes(turn, 2), written.indices([0, 1])))
        assert reader.batch_exists(hashes(turn, 2)) == 2
        # In any order.
        clears = threading.Thread(target=reader.clear)
        clears.start()
        assert writer.clear()
        clears.join()
        assert (writer.batch_exists(hashes(turn, 2)), reader.batch_exists(hashes(turn, 2))) == (0, 0)
        assert all(writer.batch_set_v1(hashes(turn, 2), written.indices([2, 3])))
        assert all(reader.batch_get_v1(hashes(turn, 2), read.indices([5, 6])))
        assert same(written, [2, 3], read, [5, 6])
    assert make(read, tp_rank=1, **LATENT).batch_exists(hashes(0, 2)) == 2, "another engine"


class MHATokenToKVPoolHost(HostPool):
    """Pool with SGLang's class name for heads that differ between ranks."""


@pytest.mark.parametrize("name", [PoolName.DRAFT, PoolName.DRAFT_SWA])
def test_a_draft_with_heads_next_to_a_latent_is_rejected_with_more_than_one_rank(make: Make, name: PoolName) -> None:
    latent, heads = HostPool(is_latent=True), MHATokenToKVPoolHost("layer_first")
    with pytest.raises(ValueError, match=r"saves only those of rank 0 .* use a draft with a latent"):
        make(latent, tp_rank=1, **LATENT).register_mem_host_pool_v2(heads, name)
    alone = make(latent, is_mla_model=True, tp_size=1, model_name=f"alone {name}")
    shared = [make(latent, tp_rank=rank, model_name=f"{name}", **LATENT) for rank in range(2)]
    for storage, pool in [(alone, heads), *((storage, HostPool("layer_first")) for storage in shared)]:
        storage.register_mem_host_pool_v2(pool, name)
        wait_connected(storage)
    transfer = PoolTransfer(
        name, host_indices=heads.indices([0, 1]), keys=hashes(1, 2), hit_policy=PoolHitPolicy.ALL_PAGES
    )
    for writer, reader in [(alone, alone), shared]:
        assert all(writer.batch_set_v1(hashes(1, 2), latent.indices([0, 1])))
        assert writer.batch_set_v2([transfer]) == {name: [True, True]}
        assert reader.batch_exists_v2(hashes(1, 2), [transfer]).kv_hit_pages == 2
        assert reader.batch_get_v2([transfer]) == {name: [True, True]}


def test_a_write_in_progress_during_a_clear_is_completed(cluster: Cluster, make: Make, process_group: None) -> None:
    pool = HostPool(is_latent=True)
    writer, reader = make(pool, tp_rank=0, **LATENT), make(pool, tp_rank=1, **LATENT)
    saved: list[bool] = []
    freeze(cluster.agents[0])
    writes = threading.Thread(target=lambda: saved.extend(writer.batch_set_v1(hashes(1, 3), pool.indices([0, 1, 2]))))
    writes.start()
    eventually(lambda: bool(writer._store(PoolName.KV)._awaited))
    assert writer.clear()
    assert reader.clear()
    thaw(cluster.agents[0])
    writes.join()
    assert saved == [True] * 3
    assert make(pool, tp_rank=1, **LATENT).batch_exists(hashes(1, 3)) == 3
    assert (writer.batch_exists(hashes(1, 3)), reader.batch_exists(hashes(1, 3))) == (0, 0)


def test_a_rank_without_notice_of_the_writer_s_clear_finds_nothing(
    make: Make, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "FOLLOW_WITHIN_S", 0.05)
    pool = HostPool(is_latent=True)
    # A model whose clears are not counted by other tests.
    writer, reader = (make(pool, tp_rank=rank, model_name="silent", **LATENT) for rank in range(2))
    assert all(writer.batch_set_v1(hashes(1, 2), pool.indices([0, 1])))
    assert reader.clear()
    assert (writer.batch_exists(hashes(1, 2)), reader.batch_exists(hashes(1, 2))) == (2, 0)


def test_calls_do_not_wait_without_an_agent() -> None:
    pool = HostPool()
    storage = make_storage(storage_config(), pool)
    started = time.monotonic()
    assert storage.batch_exists(hashes(1, 3)) == 0
    assert storage.batch_set_v1(hashes(1, 3), pool.indices([0, 1, 2])) == [False] * 3
    assert storage.batch_get_v1(hashes(1, 3), pool.indices([0, 1, 2])) == [False] * 3
    assert not storage.set("k", pool.get_data_page(0))
    assert time.monotonic() - started < BUSY_MACHINE_S
    storage.close()


def test_a_hanging_agent_costs_its_timeouts_and_is_used_again(cluster: Cluster, make: Make) -> None:
    pool = HostPool()
    pool.fill(1)
    storage = make(pool, {"match_deadline_ms": 100, "load_stall_ms": 200, "save_stall_ms": 200})
    freeze(cluster.agents[0])
    started = time.monotonic()
    assert storage.batch_exists(hashes(1, 3)) == 0
    assert storage.batch_get_v1(hashes(1, 3), pool.indices([0, 1, 2])) == [False] * 3
    assert storage.batch_set_v1(hashes(1, 3), pool.indices([0, 1, 2])) == [False] * 3
    assert time.monotonic() - started < 0.1 + 2 * 0.2 + BUSY_MACHINE_S
    thaw(cluster.agents[0])
    wait_connected(storage)
    eventually(lambda: all(storage.batch_set_v1(hashes(1, 3), pool.indices([0, 1, 2]))), LONG_S)
    eventually(lambda: all(storage.batch_get_v1(hashes(1, 3), pool.indices([3, 4, 5]))), LONG_S)
    assert same(pool, [0, 1, 2], pool, [3, 4, 5])


def test_a_restarted_agent_has_the_durable_pages(cluster: Cluster, make: Make) -> None:
    pool = HostPool()
    pool.fill(1)
    storage = make(pool)
    assert all(storage.batch_set_v1(hashes(1, 3), pool.indices([0, 1, 2])))
    with observer(cluster.agents[0]) as agent:
        eventually(lambda: agent.stats()["nvme_blocks"] >= 3, LONG_S)
    cluster.agents[0].kill()
    assert storage.batch_get_v1(hashes(1, 3), pool.indices([3, 4, 5])) == [False] * 3
    cluster.agents[0].restart()
    wait_connected(storage)
    assert storage.batch_get_v1(hashes(1, 3), pool.indices([3, 4, 5])) == [True] * 3
    assert same(pool, [0, 1, 2], pool, [3, 4, 5])


def test_a_page_damaged_on_nvme_is_missing(cluster: Cluster, make: Make) -> None:
    pool = HostPool()
    pool.fill(1)
    storage = make(pool)
    assert all(storage.batch_set_v1(hashes(1, 3), pool.indices([0, 1, 2])))
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
        damage(cluster.agents[0].pool)
        ok = storage.batch_get_v1(hashes(1, 3), pool.indices([3, 4, 5]))
    assert not all(ok)
    assert all(same(pool, [page], pool, [page + 3]) for page in range(3) if ok[page])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sokcet": "/x"}, "did you mean 'socket'"),
        ({"socket": "agent.sock"}, "expected an absolute path"),
        ({"socket": "/tmp"}, "is not a socket"),
        ({"load_stall_ms": -1}, "above 0"),
    ],
)
def test_an_invalid_configuration_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_storage(storage_config(changes=changes), HostPool())


def test_an_unsupported_engine_is_rejected() -> None:
    with pytest.raises(ValueError, match="--hicache-mem-layout page_unified"):
        make_storage(storage_config(), HostPool("page_unified"))
    with pytest.raises(ValueError, match="tp_lcm_size"):
        make_storage(storage_config(should_split_heads=True), HostPool())


def test_results_of_transfers_are_kept_only_for_waiting_callers(make: Make) -> None:
    store = make(HostPool())._store(PoolName.KV)
    ended = [SimpleNamespace(id=1), SimpleNamespace(id=2), SimpleNamespace(id=3)]

    class Interrupted:
        def wait(self, ids: list[int], timeout: float) -> bool:
            raise KeyboardInterrupt

        def finished(self) -> list[Any]:
            return []

    class Ended(Interrupted):
        def wait(self, ids: list[int], timeout: float) -> bool:
            return True

        def finished(self) -> list[Any]:
            return ended

    interrupted: Any = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        store._wait(interrupted, lambda: 1)
    waiting: Any = Ended()
    assert store._wait(waiting, lambda: 2) is ended[1]
    assert store._awaited == {}
