"""A worker's side: hands loads and saves to native threads, and says what has ended.

The threads of :class:`reprise.Transfers` copy between vLLM's memory and the agent's arena without the GIL; this side
only submits and polls, a few microseconds a step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from reprise import KvMemory, Session, Transfers, block_keys
from reprise.vllm.metadata import LoadPlan, RepriseMetadata, RepriseWorkerMetadata, SavePlan
from reprise.vllm.metrics import Stats

if TYPE_CHECKING:
    from reprise.vllm.geometry import Geometry
    from reprise.vllm.options import Options


@dataclass
class WorkerSide:
    """See the module."""

    geometry: Geometry
    options: Options
    session: Session
    stats: Stats = field(default_factory=Stats)
    _transfers: Transfers | None = None
    _loading: dict[int, tuple[LoadPlan, float]] = field(default_factory=dict)
    _saving: dict[int, tuple[SavePlan, float]] = field(default_factory=dict)
    _ended: RepriseWorkerMetadata = field(default_factory=RepriseWorkerMetadata)
    _failed_blocks: set[int] = field(default_factory=set)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Takes vLLM's memory.

        Args:
            kv_caches: by layer, ``[blocks, heads, tokens, content]``.

        Raises:
            ValueError: memory that is not the host's, or not laid out as the geometry says.
        """
        missing = [name for name in self.geometry.layer_names if name not in kv_caches]
        if missing:
            raise ValueError(f"vLLM registered no KV cache for {missing[0]} ({len(missing)} layers are missing)")
        tensors = [kv_caches[name] for name in self.geometry.layer_names]
        for name, tensor in zip(self.geometry.layer_names, tensors, strict=True):
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"{name} lies on {tensor.device}: RepriseConnector works on host memory (vLLM's CPU backend)"
                )
        memory = KvMemory(tensors, self.geometry.layout)
        self._transfers = Transfers(
            self.session,
            memory,
            load_deadline=self.options.load_deadline_ms / 1e3,
            load_stall=self.options.load_stall_ms / 1e3,
        )

    def start_loads(self, metadata: RepriseMetadata) -> None:
        """Submits the loads of this step."""
        for plan in metadata.loads:
            assert self._transfers is not None
            keys = block_keys(self.geometry.namespace, plan.hashes)
            self._loading[self._transfers.load(keys, plan.blocks)] = (plan, time.monotonic())

    def start_saves(self, metadata: RepriseMetadata) -> None:
        """Submits the saves of this step, whose blocks the forward pass has filled."""
        for plan in metadata.saves:
            assert self._transfers is not None
            keys = block_keys(self.geometry.namespace, plan.hashes)
            self._saving[self._transfers.save(keys, plan.blocks)] = (plan, time.monotonic())

    def loaded(self) -> set[str]:
        """Takes what has ended; returns the requests whose loads have, well or not."""
        requests: set[str] = set()
        if self._transfers is None or not (self._loading or self._saving):
            return requests
        for ended in self._transfers.finished():
            if ended.id in self._loading:
                plan, since = self._loading.pop(ended.id)
                requests.add(plan.request_id)
                self._load_ended(plan, ended.ok, time.monotonic() - since)
            elif ended.id in self._saving:
                save, since = self._saving.pop(ended.id)
                self._ended.ended_saves[save.save_id] += 1
                if ended.unsaved:
                    self._ended.partial_saves.add(save.save_id)
                self.stats.sample("save_seconds", time.monotonic() - since)
                self.stats.add("saves", 1)
                self.stats.add("saved_blocks", ended.committed)
                self.stats.add("saved_bytes", ended.committed * self.geometry.layout.block_bytes)
                self.stats.add("duplicate_blocks", ended.duplicates)
                self.stats.add("unsaved_blocks", ended.unsaved)
        return requests

    def take_failed_blocks(self) -> set[int]:
        """Physical blocks that were to be loaded and were not."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_said(self) -> RepriseWorkerMetadata | None:
        """What the scheduler's side is to know."""
        if not self._ended.ended_saves and not self._ended.failed_loads:
            return None
        said, self._ended = self._ended, RepriseWorkerMetadata()
        return said

    def close(self) -> None:
        """Ends threads and session. Blocks that are being copied are copied to their end first, or given up."""
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        self.session.close()

    def _load_ended(self, plan: LoadPlan, ok: list[bool], seconds: float) -> None:
        failed = [block for block, is_ok in zip(plan.blocks, ok, strict=True) if not is_ok]
        if failed:
            self._failed_blocks.update(failed)
            self._ended.failed_loads.add(plan.request_id)
        loaded = len(plan.blocks) - len(failed)
        self.stats.sample("load_seconds", seconds)
        self.stats.add("loads", 1)
        self.stats.add("loaded_blocks", loaded)
        self.stats.add("loaded_bytes", loaded * self.geometry.layout.block_bytes)
        self.stats.add("failed_blocks", len(failed))
