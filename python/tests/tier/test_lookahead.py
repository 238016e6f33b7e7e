"""Hints of the tier, with vLLM's own connector, tiering and requests and a real agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster import Cluster
from faults import drop_dram, eventually, observer
from offloading import LONG_S, TOKENS, Offloading, chain
from test_configuration import closing, connector, vllm_config, weights
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

__all__ = ["closing", "weights"]

PROMPT = 6
PATIENT = {
    f"{name}_ms": LONG_S * 1e3
    for name in ("match_budget", "match_deadline", "load_deadline", "load_stall", "load_standstill", "save_stall")
}

Make = Callable[..., Offloading]


def request(name: str, seed: int = 1, tokens: int = PROMPT * TOKENS + 5) -> Request:
    """Returns a request of vLLM."""
    hash_blocks = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(hash_blocks)
    return Request(
        request_id=name,
        prompt_token_ids=[seed + token for token in range(tokens)],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(TOKENS, hash_blocks),
    )


def step(computing: tuple[str, ...], preempted: tuple[str, ...] = ()) -> SchedulerOutput:
    """Returns a step of vLLM's scheduler in which requests compute a token each."""
    return replace(
        SchedulerOutput.make_empty(),
        num_scheduled_tokens=dict.fromkeys(computing, 1),
        preempted_req_ids=set(preempted),
    )


def test_chunks_of_a_waiting_request_are_in_dram_before_their_look_up(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **PATIENT)
    assert offloading.tier._session.wait_connected(LONG_S)
    keys = chain(1, PROMPT)
    offloading.store(keys)
    offloading.clear_primary()
    queue = offloading.tier.waiting
    queue.arrived("running", lambda: [])
    queue.arrived("waits", lambda: keys)
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)

        def is_read() -> bool:
            offloading.step()
            queue.step(["running"], ())
            return bool(agent.stats()["prefetch_blocks"] == PROMPT)

        eventually(is_read)
        assert agent.stats()["hit_blocks_own_nvme"] == 0
        assert offloading.find(keys) == PROMPT
        stats = agent.stats()
        assert (stats["prefetch_used_blocks"], stats["hit_blocks_own_nvme"]) == (PROMPT, 0)
        assert (stats["prefetch_ignored_requests"], stats["prefetch_unknown_keys"]) == (0, 0)


def test_requests_wait_and_end_in_vllm_s_connector_and_the_tier_alike(
    weights: Path, cluster: Cluster, closing: list[Any]
) -> None:
    made = connector(vllm_config(weights, cluster.agents[0].socket, **PATIENT))
    closing.append(made)
    manager: Any = made.scheduler.manager
    tier = manager.secondary_tiers[0]
    assert tier._session.wait_connected(LONG_S)
    queue = tier.waiting.hints.queue
    requests = {name: request(name, seed) for seed, name in enumerate(("a", "b", "c"), 1)}
    for each in requests.values():
        made.on_new_request(each)
    assert [waiting.request_id for waiting in queue.head(9)] == ["a", "b", "c"]
    missing = tier.waiting._requests["a"].missing
    assert len(missing()) == PROMPT
    context = made.scheduler._req_status["a"].req_context
    prepared = manager.prepare_store(missing()[:2], context)
    manager.complete_store(prepared.keys_to_store, context)
    assert tier._transfers.wait(list(tier._jobs), LONG_S)
    assert len(missing()) == PROMPT - 2, "vLLM has the others in host memory"
    made.build_connector_meta(step(("a",)))
    assert [waiting.request_id for waiting in queue.head(9)] == ["b", "c"]
    made.build_connector_meta(step((), preempted=("a",)))
    assert [waiting.request_id for waiting in queue.head(9)] == ["a", "b", "c"]
    made.request_finished(requests["b"], [])
    assert [waiting.request_id for waiting in queue.head(9)] == ["a", "c"]


def test_vllm_s_steps_hint_a_prompt_that_is_only_on_nvme(weights: Path, cluster: Cluster, closing: list[Any]) -> None:
    writer, reader = (connector(vllm_config(weights, cluster.agents[0].socket, **PATIENT)) for _ in range(2))
    closing += [writer, reader]
    managers: list[Any] = [each.scheduler.manager for each in (writer, reader)]
    for manager in managers:
        assert manager.secondary_tiers[0]._session.wait_connected(LONG_S)
    prompt = request("prompt")
    writer.on_new_request(prompt)
    status = writer.scheduler._req_status["prompt"]
    keys = managers[0].secondary_tiers[0].waiting._requests["prompt"].missing()
    prepared = managers[0].prepare_store(keys, status.req_context)
    managers[0].complete_store(prepared.keys_to_store, status.req_context)
    managers[0].secondary_tiers[0]._transfers.wait(list(managers[0].secondary_tiers[0]._jobs), LONG_S)
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
        reader.on_new_request(request("running", seed=1000))
        waits = request("waits")
        reader.on_new_request(waits)

        def is_read() -> bool:
            reader.build_connector_meta(step(("running",)))
            return bool(agent.stats()["prefetch_blocks"] == PROMPT)

        eventually(is_read)
        assert agent.stats()["prefetch_staged_bytes"] > 0
        reader.request_finished(waits, [])

        def is_cancelled() -> bool:
            reader.build_connector_meta(step(("running",)))
            return bool(agent.stats()["prefetch_cancelled_requests"] == 1)

        eventually(is_cancelled)
        assert agent.stats()["prefetch_staged_bytes"] == 0


def test_without_lookahead_the_tier_has_no_queue(weights: Path, closing: list[Any]) -> None:
    made = connector(vllm_config(weights, lookahead=False))
    closing.append(made)
    manager: Any = made.scheduler.manager
    assert manager.secondary_tiers[0].waiting is None
    made.on_new_request(request("a"))
    made.build_connector_meta(SchedulerOutput.make_empty())
