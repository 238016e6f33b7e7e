"""What tells LoRA adapters apart besides their name and path, which are in vLLM's block hash: their weights.

An adapter that was trained again lies where it lay before, and another node has another one of the same name: so a digest of a sample of its
files goes into the keys of its requests' blocks. An adapter of the hub has the commit of its snapshot. What cannot be told apart is neither
loaded nor saved.

The sample is taken once a path, when its first request comes: vLLM keeps an adapter as it has read it. One that is to be read anew
(``load_inplace``) is looked at for each request, and sampled again when its files have changed. Replacing files without it is not seen, as vLLM
does not see it either.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from reprise import weights

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

CONFIGURATION = "adapter_config.json"

Stamp = tuple[tuple[str, int, int], ...]
"""Names, sizes and times of files: what is sampled again when it changes."""


@dataclass
class Adapters:
    """Digests of adapters by their path."""

    _known: dict[str, tuple[Stamp, bytes]] = field(default_factory=dict)

    def digest(self, lora: LoRARequest | None) -> bytes | None:
        """What goes behind the block hashes of a request: nothing without an adapter; None: it cannot be told from others."""
        if lora is None:
            return b""
        known = self._known.get(lora.lora_path)
        if known is not None and not lora.load_inplace:
            return known[1]
        try:
            return self._sampled(lora.lora_path, known)
        except (OSError, ValueError):
            return None

    def _sampled(self, path: str, known: tuple[Stamp, bytes] | None) -> bytes | None:
        folder = _folder(path)
        if folder is None:
            return None
        snapshot = weights.hub_snapshot(str(folder))
        files = weights.files(folder)
        if snapshot is None and not files:
            return None
        stamp = _stamp([*files, folder / CONFIGURATION])
        if known is not None and known[0] == stamp:
            return known[1]
        told = f"hub:{snapshot}" if snapshot is not None else f"{_configuration(folder)}:{weights.sample(files)}"
        digest = hashlib.sha256(told.encode()).digest()
        self._known[path] = (stamp, digest)
        return digest


def _folder(path: str) -> Path | None:
    """Where an adapter's files are; None: nowhere on this machine yet."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute():
        return None
    # As vLLM names one of the hub. Only what was fetched is looked at: the network is not for the scheduler.
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _configuration(folder: Path) -> str:
    """Rank and scale are there, and change what the same weights do."""
    return hashlib.sha256((folder / CONFIGURATION).read_bytes()).hexdigest()


def _stamp(files: list[Path]) -> Stamp:
    seen = [(file, file.stat()) for file in files if file.exists()]
    return tuple((file.name, stat.st_size, stat.st_mtime_ns) for file, stat in seen)
