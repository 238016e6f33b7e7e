"""Reprise as a secondary tier behind vLLM's host memory: the way in for engines on GPUs.

vLLM moves chunks of KV between GPU and a region of shared memory by itself; this tier moves them between that region and the
agent's arena, on native threads and without a copy in between. Name it in vLLM's configuration (0.33)::

    --kv-transfer-config '{
        "kv_connector": "RepriseOffloadingConnector", "kv_connector_module_path": "reprise.vllm.offloading",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184,
            "secondary_tiers": [
                {"type": "RepriseTier", "module_path": "reprise.vllm.tier", "socket": "/run/reprise/agent.sock"}]}}'

What can be set is in :class:`reprise.vllm.options.TierOptions`. All of it runs in the scheduler's process, whose calls wait
for ``match_budget_ms`` a step at the most; whatever becomes of the agent, every job ends. vLLM's CPU backend has no
offloading: there, use :class:`reprise.vllm.RepriseConnector`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from reprise import Finished, RepriseError, Transfers
from reprise.repeated_log import RepeatedLog
from reprise.vllm import chunks
from reprise.vllm.asking import Asker
from reprise.vllm.lookups import Lookups
from reprise.vllm.metrics import BUCKETS, COUNTERS, TIMES
from reprise.vllm.options import TierOptions

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

logger = logging.getLogger("reprise")

DRAIN_ROUND_S = 5.0
"""How often a drain says that it still waits."""


class Counts:
    """What has happened since the last collection, as vLLM's offloading counts."""

    def __init__(self) -> None:
        self._stats = OffloadingConnectorStats()

    def add(self, name: str, count: int) -> None:
        """Counts."""
        if count:
            self._stats.increase_counter(f"vllm:reprise_{name}", count)

    def sample(self, name: str, seconds: float) -> None:
        """Notes a time."""
        self._stats.observe_histogram(f"vllm:reprise_{name}", seconds)

    def take(self) -> OffloadingConnectorStats | None:
        """What there is, leaving nothing; None: nothing."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, OffloadingConnectorStats()
        return taken


@dataclass(frozen=True)
class Job:
    """A job of vLLM's that is under way."""

    job_id: int
    keys: tuple[OffloadKey, ...]
    since: float


