"""Options of ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from reprise import tiers
from reprise.options import SharedOptions

PRIORITIES = ("low", "normal", "high")
"""Eviction priorities."""


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

    load_tiers: str = ""
    """Sources to load from, such as `CPU:LOCAL,STORAGE` (:func:`reprise.tiers.parse`); `none`: nothing is loaded. Empty:
    all. SGLang passes no parameters of requests to a storage, so they are options of the instance."""

    no_store: bool = False
    """Whether nothing is saved."""

    priority: str = "normal"
    """Eviction priority of saved pages: `low`, `normal` or `high`."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Reads the options from a configuration.

        Raises:
            ValueError: an unknown option, or a value of the wrong type or range.
        """
        options = super().read(config)
        if options.priority not in PRIORITIES:
            raise ValueError(f"{cls.where}: invalid priority {options.priority!r}: expected {', '.join(PRIORITIES)}")
        try:
            options.sources()
        except ValueError as error:
            raise ValueError(f"{cls.where}: load_tiers: {error}") from error
        return options

    def sources(self) -> frozenset[int]:
        """Returns the sources to load from."""
        return tiers.parse(self.load_tiers) if self.load_tiers else tiers.ALL
