"""Reprise as a secondary tier behind vLLM's host memory, for engines on GPUs.

vLLM copies chunks of KV between GPU and a shared memory region. This tier moves them between that region and the node, on
native threads: through extents of the node's devices where the agent lends them, and through its arena. Configure it in vLLM (0.33)::

    --kv-transfer-config '{
        "kv_connector": "RepriseOffloadingConnector", "kv_connector_module_path": "reprise.vllm.offloading",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184,
            "secondary_tiers": [
                {"type": "RepriseTier", "module_path": "reprise.vllm.tier", "socket": "/run/reprise/agent.sock"}]}}'

The options are in :class:`reprise.vllm.options.TierOptions`. The tier runs in the scheduler's process. Its calls wait at
most ``match_budget_ms`` per step, and every job ends regardless of the agent's state. vLLM's CPU backend does not support
offloading: use :class:`reprise.vllm.RepriseConnector` there.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
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
from reprise.extent_log import ExtentLog
from reprise.kv_hints import Priority
from reprise.recompute import LoadChooser, Prefill, counts_of
from reprise.repeated_log import RepeatedLog
from reprise.vllm import chunks
from reprise.vllm.block_commands import BlockCommand, BlockCommands
from reprise.vllm.lookups import Lookups, RequestLookups
from reprise.vllm.match_calls import Matcher
from reprise.vllm.metrics import BUCKETS, COUNTERS, TIMES
from reprise.vllm.options import TierOptions
from reprise.vllm.request_params import RequestParams
from reprise.vllm.waiting_chunks import WaitingRequests

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

logger = logging.getLogger("reprise")

PRIORITIES: tuple[Priority, ...] = ("low", "normal", "high")
"""Eviction priorities from the one that is evicted first."""

DRAIN_ROUND_S = 5.0
"""Seconds between log lines of a drain that is still waiting."""


class Counts:
    """Statistics since the last collection, in the format of vLLM's offloading."""

    def __init__(self) -> None:
        self._stats = OffloadingConnectorStats()

    def add(self, name: str, count: int) -> None:
        """Adds to a counter."""
        if count:
            self._stats.increase_counter(f"vllm:reprise_{name}", count)

    def sample(self, name: str, seconds: float) -> None:
        """Records a duration."""
        self._stats.observe_histogram(f"vllm:reprise_{name}", seconds)

    def take(self) -> OffloadingConnectorStats | None:
        """Returns and clears the statistics; None if they are empty."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, OffloadingConnectorStats()
        return taken


@dataclass(frozen=True)
class RequestChunks:
    """Full chunks of a request, which vLLM does not pass to a tier."""

    position: Callable[[OffloadKey], int | None]
    """Returns the number of chunks before one of the request's; None if it is not one."""
    count: Callable[[], int]
    keys: Callable[[int, int], Sequence[OffloadKey]]
    """Returns the keys of the chunks from one number to another."""
    prompt_tokens: int
    priority: Priority
    """Eviction priority that follows from vLLM's priority of the request."""


@dataclass
class TierRequest:
    """A request of vLLM's offloading."""

    params: RequestParams
    chunks: RequestChunks | None = None
    """None without RepriseOffloadingConnector."""
    jobs: int = 0
    """Number of running jobs."""
    is_ended: bool = False


@dataclass(frozen=True)
class Job:
    """A running job of vLLM's offloading."""

    job_id: int
    request_id: str
    keys: tuple[OffloadKey, ...]
    since: float


