"""A worker's side: hands loads and saves to native threads, and says what has ended.

The threads of :class:`reprise.Transfers` copy between vLLM's memory and the agent's arena without the GIL; this side
only submits and polls, a few microseconds a step. As options, it goes with vLLM layer by layer:

```text
start_loads ─▶ layer_begins: waits for this layer of all loads ─▶ attention ─▶ layer_ends: saves may read it ─▶ … ─▶ end_step
```

vLLM computes again what a layer-wise load could not bring, if it hears of it with the same step: the step ends after its loads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from reprise import KvMemory, Session, Transfers, block_keys
from reprise.repeated_log import RepeatedLog
from reprise.vllm.metadata import LoadPlan, RepriseMetadata, RepriseWorkerMetadata, SavePlan
from reprise.vllm.metrics import Stats
from reprise.vllm.tiles import ask_for_tiles

ROUND_S = 5.0
"""How often a wait that ends by itself looks again: loads end by their deadline, whatever becomes of the agent."""

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
    _errors: RepeatedLog = field(default_factory=lambda: RepeatedLog("blocks were not loaded or saved whole"))
    _begun: RepriseMetadata | None = None
    """Of the step whose loads were submitted last."""
    _step_loads: list[int] = field(default_factory=list)
    """Layer-wise loads of the step under way."""
    _step_saves: list[int] | None = None
    """Layer-wise saves of the step under way; None: not submitted yet."""
    _filled: set[int] = field(default_factory=set)
    """Layers that the step under way has filled."""

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
        ask_for_tiles()
        memory = KvMemory(tensors, self.geometry.layout)
        self._transfers = Transfers(
            self.session,
            memory,
            load_deadline=self.options.load_deadline_ms / 1e3,
            load_stall=self.options.load_stall_ms / 1e3,
            load_standstill=self.options.load_standstill_ms / 1e3,
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
                load = self._transfers.load(keys, plan.blocks)
            self._loading[load] = (plan, time.monotonic())

    def layer_begins(self, layer_name: str, metadata: RepriseMetadata) -> None:
        """A layer is about to be computed: waits until its blocks are there, or have failed."""
        assert self._transfers is not None
        if self.options.layerwise_loads:
            # vLLM has submitted them before, where it knows of a load that belongs to the step.
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

    def layer_ends(self, layer_name: str) -> None:
        """A layer was computed: saves may read it."""
        layer = self._layer(layer_name)
        if not self._step_saves or layer is None:
            return
        assert self._transfers is not None
        self._filled.add(layer)
        # Layers need not be computed in the order of their numbers; they are told in it.
        leading = next(index for index in range(len(self._filled) + 1) if index not in self._filled)
        self._transfers.note_filled(self._step_saves, leading)

    def end_step(self, metadata: RepriseMetadata, *, is_whole: bool) -> None:
        """Ends a step: its loads have ended, its saves are submitted.

        Args:
            metadata: of the step.
            is_whole: whether the forward pass has filled its blocks.
        """
        self._end_loads()
        saves, self._step_saves = self._step_saves, None
        self._filled.clear()
        if not is_whole or self._transfers is None:
            if saves is None:
                # Nobody will end them: their blocks would be kept for ever.
                for plan in metadata.saves:
                    self._ended.ended_saves[plan.save_id] += 1
                    self._ended.partial_saves.add(plan.save_id)
            return
        if saves is None:
            self._submit_saves(metadata, self._transfers.save)
        elif saves:
            # All layers, also those whose end vLLM does not tell.
            self._transfers.note_filled(saves, len(self.geometry.layer_names))

    def loaded(self, *, is_idle: bool = False) -> set[str]:
        """Takes what has ended; returns the requests that have waited for their loads, which ended well or not.

        Args:
            is_idle: whether the step has computed nothing: it waits a moment for the oldest load, or save.
        """
        self._end_loads()
        requests: set[str] = set()
        if self._transfers is None or not (self._loading or self._saving):
            return requests
        if is_idle:
            self._transfers.wait([min(self._loading or self._saving)], self.options.idle_wait_ms / 1e3)
        for ended in self._transfers.finished():
            self._errors.note(ended.error)
            if ended.id in self._loading:
                plan, since = self._loading.pop(ended.id)
                if not self.options.layerwise_loads:
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
        if self._ended == RepriseWorkerMetadata():
            return None
        said, self._ended = self._ended, RepriseWorkerMetadata()
        return said

    def close(self) -> None:
        """Ends threads and session. Blocks that are being copied are copied to their end first, or given up."""
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        self.session.close()

    def _submit_saves(
        self, metadata: RepriseMetadata, submit: Callable[[bytes, Sequence[int], bytes | None], int]
    ) -> list[int]:
        submitted = []
        for plan in metadata.saves:
            keys = block_keys(self.geometry.namespace, plan.hashes)
            parent = None if plan.parent is None else block_keys(self.geometry.namespace, [plan.parent])
            save = submit(keys, plan.blocks, parent)
            self._saving[save] = (plan, time.monotonic())
            submitted.append(save)
        return submitted

    def _layer(self, name: str) -> int | None:
        """The number of a layer; None: it keeps no KV of its own."""
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
