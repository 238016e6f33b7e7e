"""vLLM's OffloadingConnector with the model's identity in the configuration of its Reprise tiers.

vLLM passes only the model's name to a tier. This connector reads the other inputs of the keys (weights, revision, dtypes,
quantization, overrides, hash algorithm) from vLLM's configuration and adds them to the tiers' configuration. Its workers
also measure layers on the GPU and report them to the agent. Its scheduler passes the waiting requests to the tiers.
Everything else is vLLM's code.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, get_offload_block_hash, make_offload_key
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from reprise import Layout, Namespace, Session, TenantKeys
from reprise.layer_reports import Clock, GpuClock, HostClock, LayerReports
from reprise.vllm import geometry, identity
from reprise.vllm.computations import computation_of, prefill_of
from reprise.vllm.options import TierOptions
from reprise.vllm.request_params import priority_of
from reprise.vllm.tier import RepriseTier, RequestChunks
from reprise.vllm.waiting_chunks import MissingChunks, WaitingRequests

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

TIER_TYPE = "RepriseTier"

ENGINE_NAMES = ("type", "module_path")
"""Names in a tier's configuration that vLLM itself reads."""

COMPUTATION = "reprise_computation"
"""Attribute of vLLM's metadata with the computation of its step; workers get it with the metadata."""


class RepriseOffloadingConnector(OffloadingConnector):
    """vLLM's OffloadingConnector for Reprise tiers.

    Raises:
        ValueError: the configuration has no Reprise tier, or an unsupported one; the message has the remedy.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        geometry.check_prefixes(vllm_config, kv_cache_config)
        identify(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._steps_ahead = int(bool(vllm_config.scheduler_config.async_scheduling))
        self._is_by_priority = vllm_config.scheduler_config.policy == "priority"
        self._reports = layer_reports(vllm_config, kv_cache_config) if role == KVConnectorRole.WORKER else None

    def on_new_request(self, request: Request) -> None:
        """Passes a request that waits to the tiers."""
        super().on_new_request(request)
        rank = (request.priority, request.arrival_time) if self._is_by_priority else ()
        for tier in self._reprise_tiers():
            tier.note_request(
                request.request_id, request_chunks(self.scheduler, request, by_priority=self._is_by_priority)
            )
            if tier.waiting is not None and tier.may_load(request.request_id):
                tier.waiting.arrived(request.request_id, lambda: missing_chunks(self.scheduler, request), rank)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Removes a request from the queue of the tiers."""
        self._each_queue(lambda queue: queue.finished(request.request_id))
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Like :meth:`request_finished`."""
        self._each_queue(lambda queue: queue.finished(request.request_id))
        return super().request_finished_all_groups(request, block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Returns vLLM's metadata of this step with its computation."""
        metadata = super().build_connector_meta(scheduler_output)
        setattr(metadata, COMPUTATION, computation_of(scheduler_output))
        begun, preempted = scheduler_output.num_scheduled_tokens, scheduler_output.preempted_req_ids or ()
        manager = self.scheduler.manager
        assert isinstance(manager, TieringOffloadingManager)
        # Only a step looks up chunks. vLLM may hold the lock in the other calls.
        with manager.lock:
            self._each_queue(lambda queue: queue.step(begun, preempted))
            prefill = prefill_of(scheduler_output)
            for tier in self._reprise_tiers():
                tier.note_step(begun, prefill, self._steps_ahead)
        return metadata

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Passes the number of tokens on the GPU to the tiers."""
        for tier in self._reprise_tiers():
            tier.note_prefix(request.request_id, num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _reprise_tiers(self) -> list[RepriseTier]:
        manager = self.scheduler.manager
        assert isinstance(manager, TieringOffloadingManager)
        return [tier for tier in manager.secondary_tiers if isinstance(tier, RepriseTier)]

    def _each_queue(self, call: Callable[[WaitingRequests], None]) -> None:
        """Calls the queue of each Reprise tier with hints."""
        for tier in self._reprise_tiers():
            if tier.waiting is not None:
                call(tier.waiting)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Notes that the computation of a layer begins."""
        super().wait_for_layer_load(layer_name)
        if self._reports is not None:
            self._reports.begin_layer(layer_name, getattr(self._get_connector_metadata(), COMPUTATION, None))

    def wait_for_save(self) -> None:
        """Ends the step."""
        if self._reports is not None:
            idle = getattr(self._get_connector_metadata(), COMPUTATION, None) is None
            self._reports.end_step(is_idle=idle)
        super().wait_for_save()

    def shutdown(self) -> None:
        """Ends the session for reports, and vLLM's threads."""
        if self._reports is not None:
            self._reports.session.close()
        super().shutdown()


