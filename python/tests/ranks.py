"""Namespaces and keys of the ranks of a tensor-parallel engine, as vLLM's connector derives them."""

from __future__ import annotations

import conftest

from reprise import Namespace


def namespace_of(rank: int, ranks: int) -> Namespace:
    """Returns the namespace of a rank."""
    return conftest.namespace_of(conftest.layout_of(rank, ranks))


def part_keys(rank: int, ranks: int, numbers: range) -> bytes:
    """Returns the packed keys of a rank's parts of numbered blocks."""
    return conftest.keys_of(namespace_of(rank, ranks), numbers)


def keys_of_all(ranks: int, numbers: range) -> bytes:
    """Returns the packed keys of all ranks, rank after rank."""
    return b"".join(part_keys(rank, ranks, numbers) for rank in range(ranks))
