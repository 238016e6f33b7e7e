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
    """What names the weights: it differs wherever weights, revision or the model's configuration file do. Empty: weights are identified
    by the commit of their snapshot, or by a sample of their files' bytes."""

    multimodal: bool = False
    """Whether pages of models with images, video or audio are kept. SGLang identifies such an input by 64 bits of a hash over its
    values, without their arrangement."""

    match_deadline_ms: float = 250.0
    """After which a prefetch goes on as if nothing was there."""

    save_stall_ms: float = 500.0
    """After which a save that makes no progress is given up."""
