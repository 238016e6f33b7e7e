"""vLLM's tiering stores in Reprise and loads from it, and no state of the agent costs it more than time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from faults import damage, drop_dram, eventually, freeze, observer, thaw
from offloading import CHUNK_BYTES, LONG_S, Offloading, chain
from vllm.v1.kv_offload.base import LookupResult

PROMPT = 8
"""Chunks of a prompt."""

BUDGET_S = 0.005
PATIENT = {
    "load_stall_ms": LONG_S * 1e3,
    "load_standstill_ms": LONG_S * 1e3,
    "load_deadline_ms": LONG_S * 1e3,
    "save_stall_ms": LONG_S * 1e3,
}
"""Where nothing is to be given up, however slow the machine is."""

ANSWERED = {**PATIENT, "match_deadline_ms": LONG_S * 1e3}
BUSY_MACHINE_S = 0.5
"""What other processes of a test machine may cost a call."""

Make = Callable[..., Offloading]


def connected(offloading: Offloading) -> None:
    """Waits until the tier has a session."""
    assert offloading.tier._session.wait_connected(LONG_S)


def stored(offloading: Offloading, seed: int, chunks: int = PROMPT) -> list[bytes]:
    """Stores a prompt's chunks, to their end."""
    keys = chain(seed, chunks)
    offloading.store(keys)
    offloading.settle()
    return keys


