"""What the tests with real engines share: a cluster, weights, and engines, which take long to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from engine import Engine, connector
from engine_model import model


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all of them."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def cluster(home: Path) -> Iterator[Cluster]:
    """Two nodes, and a member that publishes what they hold."""
    cluster = Cluster(home / "cluster", agents=2, publish=True)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def weights(home: Path) -> Path:
    """A model."""
    return model(home / "model")


@pytest.fixture(scope="session")
def plain(home: Path, weights: Path) -> Iterator[Engine]:
    """An engine that knows nothing of Reprise, and forgets what it has seen."""
    engine = Engine(weights, home / "plain.log", enable_prefix_caching=False)
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def engine(home: Path, weights: Path, cluster: Cluster) -> Iterator[Engine]:
    """An engine on the first node."""
    # Few blocks, so that many requests preempt each other; small steps, so that prompts are computed in chunks.
    small = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 128, "max_model_len": 1024}
    engine = Engine(weights, home / "engine.log", connector(cluster.agents[0].socket), **small)
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def engine_events(home: Path) -> str:
    """Where the engine on the second node publishes its KV events."""
    return f"ipc://{home / 'events'}"


@pytest.fixture(scope="session")
def other(home: Path, weights: Path, cluster: Cluster, engine_events: str) -> Iterator[Engine]:
    """An engine on the second node."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": engine_events}
    transfer = connector(cluster.agents[1].socket)
    engine = Engine(weights, home / "other.log", transfer, kv_events_config=events)
    yield engine
    engine.stop()
