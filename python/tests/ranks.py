"""Namespaces and keys of the ranks of a tensor-parallel engine, as vLLM's connector derives them."""

from __future__ import annotations

from conftest import HEAD_DIM, HEADS, LAYERS, TOKENS

from reprise import Layout, Namespace, block_keys


def namespace_of(rank: int, ranks: int) -> Namespace:
    """Returns the namespace of a rank."""
    layout = Layout(
        layers=LAYERS,
        parts=2,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype="fp32",
        tokens_per_block=TOKENS,
        tp_rank=rank,
        tp_size=ranks,
    )
    return Namespace(
        model="test/model",
        revision="1",
        layout=layout,
        hash_algorithm="sha256_cbor",
        hash_seed="seed",
        engine_format="test:LBHNC",
    )


def part_keys(rank: int, ranks: int, numbers: range) -> bytes:
    """Returns the packed keys of a rank's parts of numbered blocks."""
    return block_keys(namespace_of(rank, ranks), [number.to_bytes(32, "little") for number in numbers])


def keys_of_all(ranks: int, numbers: range) -> bytes:
    """Returns the packed keys of all ranks, rank after rank."""
    return b"".join(part_keys(rank, ranks, numbers) for rank in range(ranks))
