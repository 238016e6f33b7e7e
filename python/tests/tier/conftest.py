"""Fixtures of the tests of the secondary tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import MIB, Cluster
from offloading import Offloading, offloading_config, tier_config


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Control plane member and an agent with 16 MiB of DRAM and 128 MiB of disk."""
    cluster = Cluster(tmp_path / "cluster", arena=16 * MIB, pool=128 * MIB)
    yield cluster
    cluster.stop()


@pytest.fixture(params=["queues", "files"])
def lender(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Like ``cluster``, with an agent that lends queue pairs of an emulated NVMe controller, or files of its pool."""
    cluster = Cluster(tmp_path / "lender", arena=16 * MIB, pool=128 * MIB, lends=request.param)
    yield cluster
    cluster.stop()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., Offloading]]:
    """Factory of engines that use an agent's socket."""
    made: list[Offloading] = []

    def make(socket: Path, **changes: Any) -> Offloading:
        made.append(Offloading(offloading_config([tier_config(socket, **changes)])))
        return made[-1]

    yield make
    for offloading in made:
        offloading.close()