def missing_chunks(scheduler: OffloadingConnectorScheduler, request: Request) -> MissingChunks:
    """Returns a request's full chunks from the first one on that is not in vLLM's host memory."""
    manager = scheduler.manager
    assert isinstance(manager, TieringOffloadingManager)
    if request.skip_reading_prefix_cache:
        return MissingChunks(None, 0, lambda first, end: [])
    # The tier supports one group.
    (group,) = scheduler.config.kv_group_configs
    ends = range(group.hashes_per_chunk - 1, len(request.block_hashes), group.hashes_per_chunk)
    context, primary = ReqContext(req_id=request.request_id), manager.primary_tier

    def key(end: int) -> OffloadKey:
        return make_offload_key(request.block_hashes[end], group.group_idx)

    # vLLM evicts the end of a prompt first.
    start = bisect.bisect_left(ends, True, key=lambda end: primary.lookup(key(end), context) is LookupResult.MISS)
    missing = ends[start:]
    return MissingChunks(start, len(missing), lambda first, end: [key(at) for at in missing[first:end]])


def request_chunks(scheduler: OffloadingConnectorScheduler, request: Request, *, by_priority: bool) -> RequestChunks:
    """Returns the chunks and the priority of a request.

    Args:
        scheduler: vLLM's scheduler side.
        request: the request.
        by_priority: whether vLLM schedules by the priorities of requests; only then do they count.
    """
    (group,) = scheduler.config.kv_group_configs
    size = group.hashes_per_chunk

    def keys(first: int, end: int) -> list[OffloadKey]:
        # The key of a chunk is the hash of its last block.
        hashes = request.block_hashes[(first + 1) * size - 1 : end * size : size]
        return [make_offload_key(block_hash, group.group_idx) for block_hash in hashes]

    return RequestChunks(
        position=lambda key: chunk_position(scheduler, request, key),
        count=lambda: len(request.block_hashes) // size,
        keys=keys,
        prompt_tokens=request.num_prompt_tokens,
        priority=priority_of(request) if by_priority else "normal",
    )


def chunk_position(scheduler: OffloadingConnectorScheduler, request: Request, key: OffloadKey) -> int | None:
    """Returns the number of full chunks before one of a request's; None if it is not one."""
    (group,) = scheduler.config.kv_group_configs
    try:
        end = request.block_hashes.index(get_offload_block_hash(key))
    except ValueError:
        return None
    return end // group.hashes_per_chunk


def layer_reports(config: VllmConfig, kv_cache: KVCacheConfig) -> LayerReports:
    """Returns the reports of a worker, with a session of the first Reprise tier's agent."""
    tier = next(tier for tier in _tiers(config))
    options = TierOptions.read({name: value for name, value in tier.items() if name not in ENGINE_NAMES})
    # The session has no blocks, but an agent wants to know them.
    layout = Layout(layers=1, parts=1, kv_heads=1, head_dim=8, dtype="fp32", tokens_per_block=16)
    namespace = Namespace(
        model=options.model_id,
        revision="",
        layout=layout,
        hash_algorithm="",
        hash_seed="",
        engine_format="layer-reports",
        tenant=TenantKeys(options.tenant),
    )
    session = Session(
        options.socket,
        namespace,
        layout,
        token_file=options.token_file or None,
        name="vllm-layers",
    )
    names = [name for group in kv_cache.kv_cache_groups for name in group.layer_names]
    clock: Clock = GpuClock(torch.cuda) if torch.cuda.is_available() else HostClock()
    return LayerReports(session, options.model_id, names, clock)


def _tiers(config: VllmConfig) -> list[dict[str, Any]]:
    extra: dict[str, Any] = config.kv_transfer_config.kv_connector_extra_config
    return [tier for tier in extra.get("secondary_tiers", []) if tier.get("type") == TIER_TYPE]


def identify(config: VllmConfig) -> None:
    """Adds the model's identity to the tiers' configuration.

    Raises:
        ValueError: the configuration has no Reprise tier or another hash algorithm than the engine, or weights or adapters
            cannot be identified.
    """
    extra: dict[str, Any] = config.kv_transfer_config.kv_connector_extra_config
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ValueError(
            'Reprise is a cache: blocks that it cannot load must be recomputed. Set "kv_load_failure_policy": "recompute" in '
            "--kv-transfer-config"
        )
    tiers = _tiers(config)
    if not tiers or extra.get("spec_name") != "TieringOffloadingSpec":
        raise ValueError(
            'RepriseOffloadingConnector needs "spec_name": "TieringOffloadingSpec" and, in "secondary_tiers", {"type": '
            '"RepriseTier", "module_path": "reprise.vllm.tier", "socket": …} in kv_connector_extra_config'
        )
    algorithm = config.cache_config.prefix_caching_hash_algo
    for tier in tiers:
        if config.lora_config is not None and not tier.get("unchanging_adapters", False):
            raise ValueError(
                "secondary_tiers: RepriseTier cannot distinguish a LoRA adapter from a retrained one with the same name and path: "
                "remove --enable-lora, or use another name for each training and set unchanging_adapters to true"
            )
        if tier.setdefault("hash_algorithm", algorithm) != algorithm:
            raise ValueError(
                f"secondary_tiers: hash_algorithm {tier['hash_algorithm']!r} differs from the engine's {algorithm!r} "
                "(--prefix-caching-hash-algo): remove hash_algorithm, RepriseOffloadingConnector sets it"
            )
        tier.setdefault("model_id", identity.model_name(config))
        if "model_digest" not in tier:
            tier["model_digest"] = identity.model_digest(config, tier.get("weights_digest", ""))
