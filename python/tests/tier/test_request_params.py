"""Parameters and KV hints of requests in the tier, with vLLM's own tiering and a real agent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from faults import drop_dram, eventually, observer
from offloading import LONG_S, TOKENS, Offloading, chain
from test_configuration import closing, connector, vllm_config, weights
from test_lookahead import PATIENT, PROMPT
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ScheduleEndContext
from vllm.v1.request import Request

__all__ = ["closing", "weights"]

Make = Callable[..., Offloading]


def envelope(kind: str, **payload: Any) -> KvHintsEnvelope:
    """Returns vLLM's envelope of one action."""
    action = KvHintAction(action_id="a", action_type=kind, action_version="1.0", payload=payload)
    return KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=[action])


def request(name: str, hints: Any = None, params: dict[str, Any] | None = None, priority: int = 0) -> Request:
    """Returns a request of vLLM; all have the same prompt."""
    hash_blocks = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(hash_blocks)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(PROMPT * TOKENS + 5)),
        sampling_params=SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params} if params else None),
        pooling_params=None,
        block_hasher=get_request_block_hasher(TOKENS, hash_blocks),
        priority=priority,
        kv_hints=hints,
    )


def connected(engine: Make, cluster: Cluster, **options: Any) -> Offloading:
    offloading = engine(cluster.agents[0].socket, **PATIENT, **options)
    assert offloading.tier._session.wait_connected(LONG_S)
    return offloading


def test_chunks_of_requests_that_store_nothing_are_not_saved(cluster: Cluster, engine: Make) -> None:
    offloading, keys = connected(engine, cluster), chain(1, PROMPT)
    for params in ({"kv_no_store": True}, {"kv_store_tiers": []}):
        offloading.store(keys, params)
        offloading.clear_primary()
    assert "saves" not in offloading.counts()
    assert offloading.tier._requests == {}
    offloading.store(keys)
    offloading.clear_primary()
    assert offloading.counts()["saved_blocks"] == PROMPT
    assert offloading.find(keys) == PROMPT


def test_chunks_are_loaded_from_the_sources_that_a_request_allows(cluster: Cluster, engine: Make) -> None:
    offloading, keys = connected(engine, cluster), chain(1, PROMPT)
    offloading.store(keys)
    offloading.clear_primary()
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
    nothing = {"kv_load_tiers": []}
    remote = {"kv_load_tiers": [{"locality": "REMOTE"}]}
    assert offloading.find(keys, params=nothing) == 0
    assert "queries" not in offloading.counts()
    assert offloading.find(keys, params=remote) == 0
    assert offloading.find(keys, params={"kv_load_tiers": [{"medium": "STORAGE"}]}) == PROMPT


def test_invalid_parameters_and_hints_are_counted_and_change_nothing(cluster: Cluster, engine: Make) -> None:
    offloading, keys = connected(engine, cluster), chain(1, PROMPT)
    offloading.store(keys, {"kv_no_store": "yes", "kv_hints": {"protocol_version": "7"}})
    offloading.clear_primary()
    counts = offloading.counts()
    assert (counts["ignored_parameters"], counts["ignored_hints"]) == (1, 1)
    assert offloading.find(keys, params={"kv_hints": 7}) == PROMPT
    # vLLM's own connector does not pass the chunks of a request.
    pin = {"action_id": "a", "action_type": "kv.pin", "action_version": "1.0", "payload": {"ttl": 5}}
    offloading.find(keys, params={"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [pin]}})
    assert offloading.counts()["ignored_hints"] == 2


def test_a_preempted_request_finds_the_chunks_that_it_has_stored(cluster: Cluster, engine: Make) -> None:
    offloading, keys = connected(engine, cluster), chain(1, PROMPT)
    running = offloading.begin()

    def found() -> int:
        hits: list[int | None] = []

        def is_known() -> bool:
            offloading.step()
            hits.append(offloading.look_up(running, keys))
            return hits[-1] is not None

        eventually(is_known)
        return hits[-1] or 0

    assert found() == 0
    offloading.store(keys)
    offloading.clear_primary()
    assert found() == 0, "a verdict is valid until the request ends or is preempted"
    preempted = ScheduleEndContext(new_req_ids=(), preempted_req_ids=(running.req_id,))
    offloading.manager.on_schedule_end(preempted)
    eventually(lambda: found() == PROMPT)


def test_priorities_and_directives_decide_the_class_of_stored_chunks(weights: Path, closing: list[Any]) -> None:
    config = vllm_config(weights)
    config.scheduler_config.policy = "priority"
    made = connector(config)
    closing.append(made)
    tier: Any = made.scheduler.manager.secondary_tiers[0]  # type: ignore[attr-defined]

    def classes_of(name: str, position: int | None, count: int) -> str:
        return str(tier._priority(tier._requests[name], position, count))

    retain = envelope(
        "kv.retain", directives=[{"end": 2 * TOKENS, "priority": 9}, {"start": 4 * TOKENS, "priority": 0}]
    )
    for given in (
        request("first", priority=-1),
        request("last", priority=3),
        request("dropped", priority=-1, params={"kv_no_retain": True}),
        request("retained", hints=retain),
        request("shared", hints=envelope("kv.share")),
    ):
        made.on_new_request(given)
    classes = [classes_of(name, 0, 2) for name in ("first", "last", "dropped", "retained", "shared")]
    assert classes == ["high", "low", "low", "high", "high"]
    assert [classes_of("retained", *run) for run in ((2, 2), (4, 2), (3, 2), (None, 2))] == [
        "normal",
        "low",
        "normal",
        "normal",
    ]


@pytest.mark.parametrize(
    ("hint", "statistic", "expected"),
    [
        (envelope("kv.pin", ttl=60, end=2 * TOKENS), "retention_pinned_blocks", 2),
        (envelope("kv.demote"), "dram_blocks", 0),
    ],
)
def test_hints_change_the_chunks_of_a_request_after_their_stores(
    hint: Any, statistic: str, expected: int, weights: Path, cluster: Cluster, closing: list[Any]
) -> None:
    made = connector(vllm_config(weights, cluster.agents[0].socket, **PATIENT))
    closing.append(made)
    manager: Any = made.scheduler.manager
    tier = manager.secondary_tiers[0]
    assert tier._session.wait_connected(LONG_S)
    made.on_new_request(request("hinted", hint))
    context = made.scheduler._req_status["hinted"].req_context
    keys = tier._requests["hinted"].chunks.keys(0, PROMPT)
    prepared = manager.prepare_store(keys, context)
    manager.complete_store(prepared.keys_to_store, context)
    manager.on_request_finished(context)
    with observer(cluster.agents[0]) as agent:

        def is_done() -> bool:
            manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
            return tier._requests == {} and bool(agent.stats()[statistic] == expected)

        eventually(is_done)
        stats = agent.stats()
        assert stats["nvme_blocks"] + stats["dram_blocks"] >= PROMPT, "the chunks are still on the node"
