"""vLLM's connector interface; it delegates each call to the scheduler side or the worker side."""

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

from reprise import Source
from reprise.layer_reports import LayerReports
from reprise.vllm import geometry
from reprise.vllm.events import KvEvents
from reprise.vllm.identity import Handshake, model_name
from reprise.vllm.metadata import RepriseMetadata
from reprise.vllm.metrics import PromMetrics, Stats
from reprise.vllm.options import Options
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
"""vLLM's names for the sources of a block."""


def _events_are_wanted(config: VllmConfig) -> bool:
    return config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events


def _check_layerwise(config: VllmConfig, options: Options) -> None:
    """Rejects an engine in which layer-wise loads could cause a wrong answer."""
    if options.layerwise_loads and config.scheduler_config.async_scheduling:
        raise ValueError(
            f"{options.where}: layerwise_loads needs the result of a step before the next step is scheduled: set "
            "--no-async-scheduling, or remove layerwise_loads"
        )


class RepriseConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves KV blocks to Reprise and loads them from it.

    Raises:
        ValueError: the configuration is not supported; the message has the remedy.
        Version, Forbidden, BadRequest: the agent rejects this engine; the message has the remedy.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
            raise ValueError(
                'Reprise is a cache: blocks that it cannot load must be recomputed. Set "kv_load_failure_policy": "recompute" in '
                '--kv-transfer-config; with "fail", requests would fail when an agent restarts'
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
                session=options.session(blocks.namespace, blocks.layout, "vllm-scheduler"),
                may_load=transfer.is_kv_consumer,
                may_save=transfer.is_kv_producer,
                ranks=len(blocks.namespaces),
                events=KvEvents(blocks) if _events_are_wanted(vllm_config) else None,
                steps_ahead=int(bool(vllm_config.scheduler_config.async_scheduling)),
                by_priority=vllm_config.scheduler_config.policy == "priority",
            )
        else:
            session = options.session(blocks.namespace, blocks.layout, f"vllm-worker-{rank}")
            reports = LayerReports(session, options.model_id or model_name(vllm_config), blocks.layer_names)
            self._worker = WorkerSide(geometry=blocks, options=options, session=session, reports=reports)

    @property
    def requires_kv_delivery(self) -> bool:
        """Returns False: a dropped save only causes a later miss."""
        return False

    def shutdown(self) -> None:
        """Ends the session with the agent."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # Scheduler's side

    def on_new_request(self, request: Request) -> None:
        """Starts the match of a new request."""
        self._scheduling().begin(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns the number of loadable tokens beyond ``num_computed_tokens``, and whether they are loaded between steps.

        The number is None while the match is pending.
        """
        return self._scheduling().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plans the load of a request whose blocks were allocated."""
        self._scheduling().allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Returns the number of loaded tokens by source."""
        tokens = self._scheduling().geometry.block_tokens
        sources: dict[CacheHitSource, int] = {}
        for source, blocks in Counter(self._scheduling().hit_sources(request)[: num_external_tokens // tokens]).items():
            kind = HIT_SOURCES[Source(source)]
            sources[kind] = sources.get(kind, 0) + blocks * tokens
        return sources

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Returns the loads and saves of this step for the workers."""
        return self._scheduling().step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Processes the loads and saves that workers have finished."""
        self._scheduling().handle_worker_output(connector_output)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Takes vLLM's block pool, whose blocks are referenced while they are saved."""
        self._scheduling().pool = gpu_block_pool

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Records the end of a request; pending saves have their own references to its blocks."""
        self._scheduling().finish(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Like :meth:`request_finished`."""
        self._scheduling().finish(request)
        return False, None

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Checks that workers and scheduler derive the same keys.

        Raises:
            ValueError: the keys differ; the message has the remedy.
        """
        namespaces = self._scheduling().geometry.namespaces
        Handshake.check(metadata, {rank: namespace.digest for rank, namespace in enumerate(namespaces)})

    def reset_cache(self) -> bool | None:
        """Invalidates all earlier saves, because the weights have changed."""
        if self._scheduler is not None:
            self._scheduler.invalidate()
        return True

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Returns the events of blocks saved to Reprise since the last call."""
        events = self._scheduling().events
        return events.take() if events is not None else ()

    def has_pending_block_frees(self) -> bool:
        """Returns whether pending saves will free blocks."""
        return self._scheduling().saves_hold_blocks()

    def has_pending_push_work(self) -> bool:
        """Returns whether the engine must keep stepping to process the end of pending loads and saves.

        vLLM keeps stepping by itself for requests that wait for loads, but not for aborted ones, whose blocks stay
        allocated until their transfers end.
        """
        return self._scheduling().has_pending_transfers()

    # Worker's side

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Returns this worker's namespace."""
        return Handshake(self._working().geometry.namespace.digest)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers vLLM's KV memory."""
        self._working().register(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submits the loads of this step."""
        self._working().start_loads(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for a layer of this step's layer-wise loads, and notes that its computation begins."""
        worker, metadata = self._working(), self._metadata()
        if self._is_layerwise:
            worker.begin_layer(layer_name, metadata)
        worker.note_layer(layer_name, metadata)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Makes a computed layer available to this step's layer-wise saves."""
        if self._is_layerwise:
            self._working().end_layer(layer_name)

    def wait_for_save(self) -> None:
        """Submits the saves of this step; their blocks stay referenced until the saves end."""
        # vLLM also calls this while an exception of the forward pass propagates; the blocks are then undefined.
        self._working().end_step(self._metadata(), is_complete=sys.exception() is None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the requests whose loads have ended."""
        return KVConnectorTransferResults(finished_recving=self._working().loaded(is_idle=self._metadata().is_idle))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks whose load failed, so that vLLM computes them."""
        return self._working().take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Returns ended saves and loads for the scheduler side."""
        return self._working().take_worker_output()

    # Both sides

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Returns the statistics since the last call."""
        side = self._scheduler or self._working()
        return side.stats.take()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig | None) -> bool:
        """Returns False: the KV memory changes when the engine wakes up. vLLM 0.33 and later then reject sleep mode."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Returns whether vLLM must call the connector between layers even with CUDA graphs."""
        options = Options.read(extra_config)
        return options.layerwise_loads or options.layerwise_saves

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Builds statistics from data of another process."""
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Builds the Prometheus metrics of this connector."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler method was called on a worker connector"
        return self._scheduler

    def _working(self) -> WorkerSide:
        assert self._worker is not None, "a worker method was called on the scheduler connector"
        return self._worker

    def _metadata(self) -> RepriseMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RepriseMetadata)
        return metadata
