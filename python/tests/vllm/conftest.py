"""Fixtures of the tests with real engines; engines are shared because they start slowly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from engine import Engine, connector
from engine_model import model


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all fixtures."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def cluster(home: Path) -> Iterator[Cluster]:
    """Two nodes and a control plane member that publishes their blocks."""
    cluster = Cluster(home / "cluster", agents=2, publish=True)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def weights(home: Path) -> Path:
    """Folder with a model."""
    return model(home / "model")


@pytest.fixture(scope="session")
def plain(home: Path, weights: Path) -> Iterator[Engine]:
    """Engine without Reprise and without prefix caching."""
    engine = Engine(weights, home / "plain.log", enable_prefix_caching=False)
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def engine(home: Path, weights: Path, cluster: Cluster) -> Iterator[Engine]:
    """Engine on the first node."""
    # Few blocks, so that requests preempt each other; small steps, so that prompts are computed in chunks.
    small = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 128, "max_model_len": 1024}
    engine = Engine(weights, home / "engine.log", connector(cluster.agents[0].socket), **small)
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def engine_events(home: Path) -> str:
    """Endpoint of the KV events of the engine on the second node."""
    return f"ipc://{home / 'events'}"


@pytest.fixture(scope="session")
def other(home: Path, weights: Path, cluster: Cluster, engine_events: str) -> Iterator[Engine]:
    """Engine on the second node."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": engine_events}
    transfer = connector(cluster.agents[1].socket)
    engine = Engine(weights, home / "other.log", transfer, kv_events_config=events)
    yield engine
    engine.stop()
