"""Digests of configurations, equal in every process and on every node with the same configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any


def digest(described: Any, without: Collection[str] = ()) -> str:
    """Returns the SHA-256 of a configuration, in hexadecimal.

    Args:
        described: values, and lists, mappings and dataclasses of values.
        without: names to leave out, at every depth.
    """
    return hashlib.sha256(json.dumps(plain(described, without), sort_keys=True).encode()).hexdigest()


def plain(described: Any, without: Collection[str] = ()) -> Any:
    """Converts a configuration to JSON types, without values that differ between processes."""
    if isinstance(described, dict):
        return {str(name): plain(value, without) for name, value in described.items() if name not in without}
    if is_dataclass(described) and not isinstance(described, type):
        return {each.name: plain(getattr(described, each.name), without) for each in fields(described)}
    if isinstance(described, list | tuple):
        return [plain(value, without) for value in described]
    if isinstance(described, set | frozenset):
        return sorted(str(plain(value, without)) for value in described)
    if described is None or isinstance(described, str | int | float | bool):
        return described
    words = str(described)
    # The default repr of a Python object contains its address, which differs between processes.
    return type(described).__qualname__ if " at 0x" in words else words
