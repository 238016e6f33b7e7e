"""The connector as vLLM knows it: which call goes to which side."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from reprise import Session, Source
from reprise.vllm import geometry
from reprise.vllm.events import KvEvents
from reprise.vllm.identity import Handshake
from reprise.vllm.metadata import RepriseMetadata
from reprise.vllm.metrics import PromMetrics, Stats
from reprise.vllm.options import Options
from reprise.vllm.ranks import RankSessions
from reprise.vllm.scheduler import SchedulerSide
from reprise.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

HIT_SOURCES = {
    Source.OWN_DRAM: CacheHitSource.HOST,
    Source.OWN_NVME: CacheHitSource.DISK,
    Source.PEER_DRAM: CacheHitSource.P2P,
    Source.PEER_NVME: CacheHitSource.P2P,
}
"""What vLLM calls the places where a block was found."""


def _events_are_wanted(config: VllmConfig) -> bool:
    return config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events


def _check_layerwise(config: VllmConfig, options: Options) -> None:
    """Refuses an engine in which layer-wise loads could let a wrong answer through."""
    if options.layerwise_loads and config.scheduler_config.async_scheduling:
        raise ValueError(
            f"{options.where}: layerwise_loads needs to know what has become of a step before the next one is scheduled: set "
            "--no-async-scheduling, or leave layerwise_loads out"
        )


def _session_of_all_ranks(blocks: geometry.Geometry, options: Options) -> Session | RankSessions:
    sessions: list[Session] = []
    try:
        for rank, namespace in enumerate(blocks.namespaces):
            sessions.append(options.session(namespace, namespace.layout, f"vllm-scheduler-{rank}"))
    except BaseException:
        for session in sessions:
            session.close()
        raise
    return sessions[0] if len(sessions) == 1 else RankSessions(tuple(sessions))


class RepriseConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV blocks in Reprise and loads them from there.

    Raises:
        ValueError: a configuration that cannot work, and what to do.
        Version, Forbidden, BadRequest: the agent is there and refuses this engine, and what to do.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
            raise ValueError(
                'Reprise is a cache: what it cannot bring is computed. Set "kv_load_failure_policy": "recompute" in '
                '--kv-transfer-config; with "fail" requests would end with an error when an agent restarts'
            )
        options = Options.read(transfer.kv_connector_extra_config)
        _check_layerwise(vllm_config, options)
        rank = 0
        if role == KVConnectorRole.WORKER:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

            rank = get_tensor_model_parallel_rank()
        blocks = geometry.read(vllm_config, kv_cache_config, options, rank)
        self._is_layerwise = options.layerwise_loads or options.layerwise_saves
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                geometry=blocks,
                options=options,
                session=_session_of_all_ranks(blocks, options),
                may_load=transfer.is_kv_consumer,
                may_save=transfer.is_kv_producer,
                ranks=vllm_config.parallel_config.tensor_parallel_size,
                events=KvEvents(blocks) if _events_are_wanted(vllm_config) else None,
            )
        else:
            session = options.session(blocks.namespace, blocks.layout, f"vllm-worker-{rank}")
            self._worker = WorkerSide(geometry=blocks, options=options, session=session)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, nothing more."""
        return False

    def shutdown(self) -> None:
        """Ends the session with the agent."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.session.close()

    # Scheduler's side

    def on_new_request(self, request: Request) -> None:
        """Notes a request and asks about it."""
        self._scheduling().begin(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``num_computed_tokens`` that can be loaded, and whether between steps; None: not known yet."""
        return self._scheduling().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM has made room."""
        self._scheduling().allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Where the tokens come from that are loaded."""
        tokens = self._scheduling().geometry.block_tokens
        sources: dict[CacheHitSource, int] = {}
        for source, blocks in Counter(self._scheduling().hit_sources(request)[: num_external_tokens // tokens]).items():
            kind = HIT_SOURCES[Source(source)]
            sources[kind] = sources.get(kind, 0) + blocks * tokens
        return sources

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What workers are to do in this step."""
        return self._scheduling().step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What workers have ended."""
        self._scheduling().workers_said(connector_output)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """vLLM's blocks, which are referenced while they are saved."""
        self._scheduling().pool = gpu_block_pool

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks that are being saved have a reference of their own."""
        self._scheduling().over(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`request_finished`."""
        self._scheduling().over(request)
        return False, None

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Checks that the workers name blocks as the scheduler does.

        Raises:
            ValueError: they do not, and what to do.
        """
        namespaces = self._scheduling().geometry.namespaces
        Handshake.check(metadata, {rank: namespace.digest for rank, namespace in enumerate(namespaces)})

    def reset_cache(self) -> bool | None:
        """The weights have changed: nothing that was saved before is loaded any more."""
        if self._scheduler is not None:
            self._scheduler.forget()
        return True

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What has been put into Reprise since the last call."""
        events = self._scheduling().events
        return events.take() if events is not None else ()

    def has_pending_block_frees(self) -> bool:
        """Whether blocks come free when saves end."""
        return self._scheduling().saves_hold_blocks()

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to go on for loads and saves to be noticed as ended. vLLM goes on by itself for requests that wait
        for loads, and not for those that were aborted meanwhile, whose blocks it keeps until then."""
        return self._scheduling().is_under_way()

    # Worker's side

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """How this worker names blocks."""
        return Handshake(self._working().geometry.namespace.digest)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes vLLM's memory."""
        self._working().register(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submits the loads of this step."""
        self._working().start_loads(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for a layer of the loads that belong to this step."""
        if self._is_layerwise:
            self._working().layer_begins(layer_name, self._metadata())

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Lets the saves of this step read a layer."""
        if self._is_layerwise:
            self._working().layer_ends(layer_name)

    def wait_for_save(self) -> None:
        """Submits the saves of this step; their blocks are referenced until they have ended."""
        # vLLM comes here also with the error of a forward pass: nobody knows what its blocks hold.
        self._working().end_step(self._metadata(), is_whole=sys.exception() is None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended."""
        return KVConnectorTransferResults(finished_recving=self._working().loaded(is_idle=self._metadata().is_idle))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute."""
        return self._working().take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Saves that have ended, loads that failed."""
        return self._working().take_said()

    # Both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What has happened since the last call."""
        side = self._scheduler or self._working()
        return side.stats.take()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig | None) -> bool:
        """No: the memory that was registered is another one when the engine wakes up. Asked by vLLM from 0.33 on, which then refuses."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Whether vLLM has to come by between layers, also where it replays graphs."""
        options = Options.read(extra_config)
        return options.layerwise_loads or options.layerwise_saves

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Statistics as they arrive in another process."""
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Metrics of this connector."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a call for the scheduler's side came to a worker's"
        return self._scheduler

    def _working(self) -> WorkerSide:
        assert self._worker is not None, "a call for a worker's side came to the scheduler's"
        return self._worker

    def _metadata(self) -> RepriseMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RepriseMetadata)
        return metadata
