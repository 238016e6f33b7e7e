"""Worker side of the connector: submits loads and saves to native threads, and reports those that have ended.

The threads of :class:`reprise.Transfers` move blocks between vLLM's memory and the agent's arena, or extents of its
devices, without the GIL. This side only submits and polls, which takes a few microseconds per step. Optionally, loads and saves run layer by layer:

```text
start_loads ─▶ begin_layer: waits for this layer of all loads ─▶ attention ─▶ end_layer: saves may read it ─▶ … ─▶ end_step
```

vLLM recomputes the blocks of a failed layer-wise load only if the failure is reported with the same step. So a step ends
only after its layer-wise loads have ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from reprise import KvMemory, Session, Transfers, block_keys
from reprise.extent_log import ExtentLog
from reprise.kv_hints import Priority
from reprise.layer_reports import LayerReports
from reprise.recompute import counts_of
from reprise.repeated_log import RepeatedLog
from reprise.vllm.amx import request_tiles
from reprise.vllm.metadata import LoadPlan, LoadTime, RepriseMetadata, RepriseWorkerMetadata, SavePlan
from reprise.vllm.metrics import Stats

LOGGER = logging.getLogger("vllm.reprise")
"""Logger whose information vLLM prints."""

ROUND_S = 5.0
"""Seconds of one native wait in a loop. The loop ends because every load ends by its deadline."""

if TYPE_CHECKING:
    from reprise.vllm.geometry import Geometry
    from reprise.vllm.options import Options


@dataclass
class WorkerSide:
    """Worker side of the connector."""

    geometry: Geometry
    options: Options
    session: Session
    reports: LayerReports | None = None
    """Reports of computed layers; None: nothing is reported."""
    stats: Stats = field(default_factory=Stats)
    _transfers: Transfers | None = None
    _loading: dict[int, tuple[LoadPlan, float]] = field(default_factory=dict)
    _saving: dict[int, tuple[SavePlan, float]] = field(default_factory=dict)
    _ended: RepriseWorkerMetadata = field(default_factory=RepriseWorkerMetadata)
    _failed_blocks: set[int] = field(default_factory=set)
    _errors: RepeatedLog = field(default_factory=lambda: RepeatedLog("some blocks were not loaded or saved"))
    _extents: ExtentLog = field(default_factory=lambda: ExtentLog(LOGGER))
    _begun: RepriseMetadata | None = None
    """Metadata of the last step whose loads were submitted."""
    _step_loads: list[int] = field(default_factory=list)
    """Layer-wise loads of the current step."""
    _step_saves: list[int] | None = None
    """Layer-wise saves of the current step; None: not submitted yet."""
    _filled: set[int] = field(default_factory=set)
    """Layers that the current step has filled."""

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Registers vLLM's KV memory.

        Args:
            kv_caches: tensors ``[blocks, heads, tokens, content]`` by layer.

        Raises:
            ValueError: the memory is not host memory, or does not match the geometry.
        """
        missing = [name for name in self.geometry.layer_names if name not in kv_caches]
        if missing:
            raise ValueError(f"vLLM registered no KV cache for {missing[0]} ({len(missing)} layers are missing)")
        tensors = [kv_caches[name] for name in self.geometry.layer_names]
        for name, tensor in zip(self.geometry.layer_names, tensors, strict=True):
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"{name} is on {tensor.device}: RepriseConnector supports host memory only (vLLM's CPU backend)"
                )
        request_tiles()
        memory = KvMemory(tensors, self.geometry.layout)
        self._transfers = Transfers(
            self.session,
            memory,
            load_deadline=self.options.load_deadline_ms / 1e3,
            load_stall=self.options.load_stall_ms / 1e3,
            load_standstill=self.options.load_standstill_ms / 1e3,
            extents=self.options.extents,
        )

    def start_loads(self, metadata: RepriseMetadata) -> None:
        """Submits the loads of this step, once."""
        if self._begun is metadata:
            return
        self._begun = metadata
        for plan in metadata.loads:
            assert self._transfers is not None
            keys = block_keys(self.geometry.namespace, plan.hashes)
            if self.options.layerwise_loads:
                load = self._transfers.load_by_layers(keys, plan.blocks)
                self._step_loads.append(load)
            else:
                load = self._transfers.load(keys, plan.blocks, plan.limit)
            self._loading[load] = (plan, time.monotonic())

    def begin_layer(self, layer_name: str, metadata: RepriseMetadata) -> None:
        """Waits before the computation of a layer until its blocks are loaded or have failed."""
        assert self._transfers is not None
        if self.options.layerwise_loads:
            # Usually a no-op: vLLM calls start_load_kv first if it knows of a load in this step.
            self.start_loads(metadata)
        if self.options.layerwise_saves and self._step_saves is None:
            self._step_saves = self._submit_saves(metadata, self._transfers.save_by_layers)
        if not self._step_loads:
            return
        layer = self._layer(layer_name)
        if layer is None:
            self._end_loads()
            return
        while not self._transfers.wait_layer(self._step_loads, layer, ROUND_S):
            pass

    def note_layer(self, layer_name: str, metadata: RepriseMetadata) -> None:
        """Measures a layer whose computation begins, for the reports."""
        if self.reports is not None:
            # The waits of a layer-wise load would count as computation.
            waits = self.options.layerwise_loads and bool(metadata.loads)
            self.reports.begin_layer(layer_name, None if waits else metadata.computation)

    def end_layer(self, layer_name: str) -> None:
        """Makes a computed layer available to saves."""
        layer = self._layer(layer_name)
        if not self._step_saves or layer is None:
            return
        assert self._transfers is not None
        self._filled.add(layer)
        # Layers may be computed in any order, but only the number of leading filled layers can be reported.
        leading = next(index for index in range(len(self._filled) + 1) if index not in self._filled)
        self._transfers.note_filled(self._step_saves, leading)

    def end_step(self, metadata: RepriseMetadata, *, is_complete: bool) -> None:
        """Ends a step: waits for its layer-wise loads and submits its saves.

        Args:
            metadata: metadata of the step.
            is_complete: whether the forward pass has filled its blocks.
        """
        if self.reports is not None:
            self.reports.end_step(is_idle=metadata.is_idle)
        self._end_loads()
        saves, self._step_saves = self._step_saves, None
        self._filled.clear()
        if not is_complete or self._transfers is None:
            if saves is None:
                # Report unsubmitted saves as ended: otherwise their blocks would stay referenced forever.
                for plan in metadata.saves:
                    self._ended.ended_saves[plan.save_id] += 1
                    self._ended.partial_saves.add(plan.save_id)
            return
        if saves is None:
            self._submit_saves(metadata, self._transfers.save)
        elif saves:
            # All layers, including those for which vLLM does not call save_kv_layer.
            self._transfers.note_filled(saves, len(self.geometry.layer_names))

    def loaded(self, *, is_idle: bool = False) -> set[str]:
        """Processes ended transfers; returns the waiting requests whose loads have ended or failed.

        Args:
            is_idle: whether the step computes nothing; it then waits briefly for the oldest load or save.
        """
        self._end_loads()
        requests: set[str] = set()
        if self._transfers is None or not (self._loading or self._saving):
            return requests
        if is_idle:
            self._transfers.wait([min(self._loading or self._saving)], self.options.idle_wait_ms / 1e3)
        for ended in self._transfers.finished():
            self._errors.note(ended.error)
            self._extents.note(self._transfers)
            if ended.id in self._loading:
                plan, since = self._loading.pop(ended.id)
                if not self.options.layerwise_loads:
                    requests.add(plan.request_id)
                self._load_ended(plan, ended.ok, time.monotonic() - since)
                loaded = (source for source, is_ok in zip(ended.sources, ended.ok, strict=True) if is_ok)
                self._ended.load_times.append(LoadTime(plan.request_id, counts_of(loaded), ended.ran))
                self.stats.add("extent_loaded_blocks", ended.by_extents)
            elif ended.id in self._saving:
                save, since = self._saving.pop(ended.id)
                self._ended.ended_saves[save.save_id] += 1
                if ended.unsaved:
                    self._ended.partial_saves.add(save.save_id)
                self.stats.sample("save_seconds", time.monotonic() - since)
                self.stats.add("saves", 1)
                self.stats.add("saved_blocks", ended.committed)
                self.stats.add("saved_bytes", ended.committed * self.geometry.layout.block_bytes)
                self.stats.add("extent_saved_blocks", ended.by_extents)
                self.stats.add("duplicate_blocks", ended.duplicates)
                self.stats.add("unsaved_blocks", ended.unsaved)
        return requests

    def take_failed_blocks(self) -> set[int]:
        """Returns the physical blocks whose load has failed since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_worker_output(self) -> RepriseWorkerMetadata | None:
        """Returns ended loads and saves for the scheduler side; None without any."""
        if self._ended == RepriseWorkerMetadata():
            return None
        output, self._ended = self._ended, RepriseWorkerMetadata()
        return output

    def close(self) -> None:
        """Ends threads and session; running copies finish or fail first."""
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        self.session.close()

    def _submit_saves(
        self, metadata: RepriseMetadata, submit: Callable[[bytes, Sequence[int], bytes | None, int, Priority], int]
    ) -> list[int]:
        submitted = []
        for plan in metadata.saves:
            keys = block_keys(self.geometry.namespace, plan.hashes)
            parent = None if plan.parent is None else block_keys(self.geometry.namespace, [plan.parent])
            save = submit(keys, plan.blocks, parent, plan.position, plan.priority)
            self._saving[save] = (plan, time.monotonic())
            submitted.append(save)
        return submitted

    def _layer(self, name: str) -> int | None:
        """Returns the index of a layer; None if it has no KV."""
        try:
            return self.geometry.layer_names.index(name)
        except ValueError:
            return None

    def _end_loads(self) -> None:
        """Waits until the layer-wise loads of this step have ended."""
        while self._step_loads and self._transfers is not None and not self._transfers.wait(self._step_loads, ROUND_S):
            pass
        self._step_loads = []

    def _load_ended(self, plan: LoadPlan, ok: list[bool], seconds: float) -> None:
        self._ended.ended_loads[plan.request_id] += 1
        failed = [block for block, is_ok in zip(plan.blocks, ok, strict=True) if not is_ok]
        if failed:
            self._failed_blocks.update(failed)
            self._ended.failed_loads.add(plan.request_id)
        else:
            self._ended.whole_loads[plan.request_id] += 1
        loaded = len(plan.blocks) - len(failed)
        self.stats.sample("load_seconds", seconds)
        self.stats.add("loads", 1)
        self.stats.add("loaded_blocks", loaded)
        self.stats.add("loaded_bytes", loaded * self.geometry.layout.block_bytes)
        self.stats.add("failed_blocks", len(failed))
