"""Tests that an engine whose weights are updated never serves KV of the old weights.

The engine consists of SGLang's own classes. Each request checks the KV that attention would read, from any source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import engine as engines
import pytest
import torch
from engine import Engine, MakeEngine, extra_config
from faults import eventually, freeze, thaw
from sglang.srt import runtime_context
from sglang.srt.managers import cache_controller, io_struct
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from test_storage import storage_config

from reprise.sglang import RepriseStorage, weight_updates

PROMPT = list(range(64))
OTHER = list(range(1_000, 1_064))


def updated_from_disk(engine: Engine, folder: Path, **request: Any) -> None:
    assert engine.update_from_disk(engines.model_folder(folder, 2.0), **request).success


def updated_from_tensor(engine: Engine, folder: Path, **request: Any) -> None:
    assert engine.begin().success
    assert engine.update_from_tensor(2.0, **request).success
    assert engine.end().success


def updated_from_distributed(engine: Engine, folder: Path, **request: Any) -> None:
    request = {"names": ["weight"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "trainer", **request}
    updater = type(engine.weights.tp_worker.model_runner.weight_updater)
    # The content of the trainer's broadcast.
    received = [("weight", torch.tensor([2.0]))]
    with mock.patch.object(updater, "receive_weights_from_distributed", lambda *_, **__: received):
        assert engine.begin().success
        updated = engine.weights.update_weights_from_distributed(
            io_struct.UpdateWeightsFromDistributedReqInput(**request)
        )
        assert updated.success
        assert engine.end().success


def updated_by_rdma(engine: Engine, folder: Path, **request: Any) -> None:
    """Simulates a trainer that writes to the weights between begin and end, without a call."""
    assert engine.begin().success
    engine.model.weight.fill_(2.0)
    if request.get("flush_cache", True):
        assert engine.flush()
    assert engine.end().success


UPDATES: dict[str, Callable[..., None]] = {
    "from_disk": updated_from_disk,
    "from_tensor": updated_from_tensor,
    "from_distributed": updated_from_distributed,
    "by_rdma": updated_by_rdma,
}


@pytest.mark.parametrize("way", UPDATES)
def test_after_an_update_with_a_flush_only_new_pages_are_found(
    way: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine()
    assert engine.serve(PROMPT) == 0
    assert engine.serve_again(PROMPT) == len(PROMPT)
    UPDATES[way](engine, tmp_path / "new")
    assert engine.serve(PROMPT) == 0
    assert engine.serve_again(PROMPT) == len(PROMPT)


@pytest.mark.parametrize("way", UPDATES)
def test_after_an_update_without_a_flush_nothing_is_saved_or_found_until_the_cache_is_flushed(
    way: str, make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    engine.serve(PROMPT)
    UPDATES[way](engine, tmp_path / "new", flush_cache=False)
    assert "call /flush_cache" in caplog.text
    assert engine.storage._generation.is_suspended
    # SGLang's own cache still has KV of the old weights, which its backup thread could save.
    assert engine.serve(OTHER) == 0
    assert engine.storage.batch_exists(engine.hashes(OTHER)) == 0
    assert engine.flush()
    assert engine.serve(PROMPT) == 0
    assert engine.serve(OTHER) == 0
    assert engine.serve_again(OTHER) == len(OTHER)


@pytest.mark.parametrize("way", UPDATES)
def test_an_engine_flushed_before_its_update_needs_no_flush_after_it(
    way: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine()
    engine.serve(PROMPT)
    assert engine.flush()
    UPDATES[way](engine, tmp_path / "new", flush_cache=False)
    assert not engine.storage._generation.is_suspended
    assert engine.serve(PROMPT) == 0
    assert engine.serve_again(PROMPT) == len(PROMPT)


def test_nothing_is_saved_or_found_during_an_update_of_weights(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve(PROMPT)
    assert engine.begin().success
    assert engine.update_from_tensor(2.0).success
    # Flushed, but the update has not ended.
    assert engine.storage._generation.is_suspended
    assert engine.serve(PROMPT) == 0
    assert engine.update_from_tensor(3.0).success
    assert engine.end().success
    assert engine.serve(PROMPT) == 0
    assert engine.serve_again(PROMPT) == len(PROMPT)


def test_an_update_without_its_flush_because_of_a_running_request_suspends_the_storage(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine()
    engine.serve(PROMPT)
    with engine.running_request():
        answer = engine.update_from_disk(engines.model_folder(tmp_path / "new", 2.0))
        assert not answer.success, "SGLang has new weights and an old cache"
    assert engine.storage._generation.is_suspended
    assert engine.flush()
    assert engine.serve(PROMPT) == 0
    assert engine.serve_again(PROMPT) == len(PROMPT)


def hold_in_device_memory(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.serve(PROMPT)
    # The tree has pages, although the pools report none.
    patch.setattr(engine.slots, "available_size", lambda: engines.SLOTS)
    host = engine.tree.cache_controller.mem_pool_host
    patch.setattr(host, "available_size", lambda: host.logical_size)


def hold_in_host_memory(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.serve(PROMPT)
    engine.tree.evict(EvictParams(num_tokens=len(PROMPT)))
    assert engine.tree.total_size() == (0, 0)
    assert engine.slots.available_size() == engines.SLOTS


def hold_in_a_session(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    # The row of a session has slots that are not in the tree yet.
    assert engine.slots.alloc(engines.PAGE) is not None


def hold_in_a_running_request(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.scheduler, "chunked_req", object())


HOLDERS = [hold_in_device_memory, hold_in_host_memory, hold_in_a_session, hold_in_a_running_request]


@pytest.mark.parametrize("hold", HOLDERS)
def test_the_storage_stays_suspended_while_anything_holds_kv_of_the_old_weights(
    hold: Callable[[Engine, pytest.MonkeyPatch], None], make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine()
    with pytest.MonkeyPatch.context() as patch:
        hold(engine, patch)
        updated_from_disk(engine, tmp_path / "new", flush_cache=False)
        assert engine.storage._generation.is_suspended
    assert engine.flush()
    assert not engine.storage._generation.is_suspended
    assert engine.serve(PROMPT) == 0


def test_a_failed_update_suspends_the_storage_until_a_flush(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    engine.serve(PROMPT)
    damaged = engines.model_folder(tmp_path / "damaged", float("nan"))
    with pytest.raises(ValueError, match="not a number"):
        # SGLang's rollback reads the same path and fails too.
        engine.update_from_disk(damaged)
    assert engine.storage._generation.is_suspended
    assert engine.flush()
    assert engine.serve(PROMPT) == 0


def test_a_call_that_sglang_rejects_keeps_the_pages(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve(PROMPT)
    assert not engine.update_from_tensor(2.0).success, "no session is open"
    assert not engine.end().success
    assert engine.serve_again(PROMPT) == len(PROMPT)


def test_weights_received_over_ipc_begin_a_generation(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.serve(PROMPT)

    def receive(updater: Any, request: Any) -> tuple[bool, str]:
        engine.model.weight.fill_(2.0)
        return True, "received"

    # The checkpoint engine's side needs CUDA.
    monkeypatch.setattr(type(engine.weights.tp_worker.model_runner.weight_updater), "update_weights_from_ipc", receive)
    request = io_struct.UpdateWeightsFromIPCReqInput(zmq_handles={})
    assert engine.weights.update_weights_from_ipc(request).success
    assert engine.serve(PROMPT) == 0
    assert engine.serve_again(PROMPT) == len(PROMPT)


def test_weights_overwritten_with_noise_begin_a_generation(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve(PROMPT)
    checked = engine.weights.check_weights(io_struct.CheckWeightsReqInput(action="snapshot", selector="target"))
    assert checked.success
    assert not engine.storage._generation.is_suspended, "a snapshot does not change weights"
    reset = engine.weights.check_weights(io_struct.CheckWeightsReqInput(action="reset_tensors", selector="target"))
    assert reset.success
    assert engine.storage._generation.is_suspended
    assert engine.flush()
    assert engine.serve(PROMPT) == 0


RELEASED: dict[str, tuple[dict[str, bool], int]] = {
    "lost": ({"enable_memory_saver": True}, 0),
    "kept_in_host_memory": ({"enable_memory_saver": True, "enable_weights_cpu_backup": True}, len(PROMPT)),
    "never_released": ({}, len(PROMPT)),
}


@pytest.mark.parametrize("kind", RELEASED)
def test_released_and_resumed_weights_begin_a_generation_unless_sglang_kept_them(
    kind: str, make_engine: MakeEngine
) -> None:
    settings, found = RELEASED[kind]
    engine = make_engine()
    with runtime_context.get_exec().features.override(**settings):
        engine.serve(PROMPT)
        engine.weights.release_memory_occupation(io_struct.ReleaseMemoryOccupationReqInput())
        if not found:
            assert engine.storage._generation.is_suspended
            assert engine.flush()
            assert engine.storage._generation.is_suspended, "the weights are not back yet"
        engine.weights.resume_memory_occupation(io_struct.ResumeMemoryOccupationReqInput())
        assert engine.serve(PROMPT) == found
        assert engine.serve_again(PROMPT) == len(PROMPT)


def test_releasing_only_kv_memory_keeps_the_pages(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve(PROMPT)
    with runtime_context.get_exec().features.override(enable_memory_saver=True):
        engine.weights.release_memory_occupation(io_struct.ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
        engine.weights.resume_memory_occupation(io_struct.ResumeMemoryOccupationReqInput(tags=["kv_cache"]))
    assert engine.serve(PROMPT) == len(PROMPT)


def test_a_flush_alone_keeps_the_pages_because_the_weights_are_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve(PROMPT)
    assert engine.serve_again(PROMPT) == len(PROMPT)


def test_a_save_during_an_update_ends_under_the_old_generation(
    cluster: Any, make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine()
    pool, keys = engine.tree.cache_controller.storage_host_pool, engine.hashes(PROMPT)
    indices = torch.arange(len(PROMPT))
    saved: list[bool] = []
    freeze(cluster.agents[0])
    save = threading.Thread(target=lambda: saved.extend(engine.storage.batch_set_v1(keys, indices)))
    save.start()
    eventually(lambda: bool(engine.storage._store(PoolName.KV)._awaited))
    assert pool.size > len(PROMPT)
    assert engine.update_from_disk(engines.model_folder(tmp_path / "new", 2.0)).success
    thaw(cluster.agents[0])
    save.join()
    assert saved == [True] * len(keys)
    assert engine.storage.batch_exists(keys) == 0
    assert make_engine().storage.batch_exists(keys) == len(keys), "an engine with the old weights"


def test_a_batch_that_starts_after_an_update_is_not_saved(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    assert engine.serve(PROMPT) == 0
    # SGLang saves 128 pages at a time; the update happens between two batches.
    assert engine.update_from_disk(engines.model_folder(tmp_path / "new", 2.0), flush_cache=False).success
    keys, indices = engine.hashes(OTHER), torch.arange(len(OTHER))
    assert engine.storage.batch_set_v1(keys, indices) == [False] * len(keys)
    assert engine.storage.batch_get_v1(engine.hashes(PROMPT), indices) == [False] * len(keys)
    assert engine.flush()
    assert engine.storage.batch_exists(keys) == 0


def test_a_clear_during_an_update_does_not_end_it(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    engine.serve(PROMPT)
    updated_from_disk(engine, tmp_path / "new", flush_cache=False)
    assert engine.tree.clear_storage_backend()
    assert engine.storage._generation.is_suspended


def test_a_reattached_storage_has_the_generation_of_the_current_weights(
    make_engine: MakeEngine, cluster: Any, tmp_path: Path
) -> None:
    engine = make_engine()
    engine.serve(PROMPT)
    engine.tree.cache_controller.detach_storage_backend()
    updated_from_disk(engine, tmp_path / "new")
    engine.tree.cache_controller.attach_storage_backend(
        "dynamic", engines.PAGE, "test/model", extra_config(cluster.agents[0].socket)
    )
    engine.tree.enable_storage = True
    engine.wait_connected()
    assert engine.serve(PROMPT) == 0
    assert engine.serve_again(PROMPT) == len(PROMPT)


def test_attaching_a_storage_to_a_running_engine_is_rejected(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines.publish(model, hicache_storage_backend=None)
    monkeypatch.setattr(weight_updates, "_process", None)
    with pytest.raises(ValueError, match=r"not know whether its weights were updated before: start the engine with"):
        RepriseStorage(storage_config())


Manager = weight_updater.SchedulerWeightUpdaterManager


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"update_weights_from_a_dream": lambda self: None},
            "SchedulerWeightUpdaterManager.update_weights_from_a_dream of this version of SGLang is unknown",
        ),
        (
            {"update_weights_from_disk": None},
            "SchedulerWeightUpdaterManager.update_weights_from_disk is missing",
        ),
        (
            {"__dataclass_fields__": {"scheduler": None}},
            "SchedulerWeightUpdaterManager._session, offload_tags is missing",
        ),
    ],
)
def test_a_version_of_sglang_with_undetectable_updates_is_rejected(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {name: value for name, value in {**vars(Manager), **changes}.items() if value is not None}
    other = type("SchedulerWeightUpdaterManager", (), {n: v for n, v in members.items() if n not in Manager.__slots__})
    monkeypatch.setattr(weight_updater, "SchedulerWeightUpdaterManager", other)
    monkeypatch.setattr(weight_updates, "_process", None)
    with pytest.raises(ValueError, match=message):
        RepriseStorage(storage_config())


def test_a_version_of_sglang_without_an_observed_class_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_updates, "_process", None)
    monkeypatch.delattr(cache_controller, "HiCacheController")
    with pytest.raises(ValueError, match=r"sglang.srt.managers.cache_controller.HiCacheController is missing"):
        RepriseStorage(storage_config())


def test_weights_shared_between_engines_are_not_updated(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    with (
        runtime_context.get_model().override(weight_cache_mode="attach"),
        pytest.raises(RuntimeError, match="not supported while the weight cache is"),
    ):
        engine.update_from_disk(engines.model_folder(tmp_path / "new", 2.0))


def test_unsaved_pages_of_a_decode_engine_keep_the_storage_suspended(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    engine.scheduler.decode_offload_manager = SimpleNamespace(ongoing_offload={}, ongoing_backup={1: "of old weights"})
    updated_from_disk(engine, tmp_path / "new")
    assert engine.storage._generation.is_suspended
    assert engine.flush()
    assert engine.storage._generation.is_suspended
    engine.scheduler.decode_offload_manager.ongoing_backup.clear()
    assert engine.flush()
    assert not engine.storage._generation.is_suspended
