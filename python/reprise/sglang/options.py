"""Options of ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reprise.options import SharedOptions


@dataclass(frozen=True)
class StorageOptions(SharedOptions):
    """Options of the storage. Times are in milliseconds."""

    where: ClassVar[str] = "--hicache-storage-backend-extra-config"
    engine_options: ClassVar[tuple[str, ...]] = ("backend_name", "module_path", "class_name", "interface_v1")

    model_digest: str = ""
    """Identity of the weights, which must change with weights, revision and the model's configuration file. Empty: weights
    are identified by the commit of their snapshot, or by a sample of their files' bytes."""

    multimodal: bool = False
    """Whether to cache pages of models with images, video or audio. SGLang identifies such an input by a 64-bit hash of its
    values without their arrangement."""

    match_deadline_ms: float = 250.0
    """Time after which a prefetch continues as if no page was found."""

    save_stall_ms: float = 500.0
    """Time without progress after which a save fails."""
