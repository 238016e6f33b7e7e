"""Messages between the scheduler side and the worker sides, exchanged once per step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from reprise.kv_hints import Priority
from reprise.layer_reports import Computation
from reprise.recompute import Counts, Limit


@dataclass(frozen=True)
class LoadPlan:
    """Load of a request's blocks into vLLM's memory."""

    request_id: str
    hashes: tuple[bytes, ...]
    """vLLM's block hashes, in the order of the prompt."""
    blocks: tuple[int, ...]
    """Physical blocks, one for each hash."""
    limit: Limit | None = None
    """Limit of the wait; None: no limit."""


@dataclass(frozen=True)
class LoadTime:
    """Measured load of a request."""

    request_id: str
    loaded: Counts
    """Number of loaded blocks of each source."""
    seconds: float
    """Time that it ran."""


@dataclass(frozen=True)
class SavePlan:
    """Save of blocks that are full after this step."""

    save_id: int
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]
    position: int
    """Number of blocks before the first one in the prompt."""
    parent: bytes | None = None
    """vLLM's hash of the block before the first one; None at the start of the prompt."""
    priority: Priority = "normal"
    """Eviction priority of the blocks."""


@dataclass
class RepriseMetadata(KVConnectorMetadata):
    """Message from the scheduler to each worker."""

    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    is_idle: bool = False
    """Whether the step computes nothing; vLLM then repeats steps until a load or save has ended."""
    computation: Computation | None = None
    """Computation of the step, for reports of its layers; None if it is idle."""


@dataclass
class RepriseWorkerMetadata(KVConnectorWorkerMetadata):
    """Message from the workers to the scheduler."""

    ended_saves: Counter[int] = field(default_factory=Counter)
    """Number of workers that have ended a save, successful or not, and no longer read its blocks."""
    partial_saves: set[int] = field(default_factory=set)
    """Saves of which a worker did not save every block."""
    failed_loads: set[str] = field(default_factory=set)
    """Requests of which a worker did not load every block."""
    whole_loads: Counter[str] = field(default_factory=Counter)
    """Number of workers that have loaded every block of a request."""
    ended_loads: Counter[str] = field(default_factory=Counter)
    """Number of workers that have ended a request's load, successful or not, and no longer write its blocks."""
    load_times: list[LoadTime] = field(default_factory=list)
    """Loads that were measured."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merges the messages of two workers."""
        assert isinstance(other, RepriseWorkerMetadata)
        return RepriseWorkerMetadata(
            ended_saves=self.ended_saves + other.ended_saves,
            partial_saves=self.partial_saves | other.partial_saves,
            failed_loads=self.failed_loads | other.failed_loads,
            whole_loads=self.whole_loads + other.whole_loads,
            ended_loads=self.ended_loads + other.ended_loads,
            load_times=self.load_times + other.load_times,
        )