class RepriseTier(SecondaryTierManager):
    """Stores vLLM's chunks in Reprise and loads them from it.

    Raises:
        ValueError: the configuration is not supported; the message has the remedy.
        Version, Forbidden, BadRequest: the agent rejects this engine; the message has the remedy.
    """

    medium: ClassVar[Medium] = Medium.STORAGE
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED
    """Unspecified, because a chunk may come from DRAM or NVMe of any node."""

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
        """Results of ended jobs that were not returned yet."""
        self._errors = RepeatedLog("some chunks were not loaded or stored")
        self._refusals = RepeatedLog("a job of vLLM's offloading was rejected")
        self._ignored = RepeatedLog("KV hints were ignored")
        self._session = options.session(self._chunks.namespace, self._chunks.layout, "vllm-tier")
        self._transfers: Transfers | None = Transfers(
            self._session,
            memory,
            load_deadline=options.load_deadline_ms / 1e3,
            load_stall=options.load_stall_ms / 1e3,
            load_standstill=options.load_standstill_ms / 1e3,
            save_stall=options.save_stall_ms / 1e3,
            extents=options.extents,
        )
        self._extents = ExtentLog(logging.getLogger("vllm.reprise"))
        matcher = Matcher(self._session, options, self._counts)
        tokens, size = self._chunks.layout.tokens_per_block, self._chunks.layout.block_bytes
        self._chooser = LoadChooser.create(options, tokens, size, self._counts)
        choose = None if self._chooser is None else self._choose
        self._lookups = Lookups(matcher, self._keys, choose)
        self._requests: dict[str, TierRequest] = {}
        self._commands = BlockCommands(self._session)
        self._computing: set[str] = set()
        """Requests that compute, if RepriseOffloadingConnector passes the steps."""
        self.waiting = WaitingRequests(matcher, self._keys) if options.lookahead else None
        """Requests that wait, to which RepriseOffloadingConnector adds; None: no hints."""

    # Look-ups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Looks up a chunk; RETRY means that the answer is pending."""
        if not self._chunks.is_ours(key):
            return LookupResult.MISS
        return self._lookups.lookup(req_context.req_id, key)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Reads the parameters and hints of a request; its chunks are stored as soon as they are full."""
        params = RequestParams.read(req_context.kv_transfer_params, req_context.kv_hints, self._counts)
        self._requests[req_context.req_id] = TierRequest(params)
        self._lookups.begin_request(req_context.req_id, params)
        return RequestOffloadingContext()

    def note_request(self, request_id: str, given: RequestChunks) -> None:
        """Records the chunks and the priority of a new request, which vLLM does not pass to a tier."""
        request = self._requests.setdefault(request_id, TierRequest(RequestParams()))
        request.chunks = given
        if request.params.retains:
            request.params = replace(request.params, priority=given.priority)
        self._lookups.note_position(request_id, given.position)
        self._hint(request, "pin", "prefetch")

    def may_load(self, request_id: str) -> bool:
        """Returns whether chunks of a request may be loaded."""
        request = self._requests.get(request_id)
        return request is None or bool(request.params.sources)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Drops the look-ups of a request, and executes its hints for all of its chunks after its jobs."""
        self._lookups.end_request(req_context.req_id)
        if (request := self._requests.get(req_context.req_id)) is not None:
            request.is_ended = True
            self._end_if_done(req_context.req_id, request)
        self._computing.discard(req_context.req_id)
        if self._chooser is not None and not self._computing:
            self._chooser.pause()

    def note_prefix(self, request_id: str, tokens: int) -> None:
        """Records the number of a request's tokens that vLLM has on the GPU."""
        if self._chooser is not None:
            self._lookups.note_prefix(request_id, tokens)

    def note_step(self, computing: Collection[str], prefill: Prefill, steps_ahead: int) -> None:
        """Measures the steps of vLLM's scheduler.

        Args:
            computing: requests that compute in the step that begins.
            prefill: tokens of prompts that they compute.
            steps_ahead: number of steps that vLLM schedules ahead of the one that computes.
        """
        self._computing = set(computing)
        if self._chooser is not None:
            self._chooser.delay = steps_ahead
            self._chooser.step(prefill if computing else None)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Starts the matches of the keys of this step."""
        for request_id in context.preempted_req_ids:
            self._lookups.preempted(request_id)
        self._lookups.end_step()
        self._commands.take_counts(self._counts)

    # Jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Stores chunks; existing chunks are not stored again."""
        request = job_metadata.req_context.req_id
        parent = self._lookups.parent(request)
        packed = None if parent is None else self._keys([parent])
        keys = tuple(job_metadata.keys)
        position = self._lookups.position(request, keys[0]) if keys else None
        known = self._requests.get(request)
        if known is not None and not known.params.stores:
            # vLLM has no way to leave a tier out, so the job ends without a store.
            self._results.append(JobResult(job_id=job_metadata.job_id, success=True, transfer_bytes=0))
            return
        priority = "normal" if known is None else self._priority(known, position, len(keys))
        self._submit(
            job_metadata, lambda transfers, keys, chunks: transfers.save(keys, chunks, packed, position, priority)
        )
        if keys:
            self._lookups.note_stored(request, keys[-1])

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Loads chunks into vLLM's memory."""
        request = job_metadata.req_context.req_id
        limit = self._lookups.limit(request)
        if self._chooser is not None:
            sources = self._lookups.sources(request, job_metadata.keys)
            self._chooser.started(str(job_metadata.job_id), counts_of(sources))
        self._submit(job_metadata, lambda transfers, keys, chunks: transfers.load(keys, chunks, limit))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Returns the jobs that have ended since the last call, successful or not."""
        results, self._results = self._results, []
        if self._transfers is not None and self._jobs:
            for done in self._transfers.finished():
                self._extents.note(self._transfers)
                job = self._jobs.pop(done.id)
                results.append(self._ended(done, job))
                if (request := self._requests.get(job.request_id)) is not None:
                    request.jobs -= 1
                    self._end_if_done(job.request_id, request)
        return results

    def drain_jobs(self) -> None:
        """Waits until every job has ended; each job ends within its own timeout.

        vLLM drains a tier only when it resets its caches, so weights may have changed. From then on this engine does not
        share chunks with other engines: it cannot know which of them have the new weights.
        """
        if self._transfers is not None:
            while self._jobs and not self._transfers.wait(list(self._jobs), DRAIN_ROUND_S):
                logger.warning("vLLM's cache reset waits for %s jobs of the Reprise tier", self._transfers.unfinished)
            self._results = list(self.get_finished_jobs())
        self._generation = uuid.uuid4().bytes
        self._lookups.invalidate()
        if self.waiting is not None:
            self.waiting.invalidate()

    def shutdown(self) -> None:
        """Ends threads and session, and releases vLLM's memory."""
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        self._commands.close()
        self._session.close()

    # Metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Returns the connector's metrics, under the same names."""
        definitions: dict[str, OffloadingMetricMetadata] = {
            f"vllm:reprise_{name}": OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()
        }
        for name, text in TIMES.items():
            definitions[f"vllm:reprise_{name}"] = OffloadingHistogramMetadata(documentation=text, buckets=BUCKETS)
        return definitions

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Returns the statistics since the last call."""
        return self._counts.take()

    def _choose(self, state: RequestLookups, sources: Sequence[int]) -> int:
        """Returns the number of leading chunks to load of those that were found."""
        assert self._chooser is not None
        prefix = state.prefix_tokens + len(state.sources) * self._chunks.layout.tokens_per_block
        if state.params.hints.fetches:
            state.limit = self._chooser.policy.limit(len(sources), prefix)
            return len(sources)
        decision = self._chooser.choose(sources, prefix, is_computing=bool(self._computing))
        state.limit = decision.limit
        return decision.blocks

    def _priority(self, request: TierRequest, position: int | None, count: int) -> Priority:
        """Returns the eviction priority of consecutive chunks: the highest of them, because a job has only one."""
        if request.chunks is None or position is None:
            # Ranges of hints need the position.
            hints = replace(request.params.hints, directives=())
            return hints.priority(0, 0, request.params.priority) if request.params.retains else request.params.priority
        blocks, tokens = range(position, position + count), self._chunks.layout.tokens_per_block
        runs = request.params.classes(blocks, tokens, request.chunks.prompt_tokens)
        return max((priority for _, priority in runs), key=PRIORITIES.index, default="normal")

    def _end_if_done(self, request_id: str, request: TierRequest) -> None:
        """Drops a request that has ended and has no jobs, and executes its hints for all of its chunks."""
        if request.is_ended and request.jobs == 0 and self._requests.get(request_id) is request:
            del self._requests[request_id]
            self._hint(request, "pin", "demote")

    def _hint(self, request: TierRequest, *actions: str) -> None:
        """Queues the commands of a request's hints with these actions."""
        commands = [command for command in request.params.hints.commands if command.action in actions]
        if not commands:
            return
        if request.chunks is None:
            self._counts.add("ignored_hints", len(commands))
            self._ignored.note("the keys of chunks are unknown: configure RepriseOffloadingConnector")
            return
        given, tokens = request.chunks, self._chunks.layout.tokens_per_block
        for command in commands:
            first, end = command.blocks(tokens, given.count(), given.prompt_tokens)
            self._commands.submit(
                BlockCommand(
                    command.action, lambda start, stop: self._keys(given.keys(start, stop)), first, end, command.ttl
                )
            )

    def _keys(self, offload_keys: Collection[OffloadKey]) -> bytes:
        return self._chunks.keys(offload_keys, self._generation)

    def _submit(self, job: TransferJob, submit: Any) -> None:
        keys = tuple(job.keys)
        try:
            if self._transfers is None:
                raise RuntimeError("the tier was shut down")
            number = submit(self._transfers, self._keys(keys), [int(chunk) for chunk in job.chunk_ids])
        except (RepriseError, RuntimeError, ValueError) as error:
            # vLLM continues without these chunks, as with a job that fails later.
            self._refusals.note(f"job {job.job_id}: {error}")
            self._results.append(JobResult(job_id=job.job_id, success=False))
            if self._chooser is not None:
                self._chooser.ended(str(job.job_id))
            self._lookups.missed(keys)
            return
        self._refusals.note(None)
        self._jobs[number] = Job(job.job_id, job.req_context.req_id, keys, time.monotonic())
        if (request := self._requests.get(job.req_context.req_id)) is not None:
            request.jobs += 1

    def _ended(self, done: Finished, job: Job) -> JobResult:
        self._errors.note(done.error)
        if done.kind == "load":
            return self._load_ended(done, job)
        seconds = time.monotonic() - job.since
        self._counts.sample("save_seconds", seconds)
        self._counts.add("saves", 1)
        self._counts.add("saved_blocks", done.committed)
        self._counts.add("saved_bytes", done.committed * self._chunks.layout.block_bytes)
        self._counts.add("extent_saved_blocks", done.by_extents)
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
        if self._chooser is not None:
            counts = counts_of(source for source, is_ok in zip(done.sources, done.ok, strict=True) if is_ok)
            self._chooser.measured(str(job.job_id), counts, done.ran)
            self._chooser.ended(str(job.job_id))
        loaded = tuple(key for key, is_ok in zip(job.keys, done.ok, strict=True) if is_ok)
        failed = [key for key, is_ok in zip(job.keys, done.ok, strict=True) if not is_ok]
        if failed:
            self._lookups.missed(failed)
        self._counts.sample("load_seconds", seconds)
        self._counts.add("loads", 1)
        self._counts.add("loaded_blocks", len(loaded))
        self._counts.add("extent_loaded_blocks", done.by_extents)
        self._counts.add("loaded_bytes", len(loaded) * self._chunks.layout.block_bytes)
        self._counts.add("failed_blocks", len(failed))
        return JobResult(
            job_id=job.job_id,
            success=not failed,
            successful_keys=loaded or None,
            transfer_time=seconds,
            transfer_bytes=len(loaded) * self._chunks.layout.block_bytes,
        )
