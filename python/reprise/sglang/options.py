"""What ``--hicache-storage-backend-extra-config`` may say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reprise.options import SharedOptions


@dataclass(frozen=True)
class StorageOptions(SharedOptions):
    """Options of the storage. Times are milliseconds."""

    where: ClassVar[str] = "--hicache-storage-backend-extra-config"
    not_ours: ClassVar[tuple[str, ...]] = ("backend_name", "module_path", "class_name", "interface_v1")

    model_digest: str = ""
    """What names the weights and all else about the model that changes its KV: revision, dtype, quantization, overrides. SGLang
    tells a storage the model's name and no more."""

    match_deadline_ms: float = 250.0
    """After which a prefetch goes on as if nothing was there."""

    save_stall_ms: float = 500.0
    """After which a save that makes no progress is given up."""
