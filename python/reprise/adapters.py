"""Identity of a LoRA adapter: a digest of its weights and configuration, independent of its path.

Name and path do not identify an adapter: a retrained adapter keeps both, and two nodes can have different adapters of
the same name. An adapter from the Hugging Face hub is identified by the commit of its snapshot, any other adapter by a
sample of its files (:mod:`reprise.weights`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from reprise import weights

CONFIGURATION = "adapter_config.json"
"""File with rank and scale, which change the result of the same weights."""

Stamp = tuple[tuple[str, int, int], ...]
"""Names, sizes and modification times of files; it changes when a file changes."""


@dataclass(frozen=True)
class AdapterFiles:
    """Files of one adapter on this machine."""

    folder: Path
    weights: tuple[Path, ...]
    snapshot: tuple[str, str] | None
    """Repository and commit of an adapter from the hub."""

    @classmethod
    def find(cls, path: str) -> AdapterFiles | None:
        """Finds an adapter by its folder or its name on the hub; returns None if this machine does not have its files.

        Never uses the network: only snapshots on disk are found.
        """
        folder = _folder(path)
        if folder is None:
            return None
        found = cls(folder, tuple(weights.files(folder)), weights.hub_snapshot(str(folder)))
        return found if found.snapshot is not None or found.weights else None

    def stamp(self) -> Stamp:
        """Returns the current stamp of the files."""
        seen = [(file, file.stat()) for file in self._all() if file.exists()]
        return tuple((file.name, stat.st_size, stat.st_mtime_ns) for file, stat in seen)

    def changed_since(self, seconds: float) -> bool:
        """Returns whether a file changed after a time (seconds since the epoch). A hub snapshot never changes."""
        return self.snapshot is None and any(file.stat().st_ctime > seconds for file in self._all() if file.exists())

    def digest(self) -> bytes:
        """Returns a digest of weights and configuration.

        Raises:
            OSError, ValueError: a file cannot be read or is damaged.
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
