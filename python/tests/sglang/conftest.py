"""Fixtures of the tests of SGLang's storage: a published configuration, a process' state, a cluster, an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine as engines
import pytest
import torch
from cluster import MIB, Cluster
from engine import MakeEngine, another_process, extra_config
from sglang.srt.mem_cache.utils import get_storage_hash_str

from reprise.sglang import weight_updates


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Folder with a model."""
    return engines.model_folder(tmp_path / "model")


@pytest.fixture(autouse=True)
def process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Initial state of a scheduler's process, with its configuration."""
    engines.publish(model)
    weight_updates.observe()
    another_process(monkeypatch)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Control plane member and an agent with two regions of DRAM, for two block sizes, and 128 MiB of disk."""
    cluster = Cluster(tmp_path / "cluster", arena=128 * MIB, pool=128 * MIB)
    yield cluster
    cluster.stop()


@pytest.fixture
def process_group() -> Iterator[None]:
    """Process group with a store, as SGLang's ranks have one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def make_engine(
    cluster: Cluster, model: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeEngine]:
    """Factory of engines, each as if in its own process."""
    try:
        get_storage_hash_str([1], None, 1)
    except RuntimeError as error:
        pytest.skip(f"SGLang's page hash cannot be compiled here (g++, OpenSSL's headers): {error}")
    engines.replace_gpu(monkeypatch)
    made: list[engines.Engine] = []

    def make(folder: Path = model, extra: dict[str, Any] | None = None, **settings: Any) -> engines.Engine:
        another_process(monkeypatch)
        # SGLang removes the threshold from the configuration before it creates the storage.
        config = extra_config(cluster.agents[0].socket, {"prefetch_threshold": engines.PAGE, **(extra or {})})
        made.append(engines.Engine(folder, config, torch.distributed.group.WORLD, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
