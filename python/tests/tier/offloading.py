"""vLLM's own tiering with a real agent, without a GPU.

The specification, the manager, the primary tier and its shared memory are vLLM's. The copy between a GPU and that
memory (``CPUOffloadingWorker``) needs CUDA; the tests instead write and read a worker's view of the memory.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

LAYERS, TOKENS, WORKERS = 4, 16, 2
LAYER_BYTES = 8192
"""Bytes of a layer of a block on one worker."""

CHUNKS = 24
"""Chunks of the primary tier."""

CHUNK_BYTES = LAYERS * LAYER_BYTES * WORKERS
LONG_S = 60.0
"""Timeout that only a hang exceeds."""


def tier_config(socket: Path, **changes: Any) -> dict[str, Any]:
    """Returns the tier's part of vLLM's configuration."""
    return {
        "type": "RepriseTier",
        "module_path": "reprise.vllm.tier",
        "socket": str(socket),
        "model_digest": "weights-1",
        "hash_algorithm": "sha256_cbor",
        **changes,
    }


def offloading_config(tiers: list[dict[str, Any]], **changes: Any) -> OffloadingConfig:
    """Returns vLLM's configuration of its tiers."""
    flat: dict[str, Any] = {
        "groups": 1,
        "window": None,
        "worker_bytes": LAYERS * LAYER_BYTES,
        "blocks_per_chunk": 1,
        "dtype": "bfloat16",
        "cpu_bytes": CHUNKS * CHUNK_BYTES,
        **changes,
    }
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(
                tokens_per_block=TOKENS,
                layer_names=tuple(f"layer.{layer}" for layer in range(LAYERS)),
                group_id=group,
                sliding_window_size_in_chunks=flat["window"],
            )
            for group in range(flat["groups"])
        ),
        worker_kv_bytes_per_block=flat["worker_bytes"],
        enable_kv_cache_events=False,
        extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": flat["cpu_bytes"],
            "secondary_tiers": tiers,
        },
        engine_id=f"reprise-test-{uuid.uuid4().hex}",
        model=OffloadingModelConfig(name="test/model", dtype=flat["dtype"]),
        cache=OffloadingCacheConfig(tokens_per_hash=TOKENS, blocks_per_chunk=flat["blocks_per_chunk"]),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=WORKERS,
            tp_size=WORKERS,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        kv_cache_layout="BLHNC",
    )


def chain(seed: int, chunks: int) -> list[OffloadKey]:
    """Returns keys of a prompt's chunks."""
    return [make_offload_key(hashlib.sha256(f"{seed}:{number}".encode()).digest(), 0) for number in range(chunks)]


def payload(key: OffloadKey) -> torch.Tensor:
    """Returns the content of a chunk: noise seeded by its key, ``[workers, layers, bytes]``."""
    noise = torch.Generator().manual_seed(int.from_bytes(key[:6], "big"))
    return torch.randint(-128, 128, (WORKERS, LAYERS, LAYER_BYTES), dtype=torch.int8, generator=noise)


