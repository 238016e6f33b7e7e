"""Hints of the tier, with vLLM's own connector, tiering and requests and a real agent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from faults import drop_dram, eventually, observer
from offloading import LONG_S, TOKENS, Offloading, chain
from test_configuration import closing, connector, vllm_config, weights
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.request import Request

from reprise import Source
from reprise.lookahead import KEY_BYTES, Begun
from reprise.vllm.match_calls import Matcher
from reprise.vllm.options import TierOptions
from reprise.vllm.waiting_chunks import MissingChunks, WaitingRequests

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


def missing(keys: Sequence[OffloadKey], position: int | None = 0) -> MissingChunks:
    """Returns chunks that vLLM does not have, as its connector does."""
    return MissingChunks(position, len(keys), lambda first, end: keys[first:end])


@dataclass
class FakeMatch:
    """A match that the test answers."""

    keys: bytes
    position: int | None

    def poll(self, seconds: float) -> list[int]:
        return [Source.OWN_NVME] * (len(self.keys) // KEY_BYTES)


@dataclass
class FakeSession:
    """A session that records matches and sends no hints."""

    connected: bool = False
    suspected: bool = False
    sessions: int = 1
    matches: list[FakeMatch] = field(default_factory=list)

    def start_match(
        self, keys: bytes, local: bool = False, all_ranks: bool = False, position: int | None = None
    ) -> FakeMatch:
        self.matches.append(FakeMatch(keys, position))
        return self.matches[-1]


@dataclass
class FakeCounters:
    """Counters that count nothing."""

    def add(self, name: str, count: int) -> None: ...

    def sample(self, name: str, seconds: float) -> None: ...


def test_keys_of_waiting_chunks_are_derived_within_the_budget_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reprise.vllm.match_calls.KEYS_PER_PART", 3)
    session: Any = FakeSession()
    matcher = Matcher(session, TierOptions.read({"socket": "/none", "match_budget_ms": 10_000.0}), FakeCounters())
    derived: list[int] = []

    def pack(keys: Collection[OffloadKey]) -> bytes:
        derived.append(len(keys))
        matcher._budget_left = 0.0
        return b"".join(key[:KEY_BYTES] for key in keys)

    queue, keys = WaitingRequests(matcher, pack), chain(1, 7)
    queue.arrived("waits", lambda: missing(keys[2:], 2))
    for parts, matches in (([3], 0), ([3, 2], 0), ([3, 2], 1)):
        matcher.begin_step()
        queue._keys_ahead("waits", True)
        assert (derived, len(session.matches)) == (parts, matches)
    assert session.matches[0] == FakeMatch(b"".join(key[:KEY_BYTES] for key in keys[2:]), 2)
    assert queue._keys_ahead("waits", True) == session.matches[0].keys


def test_listed_blocks_begin_with_the_same_chunk_until_all_travel_again() -> None:
    session: Any = FakeSession()
    matcher = Matcher(session, TierOptions.read({"socket": "/none", "match_budget_ms": 10_000.0}), FakeCounters())
    queue, keys = WaitingRequests(matcher, lambda packed: b"".join(key[:KEY_BYTES] for key in packed)), chain(1, 7)
    packed = [key[:KEY_BYTES] for key in keys]
    first = 2

    def match() -> None:
        matcher.begin_step()
        queue._keys_ahead("a", True)

    queue.arrived("a", lambda: missing(keys[first:], first))
    match()
    # It begins before the answer to its match.
    assert queue._blocks_begun("a", 0) == b"".join(packed[2:])
    queue.hints._begun["a"] = begun = Begun(1, sent=5, confirmed=5)
    # After a preemption, the same chunks are missing, then fewer: the listed blocks stay.
    queue._requests["a"] = replace(queue._requests["a"], matched_at=None)
    first = 2
    match()
    match()
    assert (queue._blocks_begun("a", 3), begun.sent) == (b"".join(packed[5:]), 5)
    # vLLM has dropped its first chunks since.
    queue._requests["a"] = replace(queue._requests["a"], matched_at=None)
    first = 0
    match()
    assert queue._blocks_begun("a", 5) == b"", "not mixed with the former keys"
    assert (begun.sent, begun.confirmed) == (0, 0)
    assert queue._blocks_begun("a", 0) == b"".join(packed)
    begun.sent = begun.confirmed = 7
    queue.invalidate()
    assert (queue._blocks_begun("a", 0), begun.sent) == (b"", 0), "no key has the former weights"


def test_chunks_of_a_waiting_request_are_in_dram_before_their_look_up(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **PATIENT)
    assert offloading.tier._session.wait_connected(LONG_S)
    keys = chain(1, PROMPT)
    offloading.store(keys)
    offloading.clear_primary()
    queue = offloading.tier.waiting
    queue.arrived("running", lambda: missing([]))
    queue.arrived("waits", lambda: missing(keys))
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
    assert (missing().position, missing().count) == (0, PROMPT)
    context = made.scheduler._req_status["a"].req_context
    prepared = manager.prepare_store(missing().keys(0, 2), context)
    manager.complete_store(prepared.keys_to_store, context)
    assert tier._transfers.wait(list(tier._jobs), LONG_S)
    assert (missing().position, missing().count) == (2, PROMPT - 2), "vLLM has the others in host memory"
    places = [tier._lookups.position("a", key) for key in missing().keys(0, 2)]
    assert places == [2, 3]
    assert tier._lookups.position("a", chain(99, 1)[0]) is None, "a chunk of another prompt"
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
    keys = managers[0].secondary_tiers[0].waiting._requests["prompt"].missing().keys(0, PROMPT)
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
