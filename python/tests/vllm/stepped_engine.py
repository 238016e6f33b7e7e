"""vLLM's own scheduler and block pool, a worker's calls in vLLM's own order and both sides of the connector, stepped
with a real agent.

The tests replace the forward pass. As with attention, the values at a position depend on every byte before it, so
reading an incomplete block makes all later values and the token wrong.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Agent
from engine import connector
from engine_model import VOCABULARY
from faults import drop_dram, observer
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from reprise import Client, KvMemory, block_keys
from reprise.vllm.metadata import RepriseMetadata
from reprise.vllm.options import Options

TOKENS, BLOCKS, LAYERS, HEADS, HEAD_SIZE = 32, 64, 4, 4, 32
ROW = HEADS * 2 * HEAD_SIZE
"""Elements of a layer per token."""

MODULUS = 65_521
"""Limit of values, so that their sums are exact."""

UNWRITTEN = 3.0
"""Value of memory that is unwritten since the cache was cleared."""

PAGE = 4096
"""Bytes of a page; the first page of a block's layer is unique."""

LONG_S = 60.0
"""Timeout that only a hang exceeds."""


def values(tokens: Sequence[int], start: int, total: int, layer: int) -> tuple[list[int], int]:
    """Returns a layer's values at the positions from ``start`` on, and the sum of its values.

    Args:
        tokens: tokens of the whole prompt.
        start: first computed position.
        total: sum of the layer's values before it.
        layer: number of the layer.
    """
    computed = []
    for position in range(start, len(tokens)):
        value = (31 * total + 7 * tokens[position] + position + layer) % MODULUS
        computed.append(value)
        total += value * ROW
    return computed, total


def token_after(sums: Sequence[int]) -> int:
    """Returns the token that follows from the sums of the layers."""
    return 3 + sum(sums) % (VOCABULARY - 3)


def expected(prompt: Sequence[int], max_tokens: int = 1) -> list[int]:
    """Returns the answer of an engine that computes everything."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(token_after([values(tokens, 0, 0, layer)[1] for layer in range(LAYERS)]))
    return tokens[len(prompt) :]


def block_of(tokens: Sequence[int], number: int, layer: int) -> torch.Tensor:
    """Returns a layer's values in a block of a prompt, ``[heads, tokens, content]``."""
    end = (number + 1) * TOKENS
    computed, _ = values(tokens[:end], 0, 0, layer)
    rows = torch.tensor(computed[-TOKENS:], dtype=torch.float32)
    return rows.view(1, TOKENS, 1).expand(HEADS, TOKENS, 2 * HEAD_SIZE).contiguous()


def layer_names() -> list[str]:
    """Returns the layers' names in vLLM's format, in order."""
    return [f"layer.{layer}" for layer in range(LAYERS)]


def kv_cache(*others: KVCacheSpec) -> KVCacheConfig:
    """Returns vLLM's resolved configuration of KV memory: one group of full attention, or the given groups."""
    attention = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
    groups = [KVCacheGroupSpec(layer_names(), spec) for spec in others or (attention,)]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def engine_config(weights: Path, transfer: dict[str, Any], sequences: int = 4) -> VllmConfig:
    """Returns vLLM's own configuration of a small engine with a connector."""
    config = VllmConfig(
        model_config=ModelConfig(model=str(weights), skip_tokenizer_init=True, dtype="float32", max_model_len=1024),
        cache_config=CacheConfig(block_size=TOKENS, prefix_caching_hash_algo="sha256_cbor"),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=1024, max_num_seqs=sequences, max_model_len=1024, is_encoder_decoder=False
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**transfer),
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