@dataclass
class Offloading:
    """Offloading of an engine: the scheduler's side and the workers' memory."""

    config: OffloadingConfig
    slowest_call_s: float = 0.0
    """Longest call of the scheduler."""
    _names: int = 0
    _workers: list[SharedOffloadRegion] = field(default_factory=list)
    _views: list[list[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = OffloadingSpecFactory.create_spec(self.config)
        assert isinstance(spec, TieringOffloadingSpec)
        self.spec = spec
        manager = spec.get_manager()
        assert isinstance(manager, TieringOffloadingManager)
        self.manager = manager
        self.tier: Any = manager.secondary_tiers[0]
        for rank in range(WORKERS):
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=spec.num_chunks,
                rank=rank,
                kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
                cpu_page_size=spec.cpu_page_size_per_worker,
            )
            self._workers.append(region)
            self._views.append([region.create_next_worker_view(LAYER_BYTES) for _ in range(LAYERS)])

    def close(self) -> None:
        """Shuts down as vLLM does."""
        self._views.clear()
        for region in self._workers:
            region.cleanup()
        self.manager.shutdown()

    def begin(self, params: dict[str, Any] | None = None) -> ReqContext:
        """Starts a request with parameters (``kv_transfer_params``)."""
        self._names += 1
        request = ReqContext(req_id=f"request-{self._names}", kv_transfer_params=params)
        self.timed(lambda: self.manager.on_new_request(request))
        return request

    def end(self, request: ReqContext) -> None:
        """Ends a request."""
        self.timed(lambda: self.manager.on_request_finished(request))

    def step(self) -> None:
        """Ends a step of the scheduler."""
        self.timed(lambda: self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=())))

    def finish_jobs(self, within: float = LONG_S) -> None:
        """Steps until all jobs have ended."""
        deadline = time.monotonic() + within
        while True:
            self.step()
            if not self.manager.has_pending_work():
                return
            assert time.monotonic() < deadline, "jobs have not ended"
            time.sleep(0.001)

    def store(self, keys: Sequence[OffloadKey], params: dict[str, Any] | None = None) -> None:
        """Stores the chunks of a request in the primary tier, which passes them to the agent."""
        request = self.begin(params)
        prepared = self.manager.prepare_store(keys, request)
        assert prepared is not None
        places: Any = prepared.store_spec
        for key, chunk in zip(prepared.keys_to_store, places.chunk_ids, strict=True):
            self.put(int(chunk), payload(key))
        self.timed(lambda: self.manager.complete_store(prepared.keys_to_store, request))
        self.end(request)

    def put(self, chunk: int, content: torch.Tensor) -> None:
        """Writes a chunk to the workers' memory."""
        for worker, views in enumerate(self._views):
            for layer, view in enumerate(views):
                view[chunk] = content[worker, layer]

    def chunk(self, chunk: int) -> torch.Tensor:
        """Returns a chunk from the workers' memory."""
        return torch.stack([torch.stack([view[chunk] for view in views]) for views in self._views])

    def look_up(self, request: ReqContext, keys: Sequence[OffloadKey]) -> int | None:
        """Returns the number of leading chunks that can be loaded, as vLLM's scheduler counts them; None if pending."""
        hits, is_deferred = 0, False
        for key in keys:
            result = self.timed(lambda key=key: self.manager.lookup(key, request))
            if result is LookupResult.MISS:
                break
            is_deferred |= result in (LookupResult.RETRY, LookupResult.HIT_PENDING)
            hits += result in (LookupResult.HIT, LookupResult.HIT_PENDING)
        return None if is_deferred else hits

    def find(self, keys: Sequence[OffloadKey], within: float = LONG_S, params: dict[str, Any] | None = None) -> int:
        """Steps until the number of leading chunks that can be loaded is known, and checks their bytes."""
        request = self.begin(params)
        deadline = time.monotonic() + within
        while (hits := self.look_up(request, keys)) is None:
            assert time.monotonic() < deadline, "the answer is still pending"
            self.step()
            time.sleep(0.001)
        if hits:
            found: Any = self.manager.prepare_load(keys[:hits], request)
            for key, chunk in zip(keys[:hits], found.chunk_ids, strict=True):
                assert torch.equal(self.chunk(int(chunk)), payload(key)), "the bytes differ from those stored"
            self.manager.complete_load(keys[:hits], request)
        self.step()
        self.end(request)
        return hits

    def clear_primary(self) -> None:
        """Clears vLLM's own cache and overwrites its memory."""
        self.finish_jobs()
        self.manager.primary_tier.reset_cache()
        for views in self._views:
            for view in views:
                view.zero_()

    def counts(self) -> dict[str, Any]:
        """Returns Reprise's metrics since the last call, by their short names."""
        stats = self.manager.get_stats()
        values = {} if stats is None else stats.data["data"]
        prefix = "vllm:reprise_"
        return {name.removeprefix(prefix): value[()] for name, value in values.items() if name.startswith(prefix)}

    def timed(self, call: Any) -> Any:
        """Runs a call of the scheduler and updates the longest duration."""
        started = time.monotonic()
        result = call()
        self.slowest_call_s = max(self.slowest_call_s, time.monotonic() - started)
        return result
