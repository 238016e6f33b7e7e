"""The identity of a LoRA adapter: a digest of its weights and configuration, wherever its files are.

An adapter that is trained again keeps its name and path, and two nodes can have different adapters of one name. An adapter of the
hub is identified by the commit of its snapshot, other adapters by a sample of their files (:mod:`reprise.weights`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from reprise import weights

CONFIGURATION = "adapter_config.json"
"""Holds rank and scale, which change what the same weights compute."""

Stamp = tuple[tuple[str, int, int], ...]
"""Names, sizes and modification times of files: a change of it means that the files were changed."""


@dataclass(frozen=True)
class AdapterFiles:
    """Files of one adapter on this machine."""

    folder: Path
    weights: tuple[Path, ...]
    snapshot: tuple[str, str] | None
    """Repository and commit, of an adapter of the hub."""

    @classmethod
    def find(cls, path: str) -> AdapterFiles | None:
        """Finds an adapter by its folder or its name on the hub; None: this machine has no files of it.

        Only snapshots that are already on disk are found: this never uses the network.
        """
        folder = _folder(path)
        if folder is None:
            return None
        found = cls(folder, tuple(weights.files(folder)), weights.hub_snapshot(str(folder)))
        return found if found.snapshot is not None or found.weights else None

    def stamp(self) -> Stamp:
        """The files as they are now."""
        seen = [(file, file.stat()) for file in self._all() if file.exists()]
        return tuple((file.name, stat.st_size, stat.st_mtime_ns) for file, stat in seen)

    def changed_since(self, seconds: float) -> bool:
        """Whether a file was written after a time (seconds since the epoch). A snapshot of the hub never changes."""
        return self.snapshot is None and any(file.stat().st_ctime > seconds for file in self._all() if file.exists())

    def digest(self) -> bytes:
        """Identifies weights and configuration.

        Raises:
            OSError, ValueError: files that cannot be read, or are damaged.
        """
        if self.snapshot is not None:
            identity = f"hub:{self.snapshot}"
        else:
            configuration = hashlib.sha256((self.folder / CONFIGURATION).read_bytes()).hexdigest()
            identity = f"{configuration}:{weights.sample(self.weights)}"
        return hashlib.sha256(identity.encode()).digest()

    def _all(self) -> tuple[Path, ...]:
        return (*self.weights, self.folder / CONFIGURATION)


def _folder(path: str) -> Path | None:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    return None if folder.is_absolute() else weights.downloaded(path)
