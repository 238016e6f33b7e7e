"""A request that is aborted while its blocks are loaded or saved gives everything back.

vLLM's own scheduler and block pool, a worker's calls in vLLM's own order, both sides of the connector, a real agent; the forward pass is
the test's, which fills blocks with a token's worth of nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import MIB, Agent, Cluster
from engine import connector
from engine_model import model
from faults import eventually, freeze, observer, thaw
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
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

TOKENS, BLOCKS, LAYERS, HEADS, HEAD_SIZE = 32, 64, 4, 4, 32
PROMPT_BLOCKS = 8
LONG_S = 60.0
"""Nothing takes as long, unless it hangs."""


class Engine:
    """An engine's scheduler and worker in one process, a step at a time."""

    def __init__(self, weights: Path, agent: Agent, **options: Any) -> None:
        self.config = VllmConfig(
            model_config=ModelConfig(model=str(weights), skip_tokenizer_init=True, dtype="float32", max_model_len=1024),
            cache_config=CacheConfig(block_size=TOKENS, prefix_caching_hash_algo="sha256_cbor"),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=1024, max_num_seqs=4, max_model_len=1024, is_encoder_decoder=False
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(**connector(agent.socket, **options)),
        )
        self.config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
        names = [f"layer.{layer}" for layer in range(LAYERS)]
        cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])
        self.scheduler = Scheduler(self.config, cache, StructuredOutputManager(self.config), block_size=TOKENS)
        self.worker: Any = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, cache)
        self.worker.register_kv_caches({name: torch.zeros(BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE) for name in names})
        self.ours: Any = self.scheduler.connector
        hash_blocks = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_blocks)
        self._hasher = get_request_block_hasher(TOKENS, hash_blocks)
        self._requests = 0
        for side in (self.ours._scheduler, self.worker._worker):
            assert side.session.wait_connected(LONG_S)
        self.free_at_first = self.free_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody has."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, seed: int) -> Request:
        """A request of whole blocks and a tail."""
        self._requests += 1
        request = Request(
            request_id=f"request-{self._requests}",
            prompt_token_ids=[(seed * 1000 + token) % 500 for token in range(PROMPT_BLOCKS * TOKENS + 5)],
            sampling_params=SamplingParams(max_tokens=1, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> SchedulerOutput:
        """The scheduler's half of a step."""
        return self.scheduler.schedule()

    def work(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The worker's half."""
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as said,
        ):
            pass
        names = list(output.num_scheduled_tokens)
        tokens = [[7] if self._is_last(name, count) else [] for name, count in output.num_scheduled_tokens.items()]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=said,
        )

    def step(self) -> None:
        """A step."""
        output = self.schedule()
        self.scheduler.update_from_output(output, self.work(output))

    def rest(self) -> None:
        """Steps as long as vLLM's engine does: while the scheduler has something to do."""
        give_up = time.monotonic() + LONG_S
        while self.scheduler.has_requests():
            assert time.monotonic() < give_up, "the scheduler does not come to rest"
            self.step()
            time.sleep(0.001)

    def abort(self, request: Request) -> None:
        """As the client does that is gone."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def check_nothing_is_held(self) -> None:
        """Nothing of any request is left, on either side."""
        assert self.free_blocks == self.free_at_first
        assert self.scheduler.requests == {}
        ours, worker = self.ours._scheduler, self.worker._worker
        assert (ours._requests, ours._pinned, ours._pinned_blocks, ours._loading) == ({}, {}, 0, {})
        assert (worker._loading, worker._saving) == ({}, {})
        assert worker._transfers.unfinished == 0

    def close(self) -> None:
        """Ends both sides."""
        self.worker.shutdown()
        self.scheduler.shutdown()

    def _is_last(self, name: str, count: int) -> bool:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_tokens


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A member and an agent, which are killed here."""
    made = Cluster(tmp_path / "cluster", arena=64 * MIB, pool=128 * MIB)
    yield made
    made.stop()


@pytest.fixture
def stepped(own_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine whose loads wait for as long as its agent is stopped."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    patient = {
        f"{name}_ms": LONG_S * 1e3
        for name in ("match_budget", "match_deadline", "load_deadline", "load_stall", "load_standstill")
    }
    made = Engine(model(tmp_path / "model"), own_cluster.agents[0], **patient)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", made.worker)
    yield made
    made.close()


def go_on(agent: Agent) -> None:
    """The agent answers what it was asked."""
    thaw(agent)


def end(agent: Agent) -> None:
    """The agent never answers, and another is there."""
    agent.restart()


@pytest.mark.parametrize("outcome", [go_on, end])
def test_a_request_that_is_aborted_while_it_is_loaded_gives_everything_back(
    stepped: Engine, own_cluster: Cluster, outcome: Callable[[Agent], None]
) -> None:
    (agent,) = own_cluster.agents
    stepped.add(1)
    stepped.rest()
    with observer(agent) as seen:
        eventually(lambda: seen.stats()["nvme_blocks"] >= PROMPT_BLOCKS)
    assert stepped.scheduler.reset_prefix_cache()
    loaded = stepped.add(1)
    output = stepped.schedule()
    assert loaded.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    freeze(agent)
    # The load is submitted to an agent that does not answer.
    stepped.scheduler.update_from_output(output, stepped.work(output))
    stepped.abort(loaded)
    for _ in range(3):
        stepped.step()
    assert stepped.free_blocks <= stepped.free_at_first - PROMPT_BLOCKS, "a load still writes to these blocks"
    assert stepped.scheduler.has_requests(), "vLLM goes on until they are free"
    outcome(agent)
    stepped.rest()
    stepped.check_nothing_is_held()
    with observer(agent) as seen:
        eventually(lambda: seen.stats()["read_leases"] == 0)
    # And it is of use to the next.
    again = stepped.add(1)
    stepped.rest()
    assert again.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert stepped.scheduler.reset_prefix_cache()
    stepped.check_nothing_is_held()


@pytest.mark.parametrize("outcome", [go_on, end])
def test_a_request_that_is_aborted_while_it_is_saved_gives_everything_back(
    stepped: Engine, own_cluster: Cluster, outcome: Callable[[Agent], None]
) -> None:
    (agent,) = own_cluster.agents
    saved = stepped.add(2)
    output = stepped.schedule()
    assert output.num_scheduled_tokens == {saved.request_id: saved.num_prompt_tokens}
    freeze(agent)
    result = stepped.work(output)
    stepped.abort(saved)
    stepped.scheduler.update_from_output(output, result)
    assert stepped.free_blocks == stepped.free_at_first - PROMPT_BLOCKS, (
        "the save still reads these, and no others are held"
    )
    assert stepped.scheduler.has_requests(), "vLLM goes on until they are free"
    outcome(agent)
    stepped.rest()
    stepped.check_nothing_is_held()
    with observer(agent) as seen:
        eventually(lambda: seen.stats()["reserved_bytes"] == 0)
    again = stepped.add(2)
    stepped.rest()
    assert again.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert stepped.scheduler.reset_prefix_cache()
    stepped.check_nothing_is_held()