def test_what_was_stored_is_found_and_loaded_with_the_same_bytes(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    connected(offloading)
    keys = stored(offloading, 1)
    told = offloading.counted()
    assert (told["saves"], told["saved_blocks"], told["saved_bytes"]) == (1, PROMPT, PROMPT * CHUNK_BYTES)
    offloading.forget_primary()
    assert offloading.find(keys) == PROMPT
    told = offloading.counted()
    assert (told["loads"], told["loaded_blocks"], told["loaded_bytes"]) == (1, PROMPT, PROMPT * CHUNK_BYTES)
    assert len(told["load_seconds"]) == 1
    assert "failed_blocks" not in told


def test_another_engine_of_the_same_model_finds_it(cluster: Cluster, engine: Make) -> None:
    first = engine(cluster.agents[0].socket, **ANSWERED)
    connected(first)
    keys = stored(first, 1)
    second = engine(cluster.agents[0].socket, **ANSWERED)
    connected(second)
    assert second.find(keys) == PROMPT
    with_other_weights = engine(cluster.agents[0].socket, **{**ANSWERED, "model_digest": "weights-2"})
    connected(with_other_weights)
    assert with_other_weights.find(keys) == 0


def test_a_prompt_that_was_never_stored_is_a_miss(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    connected(offloading)
    stored(offloading, 1)
    assert offloading.find(chain(2, PROMPT)) == 0
    told = offloading.counted()
    assert (told["queries"], "loads" in told) == (1, False)


def test_a_prompt_whose_beginning_was_stored_is_found_so_far(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    connected(offloading)
    keys = stored(offloading, 1, chunks=5)
    offloading.forget_primary()
    assert offloading.find(chain(1, PROMPT)[:PROMPT]) == len(keys)


def test_vllm_is_told_to_retry_while_the_answer_is_under_way(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    connected(offloading)
    keys = stored(offloading, 1)
    offloading.forget_primary()
    request = offloading.begin()
    freeze(cluster.agents[0])
    assert offloading.tier.lookup(keys[0], request) is LookupResult.RETRY
    assert offloading.look(request, keys) is None
    offloading.step()
    for _ in range(3):
        assert {offloading.tier.lookup(key, request) for key in keys} == {LookupResult.RETRY}
        offloading.step()
    thaw(cluster.agents[0])

    def answered() -> bool:
        offloading.step()
        return offloading.tier.lookup(keys[0], request) is LookupResult.HIT

    eventually(answered, LONG_S)
    assert {offloading.tier.lookup(key, request) for key in keys} == {LookupResult.HIT}
    offloading.end(request)


def test_a_step_waits_once_for_its_budget_however_many_requests_ask(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    connected(offloading)
    requests = [offloading.begin() for _ in range(20)]
    freeze(cluster.agents[0])
    for request in requests:
        assert offloading.look(request, chain(3, PROMPT)) is None
    asked = 0
    while asked < len(requests):
        # Asking costs a step's budget as well.
        offloading.step()
        asked += offloading.counted().get("queries", 0)
    started = time.monotonic()
    for request in requests:
        assert offloading.look(request, chain(3, PROMPT)) is None
    assert time.monotonic() - started < BUDGET_S + BUSY_MACHINE_S
    thaw(cluster.agents[0])

    def are_known() -> bool:
        offloading.step()
        return all(offloading.look(request, chain(3, PROMPT)) is not None for request in requests)

    eventually(are_known)
    assert len(offloading.counted()["match_seconds"]) == len(requests), "one for each, however often it was looked at"


def test_a_step_costs_its_budget_however_many_prompts_are_to_be_asked_about(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    connected(offloading)
    freeze(cluster.agents[0])
    steps = []
    for number in range(3):
        for prompt in range(100):
            request = offloading.begin()
            for key in chain(1000 * number + prompt, 1024):
                offloading.tier.lookup(key, request)
        started = time.monotonic()
        offloading.tier.on_schedule_end(None)
        steps.append(time.monotonic() - started)
    assert min(steps) < 10 * BUDGET_S, steps
    thaw(cluster.agents[0])

    def is_answered() -> bool:
        """Whether the last prompt has had its turn."""
        offloading.step()
        return offloading.tier.lookup(chain(2099, 1)[0], request) is LookupResult.MISS

    eventually(is_answered, LONG_S)


def test_why_chunks_are_not_stored_is_logged_once(
    tmp_path: Path, engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    offloading = engine(tmp_path / "nobody.sock")
    eventually(lambda: offloading.tier._session.last_error is not None, LONG_S)
    for seed in range(3):
        stored(offloading, seed, chunks=2)
    said = [record.getMessage() for record in caplog.records if "whole: " in record.getMessage()]
    assert len(said) == 1
    assert "chunks were not loaded or stored whole" in said[0]
    assert "no agent at" in said[0]


def test_without_an_agent_everything_misses_at_once_and_jobs_end_failed(tmp_path: Path, engine: Make) -> None:
    offloading = engine(tmp_path / "nobody.sock")
    keys = chain(1, PROMPT)
    request = offloading.begin()
    assert offloading.look(request, keys) == 0
    offloading.store(keys)
    offloading.settle()
    assert offloading.counted()["unsaved_blocks"] == PROMPT
    assert offloading.manager.primary_tier.lookup(keys[0], request) is LookupResult.HIT
    offloading.end(request)
    assert offloading.slowest_call_s < BUSY_MACHINE_S


def test_an_agent_that_starts_later_is_used_from_then_on(cluster: Cluster, engine: Make) -> None:
    agent = cluster.agents[0]
    agent.kill()
    offloading = engine(agent.socket, **ANSWERED)
    assert offloading.find(chain(1, PROMPT)) == 0
    agent.start()
    connected(offloading)
    keys = stored(offloading, 1)
    offloading.forget_primary()
    assert offloading.find(keys) == PROMPT


def test_an_agent_that_is_killed_costs_misses_and_is_found_again_with_what_was_durable(
    cluster: Cluster, engine: Make
) -> None:
    agent = cluster.agents[0]
    offloading = engine(agent.socket, **ANSWERED)
    connected(offloading)
    keys = stored(offloading, 1)
    with observer(agent) as seen:
        eventually(lambda: seen.stats()["nvme_blocks"] >= PROMPT, LONG_S)
    offloading.forget_primary()
    agent.kill()
    assert offloading.find(keys) == 0
    stored(offloading, 2)
    assert offloading.counted()["unsaved_blocks"] == PROMPT
    agent.restart()
    connected(offloading)
    offloading.forget_primary()
    assert offloading.find(keys) == PROMPT


def test_an_agent_that_dies_between_the_answer_and_the_load_costs_the_load(cluster: Cluster, engine: Make) -> None:
    agent = cluster.agents[0]
    offloading = engine(agent.socket, **ANSWERED)
    connected(offloading)
    keys = stored(offloading, 1)
    offloading.forget_primary()
    request = offloading.begin()

    def found() -> bool:
        offloading.step()
        return offloading.tier.lookup(keys[0], request) is LookupResult.HIT

    eventually(found, LONG_S)
    freeze(agent)
    # vLLM takes room for the chunks, and has the tier load them at the end of the step.
    assert offloading.look(request, keys) is None
    offloading.step()
    agent.kill()
    offloading.settle()
    assert offloading.look(request, keys) == 0
    assert offloading.counted()["failed_blocks"] > 0
    offloading.end(request)


def test_an_agent_that_hangs_blocks_no_call_and_its_jobs_end_within_their_patience(
    cluster: Cluster, engine: Make
) -> None:
    agent = cluster.agents[0]
    offloading = engine(agent.socket, load_stall_ms=200, save_stall_ms=200, match_deadline_ms=50)
    connected(offloading)
    freeze(agent)
    started = time.monotonic()
    assert offloading.find(chain(1, PROMPT)) == 0
    assert offloading.counted()["queries_unanswered"] == 1
    stored(offloading, 2)
    assert offloading.counted()["unsaved_blocks"] == PROMPT
    # It is suspected now, and asked nothing.
    assert offloading.find(chain(1, PROMPT)) == 0
    assert "queries" not in offloading.counted()
    assert time.monotonic() - started < 0.05 + 0.2 + 4 * BUSY_MACHINE_S
    assert offloading.slowest_call_s < BUDGET_S + BUSY_MACHINE_S
    thaw(agent)
    connected(offloading)

    def works_again() -> bool:
        offloading.forget_primary()
        offloading.store(chain(3, PROMPT))
        offloading.settle()
        offloading.forget_primary()
        return offloading.find(chain(3, PROMPT)) == PROMPT

    eventually(works_again, LONG_S)


def test_a_prompt_that_is_on_nvme_only_is_loaded_with_the_same_bytes(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    connected(offloading)
    keys = stored(offloading, 1)
    offloading.forget_primary()
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
        assert offloading.find(keys) == PROMPT
        assert agent.stats()["hit_blocks_own_nvme"] == PROMPT


def test_damage_on_nvme_is_a_miss_and_never_wrong_bytes(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    connected(offloading)
    keys = stored(offloading, 1)
    offloading.forget_primary()
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
        damage(cluster.agents[0].pool)
        # `find` compares what it finds.
        assert offloading.find(keys) < PROMPT
        assert offloading.counted()["failed_blocks"] > 0


def test_a_reset_waits_for_jobs_and_makes_the_engine_s_chunks_its_own(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    connected(offloading)
    keys = chain(1, PROMPT)
    offloading.store(keys)
    offloading.manager.reset_cache()
    offloading.manager.on_reset_flushed()
    assert not offloading.manager.has_pending_work()
    assert offloading.counted()["saves"] == 1
    # What was stored has the KV of weights that may be others now.
    assert offloading.find(keys) == 0
    stored(offloading, 1)
    offloading.forget_primary()
    assert offloading.find(keys) == PROMPT
    other = engine(cluster.agents[0].socket, **ANSWERED)
    connected(other)
    assert other.find(keys) == PROMPT, "what was stored before the reset is there for others"


def test_chunks_that_are_there_are_not_stored_again(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    connected(offloading)
    stored(offloading, 1)
    offloading.forget_primary()
    offloading.counted()
    stored(offloading, 1)
    told = offloading.counted()
    assert (told["duplicate_blocks"], told.get("saved_blocks", 0)) == (PROMPT, 0)


def test_shutdown_gives_vllm_its_memory_back(cluster: Cluster, engine: Make, caplog: pytest.LogCaptureFixture) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    connected(offloading)
    stored(offloading, 1)
    path = Path(offloading.spec._scheduler_mmap.mmap_path)
    assert path.exists()
    offloading.store(chain(2, PROMPT))
    offloading.manager.shutdown()
    gc.collect()
    assert not path.exists()
    assert offloading.spec._scheduler_mmap.mmap_obj is None, "the tier still holds vLLM's memory"
    assert "still exported" not in caplog.text