class SteppedEngine:
    """Scheduler and worker of an engine in one process, run step by step."""

    def __init__(self, weights: Path, agent: Agent, sequences: int = 4, **options: Any) -> None:
        self.config = engine_config(weights, connector(agent.socket, **options), sequences)
        self.agent = agent
        self.names = layer_names()
        cache = kv_cache()
        self.scheduler = Scheduler(self.config, cache, StructuredOutputManager(self.config), block_size=TOKENS)
        self.worker: Any = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, cache)
        self.memory = [torch.full((BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE), UNWRITTEN) for _ in self.names]
        self.worker.register_kv_caches(dict(zip(self.names, self.memory, strict=True)))
        self.connector: Any = self.scheduler.connector
        self.computed: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        """Computed positions of each request, one range per step."""
        hash_blocks = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_blocks)
        self._hasher = get_request_block_hasher(TOKENS, hash_blocks)
        self._requests = 0
        for side in (self.connector._scheduler, self.worker._worker):
            assert side.session.wait_connected(LONG_S)
        self.free_at_first = self.free_blocks

    @property
    def free_blocks(self) -> int:
        """Number of free blocks."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, prompt: list[int], max_tokens: int = 1) -> Request:
        """Adds a request."""
        self._requests += 1
        request = Request(
            request_id=f"request-{self._requests}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> SchedulerOutput:
        """Runs the scheduler's half of a step."""
        return self.scheduler.schedule()

    def work(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs the worker's half of a step."""
        names = list(output.num_scheduled_tokens)
        tokens: list[list[int]] = []
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as connector_output,
        ):
            if names:
                tokens = self._forward(output)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=connector_output,
        )

    def end(self, output: SchedulerOutput) -> None:
        """Completes a scheduled step."""
        self.scheduler.update_from_output(output, self.work(output))

    def step(self) -> None:
        """Runs a step."""
        self.end(self.schedule())

    def step_until(self, holds: Callable[[], bool]) -> None:
        """Steps until the condition is true."""
        deadline = time.monotonic() + LONG_S
        while not holds():
            assert time.monotonic() < deadline, "the condition did not become true in time"
            self.step()
            time.sleep(0.001)

    def finish(self) -> None:
        """Steps while the scheduler has requests, as vLLM's engine does."""
        self.step_until(lambda: not self.scheduler.has_requests())

    def abort(self, request: Request) -> None:
        """Aborts a request, as for a disconnected client."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def clear_cache(self, *, preempt: bool = False) -> None:
        """Clears the prefix cache and overwrites the memory.

        Args:
            preempt: whether running requests are preempted.
        """
        assert self.scheduler.reset_prefix_cache(reset_running_requests=preempt)
        for layer in self.memory:
            layer.fill_(UNWRITTEN)

    def serve_and_save(self, prompt: list[int]) -> None:
        """Serves a prompt until it is saved, and clears the cache."""
        self.add(prompt)
        self.finish()
        self.clear_cache()

    def scheduled_load(self, request: Request) -> SchedulerOutput:
        """Steps until a step loads a request's blocks, and returns this step."""
        deadline = time.monotonic() + LONG_S
        while True:
            output = self.schedule()
            if request.request_id in {plan.request_id for plan in metadata_of(output).loads}:
                return output
            assert time.monotonic() < deadline, "no load of this request was scheduled"
            self.end(output)

    def check_nothing_is_held(self) -> None:
        """Checks that no state of a request is left on either side."""
        assert self.free_blocks == self.free_at_first
        assert self.scheduler.requests == {}
        scheduler, worker = self.connector._scheduler, self.worker._worker
        assert (scheduler._requests, scheduler._pinned, scheduler._pinned_blocks, scheduler._loading) == ({}, {}, 0, {})
        assert (worker._loading, worker._saving) == ({}, {})
        assert worker._transfers.unfinished == 0

    def cached(self, request: Request) -> int:
        """Returns how many blocks of a request vLLM would reuse, and checks their contents."""
        pool = self.scheduler.kv_cache_manager.block_pool
        found = 0
        for number, block_hash in enumerate(request.block_hashes):
            for block in pool.get_cached_block(block_hash, [0]) or []:
                for layer, memory in enumerate(self.memory):
                    wanted = block_of(request.all_token_ids, number, layer)
                    assert torch.equal(memory[block.block_id], wanted), f"block {number}, layer {layer}"
                found += 1
        return found

    def saved(self, request: Request) -> list[bool]:
        """Returns which blocks of a request another engine would load, and checks their contents."""
        geometry = self.worker._worker.geometry
        keys = block_keys(geometry.namespace, request.block_hashes)
        count = len(request.block_hashes)
        memory = [torch.full((count, HEADS, TOKENS, 2 * HEAD_SIZE), UNWRITTEN) for _ in range(LAYERS)]
        with Client(self.agent.socket, geometry.namespace, geometry.layout, timeout=LONG_S) as client:
            loaded = client.load(keys, KvMemory(memory, geometry.layout), range(count), deadline=LONG_S / 2)
        for number in range(count):
            for layer in range(LAYERS):
                wanted = block_of(request.all_token_ids, number, layer)
                assert not loaded.ok[number] or torch.equal(memory[layer][number], wanted), f"block {number}"
        return list(loaded.ok)

    def close(self) -> None:
        """Shuts both sides down."""
        self.worker.shutdown()
        self.scheduler.shutdown()

    def _forward(self, output: SchedulerOutput) -> list[list[int]]:
        """Computes blocks layer by layer with the connector's hooks, and returns the tokens."""
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sums: dict[str, list[int]] = {name: [] for name in output.num_scheduled_tokens}
        for layer, name in enumerate(self.names):
            self.worker.wait_for_layer_load(name)
            for request_id, count in output.num_scheduled_tokens.items():
                sums[request_id].append(self._compute(request_id, starts[request_id], count, layer))
            self.worker.save_kv_layer(name, self.memory[layer], None)
        answers = []
        for request_id, count in output.num_scheduled_tokens.items():
            end = starts[request_id] + count
            self.computed[request_id].append((starts[request_id], end))
            is_last = end >= self.scheduler.requests[request_id].num_tokens
            answers.append([token_after(sums[request_id])] if is_last else [])
        return answers

    def _compute(self, request_id: str, start: int, count: int, layer: int) -> int:
        """Computes positions of a layer from its blocks, and returns the sum of all its values."""
        memory = self.memory[layer]
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        total = 0
        if start:
            rows = torch.cat([memory[block] for block in blocks[: -(-start // TOKENS)]], dim=1)
            total = int(rows[:, :start].double().sum())
        tokens = self.scheduler.requests[request_id].all_token_ids[: start + count]
        computed, total = values(tokens, start, total, layer)
        for position, value in enumerate(computed, start):
            memory[blocks[position // TOKENS], :, position % TOKENS] = value
        return total


def metadata_of(output: SchedulerOutput) -> RepriseMetadata:
    """Returns the connector's metadata of a step."""
    metadata = output.kv_connector_metadata
    assert isinstance(metadata, RepriseMetadata)
    return metadata


def lose(output: SchedulerOutput, request: Request, number: int) -> None:
    """Makes the load of a block fail, by replacing it with an unsaved one."""
    loads = metadata_of(output).loads
    (at,) = [at for at, plan in enumerate(loads) if plan.request_id == request.request_id]
    hashes = list(loads[at].hashes)
    hashes[number] = b"this was never saved".ljust(32)
    loads[at] = replace(loads[at], hashes=tuple(hashes))


def spoil(agent: Agent, tokens: Sequence[int], number: int) -> None:
    """Drops an agent's DRAM and damages a block of a prompt on its NVMe."""
    with observer(agent) as seen:
        drop_dram(seen)
    page = block_of(tokens, number, LAYERS // 2).numpy().tobytes()[:PAGE]
    at = agent.pool.read_bytes().index(page)
    with agent.pool.open("r+b") as device:
        device.seek(at)
        device.write(bytes(byte ^ 1 for byte in page))
        device.flush()
        os.fsync(device.fileno())


@contextlib.contextmanager
def stepped_engine(
    weights: Path, agent: Agent, patch: pytest.MonkeyPatch, sequences: int = 4, **options: Any
) -> Iterator[SteppedEngine]:
    """Creates an engine whose matches and loads wait while its agent is stopped, and that runs a number of sequences."""
    patch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    waits = ("match_budget", "match_deadline", "load_")
    patient = {option.name: LONG_S * 1e3 for option in fields(Options) if option.name.startswith(waits)}
    # Whether blocks are loaded must not depend on the speed of this machine.
    made = SteppedEngine(weights, agent, sequences, **{**patient, "load_or_recompute": False, **options})
    patch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", made.worker)
    try:
        yield made
    finally:
        made.close()
