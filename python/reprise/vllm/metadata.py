"""What the scheduler's side and the workers' side tell each other, once a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True)
class LoadPlan:
    """Blocks of a request to load into vLLM's memory."""

    request_id: str
    hashes: tuple[bytes, ...]
    """vLLM's block hashes, in the order of the prompt."""
    blocks: tuple[int, ...]
    """Physical blocks, one for each hash."""


@dataclass(frozen=True)
class SavePlan:
    """Blocks that are full after this step, to save."""

    save_id: int
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]
    parent: bytes | None = None
    """vLLM's hash of the block before the first one in the prompt; None: there is none."""


@dataclass
class RepriseMetadata(KVConnectorMetadata):
    """From the scheduler to each worker."""

    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    is_idle: bool = False
    """Whether the step computes nothing: vLLM goes round until a load or save has ended."""


@dataclass
class RepriseWorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler."""

    ended_saves: Counter[int] = field(default_factory=Counter)
    """How many workers have ended a save, well or not: its blocks are not read any more."""
    partial_saves: set[int] = field(default_factory=set)
    """Saves of which a worker could not keep every block."""
    failed_loads: set[str] = field(default_factory=set)
    """Requests of which a worker could not load every block."""
    whole_loads: Counter[str] = field(default_factory=Counter)
    """How many workers have loaded every block of a request."""
    ended_loads: Counter[str] = field(default_factory=Counter)
    """How many workers have ended a request's load, well or not: its blocks are not written any more."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """What two workers say together."""
        assert isinstance(other, RepriseWorkerMetadata)
        return RepriseWorkerMetadata(
            ended_saves=self.ended_saves + other.ended_saves,
            partial_saves=self.partial_saves | other.partial_saves,
            failed_loads=self.failed_loads | other.failed_loads,
            whole_loads=self.whole_loads + other.whole_loads,
            ended_loads=self.ended_loads + other.ended_loads,
        )
