"""Rank of an engine whose ranks share pages, for :mod:`test_ranks`: ``rank_process.py RANK RANKS PORT FOLDER``.

Prints a JSON list of the suffixes of its key generation after each step; null: suspended.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engine import Model, extra_config, model_folder, publish
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from reprise.sglang import RepriseStorage

UNUSED = SimpleNamespace(size_full=8, available_size=lambda: 8)
EMPTY = SimpleNamespace(
    is_fully_idle=lambda ignore_waiting: True,
    decode_offload_manager=None,
    tree_cache=SimpleNamespace(total_size=lambda: (0, 0)),
    token_to_kv_pool_allocator=UNUSED,
    record_weight_version_change=lambda new_version: None,
)
"""Scheduler with a flushed cache."""


def main() -> None:
    """Runs the steps; all ranks start each step together."""
    rank, ranks, port, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    store = torch.distributed.TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=60))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = torch.distributed.group.WORLD
    arguments = publish(folder / "first")
    parallel = SimpleNamespace(cpu_group=group, device_group=group, world_size=1)
    runtime_context.get_parallel().override_permanently(tp_group=parallel)
    storage = RepriseStorage(_config(rank, ranks))
    manager = _manager(arguments)

    def update(name: str) -> None:
        path = str(folder / name)
        manager.update_weights_from_disk(io_struct.UpdateWeightFromDiskReqInput(model_path=path, load_format="auto"))

    def fail_update_on_one_rank() -> None:
        if rank != 1:
            update("second")
            return
        try:
            update("damaged")
        except ValueError:
            return
        raise AssertionError("the damaged weights were loaded")

    steps: list[Any] = [
        lambda: None,
        lambda: update("second"),
        storage.clear,
        lambda: update("third"),
        fail_update_on_one_rank,
        lambda: update("third"),
    ]
    suffixes = []
    for step in steps:
        torch.distributed.barrier()
        step()
        suffix = storage._generation.suffix
        suffixes.append(None if suffix is None else suffix.hex())
    # The first rank hosts the store.
    torch.distributed.barrier()
    print(json.dumps(suffixes))


def _config(rank: int, ranks: int) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=True,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="test/model",
        extra_config=extra_config(Path("/nonexistent/agent.sock")),
    )


def _manager(arguments: Any) -> SchedulerWeightUpdaterManager:
    model = Model(1.0)
    runner = SimpleNamespace(model=model)
    runner.weight_updater = WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=ModelConfig.from_server_args(arguments),
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *_, **__: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: runner,
    )
    return SchedulerWeightUpdaterManager(
        tp_worker=SimpleNamespace(model_runner=runner, weight_update_runners=lambda: [("target", runner)]),
        draft_worker=None,
        memory_saver_adapter=TorchMemorySaverAdapter.create(enable=False),
        flush_cache=lambda empty_cache: True,
        is_fully_idle=lambda **_: True,
        scheduler=EMPTY,
    )


def make_folders(folder: Path) -> None:
    """Writes the models that the steps load."""
    for number, name in enumerate(("first", "second", "third"), start=1):
        model_folder(folder / name, float(number))
    model_folder(folder / "damaged", float("nan"))


if __name__ == "__main__":
    main()
