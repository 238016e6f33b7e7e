"""Fixtures: a cluster of real processes, a small layout, NumPy memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster import MIB, Cluster, binaries

from reprise import KvMemory, Layout, Namespace, block_keys

LAYERS, HEADS, TOKENS, HEAD_DIM = 4, 2, 16, 64
"""Dimensions of the layout: objects of 8 KiB, 2 per layer, blocks of 64 KiB."""


@pytest.fixture(scope="session")
def built() -> None:
    """Fails if the binaries are missing."""
    if not (binaries() / "reprise-agent").exists():
        pytest.fail(f"{binaries()} has no reprise-agent: run `make test-python`, which builds it")


@pytest.fixture
def cluster(built: None, tmp_path: Path) -> Iterator[Cluster]:
    """Control plane member and an agent with 16 MiB of DRAM and 128 MiB of disk."""
    cluster = Cluster(tmp_path / "cluster", arena=16 * MIB, pool=128 * MIB)
    yield cluster
    cluster.stop()


def layout_of(rank: int = 0, ranks: int = 1) -> Layout:
    """Returns the small layout of a rank."""
    return Layout(
        layers=LAYERS,
        parts=2,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype="fp32",
        tokens_per_block=TOKENS,
        tp_rank=rank,
        tp_size=ranks,
    )


def namespace_of(layout: Layout) -> Namespace:
    """Returns the namespace of a layout."""
    return Namespace(
        model="test/model",
        revision="1",
        layout=layout,
        hash_algorithm="sha256_cbor",
        hash_seed="seed",
        engine_format="test:LBHNC",
    )


@pytest.fixture
def layout() -> Layout:
    """Small layout."""
    return layout_of()


@pytest.fixture
def namespace(layout: Layout) -> Namespace:
    """Namespace of that layout."""
    return namespace_of(layout)


def tensors(blocks: int, seed: int | None = None) -> list[np.ndarray]:
    """Returns arrays ``[blocks, 2, heads, tokens, head_dim]``, one per layer: zeros, or noise of a seed."""
    shape = (blocks, 2, HEADS, TOKENS, HEAD_DIM)
    if seed is None:
        return [np.zeros(shape, np.float32) for _ in range(LAYERS)]
    noise = np.random.default_rng(seed)
    return [noise.random(shape, np.float32) for _ in range(LAYERS)]


def memory_of(layers: list[np.ndarray], layout: Layout) -> KvMemory:
    """Returns the memory of a list of layers."""
    return KvMemory(layers, layout)


def keys_of(namespace: Namespace, numbers: range) -> bytes:
    """Returns packed keys of numbered blocks."""
    return block_keys(namespace, [number.to_bytes(32, "little") for number in numbers])