class RepriseTier(SecondaryTierManager):
    """Stores vLLM's chunks in Reprise and loads them from there.

    Raises:
        ValueError: a configuration that cannot work, and what to do.
        Version, Forbidden, BadRequest: the agent is there and refuses this engine, and what to do.
    """

    medium: ClassVar[Medium] = Medium.STORAGE
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED
    """A chunk may come from DRAM or NVMe, of this node or another."""

    def __init__(
        self,
        offloading_spec: TieringOffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **config: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options = TierOptions.read(config)
        self._chunks = chunks.read(offloading_spec.config, offloading_spec.replicated_layout, options)
        memory = self._chunks.memory(primary_kv_view)
        self._counts = Counts()
        self._generation = b""
        self._jobs: dict[int, Job] = {}
        self._results: list[JobResult] = []
        """Of jobs that have ended and were not told yet."""
        self._errors = RepeatedLog("chunks were not loaded or stored whole")
        self._refusals = RepeatedLog("a job of vLLM's offloading was refused")
        self._session = options.session(self._chunks.namespace, self._chunks.layout, "vllm-tier")
        self._transfers: Transfers | None = Transfers(
            self._session,
            memory,
            load_deadline=options.load_deadline_ms / 1e3,
            load_stall=options.load_stall_ms / 1e3,
            load_standstill=options.load_standstill_ms / 1e3,
            save_stall=options.save_stall_ms / 1e3,
        )
        self._lookups = Lookups(Asker(self._session, options, self._counts), self._keys)

    # What is there

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk is there; RETRY: not known yet."""
        if not self._chunks.is_ours(key):
            return LookupResult.MISS
        return self._lookups.look(req_context.req_id, key)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks are stored as they come."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forgets what was asked for a request."""
        self._lookups.end_request(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Asks about the keys of this step."""
        self._lookups.end_step()

    # Jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Stores chunks; those that are there are not stored again."""
        request = job_metadata.req_context.req_id
        parent = self._lookups.parent(request)
        packed = None if parent is None else self._keys([parent])
        self._submit(job_metadata, lambda transfers, keys, chunks: transfers.save(keys, chunks, packed))
        keys = tuple(job_metadata.keys)
        if keys:
            self._lookups.note_stored(request, keys[-1])

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Loads chunks."""
        self._submit(job_metadata, lambda transfers, keys, chunks: transfers.load(keys, chunks))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended since the last call, well or not."""
        results, self._results = self._results, []
        if self._transfers is not None and self._jobs:
            results.extend(self._ended(done, self._jobs.pop(done.id)) for done in self._transfers.finished())
        return results

    def drain_jobs(self) -> None:
        """Waits until every job has ended, each within its patience.

        vLLM drains a tier where it resets its caches, and only there: weights may have changed. From then on this engine's
        chunks are its own, whatever other engines have, because nobody can say which of them have the new weights.
        """
        if self._transfers is not None:
            while self._jobs and not self._transfers.wait(list(self._jobs), DRAIN_ROUND_S):
                logger.warning("vLLM's reset waits for %s jobs of its Reprise tier", self._transfers.unfinished)
            self._results = list(self.get_finished_jobs())
        self._generation = uuid.uuid4().bytes
        self._lookups.forget()

    def shutdown(self) -> None:
        """Ends threads and session, and lets go of vLLM's memory."""
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        self._session.close()

    # Metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """The connector's metrics, under the same names."""
        definitions: dict[str, OffloadingMetricMetadata] = {
            f"vllm:reprise_{name}": OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()
        }
        for name, text in TIMES.items():
            definitions[f"vllm:reprise_{name}"] = OffloadingHistogramMetadata(documentation=text, buckets=BUCKETS)
        return definitions

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What has happened since the last call."""
        return self._counts.take()

    def _keys(self, offload_keys: Collection[OffloadKey]) -> bytes:
        return self._chunks.keys(offload_keys, self._generation)

    def _submit(self, job: TransferJob, submit: Any) -> None:
        keys = tuple(job.keys)
        try:
            if self._transfers is None:
                raise RuntimeError("it was shut down")
            number = submit(self._transfers, self._keys(keys), [int(chunk) for chunk in job.chunk_ids])
        except (RepriseError, RuntimeError, ValueError) as error:
            # vLLM goes on without these chunks, as it does when a job fails later.
            self._refusals.note(f"job {job.job_id}: {error}")
            self._results.append(JobResult(job_id=job.job_id, success=False))
            self._lookups.missed(keys)
            return
        self._refusals.note(None)
        self._jobs[number] = Job(job.job_id, keys, time.monotonic())

    def _ended(self, done: Finished, job: Job) -> JobResult:
        self._errors.note(done.error)
        if done.kind == "load":
            return self._load_ended(done, job)
        seconds = time.monotonic() - job.since
        self._counts.sample("save_seconds", seconds)
        self._counts.add("saves", 1)
        self._counts.add("saved_blocks", done.committed)
        self._counts.add("saved_bytes", done.committed * self._chunks.layout.block_bytes)
        self._counts.add("duplicate_blocks", done.duplicates)
        self._counts.add("unsaved_blocks", done.unsaved)
        return JobResult(
            job_id=job.job_id,
            success=done.unsaved == 0,
            transfer_time=seconds,
            transfer_bytes=done.committed * self._chunks.layout.block_bytes,
        )

    def _load_ended(self, done: Finished, job: Job) -> JobResult:
        seconds = time.monotonic() - job.since
        loaded = tuple(key for key, is_ok in zip(job.keys, done.ok, strict=True) if is_ok)
        failed = [key for key, is_ok in zip(job.keys, done.ok, strict=True) if not is_ok]
        if failed:
            self._lookups.missed(failed)
        self._counts.sample("load_seconds", seconds)
        self._counts.add("loads", 1)
        self._counts.add("loaded_blocks", len(loaded))
        self._counts.add("loaded_bytes", len(loaded) * self._chunks.layout.block_bytes)
        self._counts.add("failed_blocks", len(failed))
        return JobResult(
            job_id=job.job_id,
            success=not failed,
            successful_keys=loaded or None,
            transfer_time=seconds,
            transfer_bytes=len(loaded) * self._chunks.layout.block_bytes,
        )
