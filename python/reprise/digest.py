"""Digests of configurations, the same in every process and on every node that has the same configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any


def digest(described: Any, without: Collection[str] = ()) -> str:
    """The SHA-256 of a configuration.

    Args:
        described: values, lists, mappings and dataclasses of such.
        without: names that do not count, at every depth.
    """
    return hashlib.sha256(json.dumps(plain(described, without), sort_keys=True).encode()).hexdigest()


def plain(described: Any, without: Collection[str] = ()) -> Any:
    """A configuration, and those within it, as JSON has them, without what differs between processes."""
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
    # By default Python's text of an object holds its address.
    return type(described).__qualname__ if " at 0x" in words else words
