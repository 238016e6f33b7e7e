"""Tests that vLLM's tiering stores to Reprise and loads from it, and that a failing agent only costs time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from faults import damage, drop_dram, eventually, freeze, observer, thaw
from offloading import CHUNK_BYTES, LONG_S, Offloading, chain
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

PROMPT = 8
"""Chunks per prompt."""

BUDGET_S = 0.005
PATIENT = {
    "load_stall_ms": LONG_S * 1e3,
    "load_standstill_ms": LONG_S * 1e3,
    "load_deadline_ms": LONG_S * 1e3,
    "save_stall_ms": LONG_S * 1e3,
}
"""Options with which nothing times out, however slow the machine is."""

ANSWERED = {**PATIENT, "match_deadline_ms": LONG_S * 1e3}
BUSY_MACHINE_S = 0.5
"""Allowed delay of a call by other processes of a test machine."""

Make = Callable[..., Offloading]


def wait_connected(offloading: Offloading) -> None:
    """Waits until the tier has a session."""
    assert offloading.tier._session.wait_connected(LONG_S)


def store(offloading: Offloading, seed: int, chunks: int = PROMPT) -> list[bytes]:
    """Stores a prompt's chunks and waits for the end of the jobs."""
    keys = chain(seed, chunks)
    offloading.store(keys)
    offloading.finish_jobs()
    return keys


def test_stored_chunks_are_found_and_loaded_with_the_same_bytes(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(offloading)
    keys = store(offloading, 1)
    counts = offloading.counts()
    assert (counts["saves"], counts["saved_blocks"], counts["saved_bytes"]) == (1, PROMPT, PROMPT * CHUNK_BYTES)
    offloading.clear_primary()
    assert offloading.find(keys) == PROMPT
    counts = offloading.counts()
    assert (counts["loads"], counts["loaded_blocks"], counts["loaded_bytes"]) == (1, PROMPT, PROMPT * CHUNK_BYTES)
    assert len(counts["load_seconds"]) == 1
    assert "failed_blocks" not in counts


def test_another_engine_of_the_same_model_finds_the_chunks(cluster: Cluster, engine: Make) -> None:
    first = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(first)
    keys = store(first, 1)
    second = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(second)
    assert second.find(keys) == PROMPT
    with_other_weights = engine(cluster.agents[0].socket, **{**ANSWERED, "model_digest": "weights-2"})
    wait_connected(with_other_weights)
    assert with_other_weights.find(keys) == 0


def test_a_prompt_that_was_never_stored_is_a_miss(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(offloading)
    store(offloading, 1)
    assert offloading.find(chain(2, PROMPT)) == 0
    counts = offloading.counts()
    assert (counts["queries"], "loads" in counts) == (1, False)


def test_a_stored_prefix_of_a_prompt_is_found(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(offloading)
    keys = store(offloading, 1, chunks=5)
    offloading.clear_primary()
    assert offloading.find(chain(1, PROMPT)[:PROMPT]) == len(keys)


def test_vllm_retries_while_the_answer_is_pending(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(offloading)
    keys = store(offloading, 1)
    offloading.clear_primary()
    request = offloading.begin()
    freeze(cluster.agents[0])
    assert offloading.tier.lookup(keys[0], request) is LookupResult.RETRY
    assert offloading.look_up(request, keys) is None
    offloading.step()
    for _ in range(3):
        assert {offloading.tier.lookup(key, request) for key in keys} == {LookupResult.RETRY}
        offloading.step()
    thaw(cluster.agents[0])

    def is_answered() -> bool:
        offloading.step()
        return offloading.tier.lookup(keys[0], request) is LookupResult.HIT

    eventually(is_answered, LONG_S)
    assert {offloading.tier.lookup(key, request) for key in keys} == {LookupResult.HIT}
    offloading.end(request)


def test_a_step_waits_for_its_budget_once_for_all_requests(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(offloading)
    requests = [offloading.begin() for _ in range(20)]
    freeze(cluster.agents[0])
    for request in requests:
        assert offloading.look_up(request, chain(3, PROMPT)) is None
    matches = 0
    while matches < len(requests):
        # Sending matches also uses a step's budget.
        offloading.step()
        matches += offloading.counts().get("queries", 0)
    steps = []
    for _ in range(10):
        started = time.monotonic()
        for request in requests:
            assert offloading.look_up(request, chain(3, PROMPT)) is None
        steps.append(time.monotonic() - started)
        offloading.step()
    # Separate budgets would take 20 times as long. A busy machine delays some steps.
    assert min(steps) < 10 * BUDGET_S, steps
    thaw(cluster.agents[0])

    def all_answered() -> bool:
        offloading.step()
        return all(offloading.look_up(request, chain(3, PROMPT)) is not None for request in requests)

    eventually(all_answered)
    # One sample per request, regardless of the number of look-ups.
    assert len(offloading.counts()["match_seconds"]) == len(requests)


def test_a_step_costs_its_budget_regardless_of_the_number_of_prompts(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(offloading)
    freeze(cluster.agents[0])
    steps = []
    for number in range(3):
        for prompt in range(100):
            request = offloading.begin()
            for key in chain(1000 * number + prompt, 1024):
                offloading.tier.lookup(key, request)
        started = time.monotonic()
        offloading.tier.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
        steps.append(time.monotonic() - started)
    assert min(steps) < 10 * BUDGET_S, steps
    thaw(cluster.agents[0])

    def is_answered() -> bool:
        """Returns whether the match of the last prompt has an answer."""
        offloading.step()
        return offloading.tier.lookup(chain(2099, 1)[0], request) is LookupResult.MISS

    eventually(is_answered, LONG_S)


def test_the_reason_for_unstored_chunks_is_logged_once(
    tmp_path: Path, engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    offloading = engine(tmp_path / "missing.sock")
    eventually(lambda: offloading.tier._session.last_error is not None, LONG_S)
    for seed in range(3):
        store(offloading, seed, chunks=2)
    messages = [record.getMessage() for record in caplog.records if "or stored: " in record.getMessage()]
    assert len(messages) == 1
    assert "some chunks were not loaded or stored" in messages[0]
    assert "no agent at" in messages[0]


def test_without_an_agent_look_ups_miss_immediately_and_jobs_fail(tmp_path: Path, engine: Make) -> None:
    offloading = engine(tmp_path / "missing.sock")
    keys = chain(1, PROMPT)
    request = offloading.begin()
    assert offloading.look_up(request, keys) == 0
    offloading.store(keys)
    offloading.finish_jobs()
    assert offloading.counts()["unsaved_blocks"] == PROMPT
    assert offloading.manager.primary_tier.lookup(keys[0], request) is LookupResult.HIT
    offloading.end(request)
    assert offloading.slowest_call_s < BUSY_MACHINE_S


def test_an_agent_that_starts_later_is_used(cluster: Cluster, engine: Make) -> None:
    agent = cluster.agents[0]
    agent.kill()
    offloading = engine(agent.socket, **ANSWERED)
    assert offloading.find(chain(1, PROMPT)) == 0
    agent.start()
    wait_connected(offloading)
    keys = store(offloading, 1)
    offloading.clear_primary()
    assert offloading.find(keys) == PROMPT


def test_a_killed_agent_costs_misses_and_has_the_durable_chunks_after_its_restart(
    cluster: Cluster, engine: Make
) -> None:
    agent = cluster.agents[0]
    offloading = engine(agent.socket, **ANSWERED)
    wait_connected(offloading)
    keys = store(offloading, 1)
    with observer(agent) as seen:
        eventually(lambda: seen.stats()["nvme_blocks"] >= PROMPT, LONG_S)
    offloading.clear_primary()
    agent.kill()
    assert offloading.find(keys) == 0
    store(offloading, 2)
    assert offloading.counts()["unsaved_blocks"] == PROMPT
    agent.restart()
    wait_connected(offloading)
    offloading.clear_primary()
    assert offloading.find(keys) == PROMPT


def test_an_agent_killed_between_answer_and_load_costs_the_load(cluster: Cluster, engine: Make) -> None:
    agent = cluster.agents[0]
    offloading = engine(agent.socket, **ANSWERED)
    wait_connected(offloading)
    keys = store(offloading, 1)
    offloading.clear_primary()
    request = offloading.begin()

    def is_found() -> bool:
        offloading.step()
        return offloading.tier.lookup(keys[0], request) is LookupResult.HIT

    eventually(is_found, LONG_S)
    freeze(agent)
    # vLLM allocates memory for the chunks; the tier loads them at the end of the step.
    assert offloading.look_up(request, keys) is None
    offloading.step()
    agent.kill()
    offloading.finish_jobs()
    assert offloading.look_up(request, keys) == 0
    assert offloading.counts()["failed_blocks"] > 0
    offloading.end(request)


def test_a_hanging_agent_blocks_no_call_and_its_jobs_end_by_their_timeouts(cluster: Cluster, engine: Make) -> None:
    agent = cluster.agents[0]
    offloading = engine(agent.socket, load_stall_ms=200, save_stall_ms=200, match_deadline_ms=50)
    wait_connected(offloading)
    freeze(agent)
    started = time.monotonic()
    assert offloading.find(chain(1, PROMPT)) == 0
    assert offloading.counts()["queries_unanswered"] == 1
    store(offloading, 2)
    assert offloading.counts()["unsaved_blocks"] == PROMPT
    # The agent is suspected now and gets no matches.
    assert offloading.find(chain(1, PROMPT)) == 0
    assert "queries" not in offloading.counts()
    assert time.monotonic() - started < 0.05 + 0.2 + 4 * BUSY_MACHINE_S
    assert offloading.slowest_call_s < BUDGET_S + BUSY_MACHINE_S
    thaw(agent)
    wait_connected(offloading)

    def works_again() -> bool:
        offloading.clear_primary()
        offloading.store(chain(3, PROMPT))
        offloading.finish_jobs()
        offloading.clear_primary()
        return offloading.find(chain(3, PROMPT)) == PROMPT

    eventually(works_again, LONG_S)


def test_a_prompt_only_on_nvme_is_loaded_with_the_same_bytes(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(offloading)
    keys = store(offloading, 1)
    offloading.clear_primary()
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
        assert offloading.find(keys) == PROMPT
        assert agent.stats()["hit_blocks_own_nvme"] == PROMPT


def test_chunks_move_through_extents_and_a_killed_agent_costs_only_misses(lender: Cluster, engine: Make) -> None:
    agent = lender.agents[0]
    offloading = engine(agent.socket, **ANSWERED)
    wait_connected(offloading)
    keys = store(offloading, 1)
    report = offloading.tier._transfers.extents()
    print(f"backend of saves: {report.save_backend}")
    backends = {"queues": "gpu-queue-emulated", "files": "staged-host"}
    assert report.save_backend == backends[lender.lends], report.unusable
    assert offloading.counts()["extent_saved_blocks"] == PROMPT
    offloading.clear_primary()
    # `find` compares the bytes.
    assert offloading.find(keys) == PROMPT
    counts = offloading.counts()
    assert (counts["loaded_blocks"], counts["extent_loaded_blocks"]) == (PROMPT, PROMPT)
    offloading.clear_primary()
    agent.kill()
    assert offloading.find(keys) == 0
    agent.start()
    wait_connected(offloading)
    assert offloading.find(keys) == PROMPT
    assert offloading.counts()["extent_loaded_blocks"] == PROMPT


def test_damage_on_nvme_is_a_miss_and_never_wrong_bytes(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(offloading)
    keys = store(offloading, 1)
    offloading.clear_primary()
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
        damage(cluster.agents[0].pool)
        # `find` compares the bytes.
        assert offloading.find(keys) < PROMPT
        assert offloading.counts()["failed_blocks"] > 0


def test_a_reset_waits_for_jobs_and_hides_earlier_chunks_from_the_engine(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(offloading)
    keys = chain(1, PROMPT)
    offloading.store(keys)
    offloading.manager.reset_cache()
    offloading.manager.on_reset_flushed()
    assert not offloading.manager.has_pending_work()
    assert offloading.counts()["saves"] == 1
    # Stored chunks have KV of weights that may have changed.
    assert offloading.find(keys) == 0
    store(offloading, 1)
    offloading.clear_primary()
    assert offloading.find(keys) == PROMPT
    other = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(other)
    assert other.find(keys) == PROMPT, "other engines find chunks stored before the reset"


def test_existing_chunks_are_not_stored_again(cluster: Cluster, engine: Make) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(offloading)
    store(offloading, 1)
    offloading.clear_primary()
    offloading.counts()
    store(offloading, 1)
    counts = offloading.counts()
    assert (counts["duplicate_blocks"], counts.get("saved_blocks", 0)) == (PROMPT, 0)


def test_shutdown_releases_vllm_s_memory(cluster: Cluster, engine: Make, caplog: pytest.LogCaptureFixture) -> None:
    offloading = engine(cluster.agents[0].socket, **ANSWERED)
    wait_connected(offloading)
    store(offloading, 1)
    path = Path(offloading.spec._scheduler_mmap.mmap_path)
    assert path.exists()
    offloading.store(chain(2, PROMPT))
    offloading.manager.shutdown()
    gc.collect()
    assert not path.exists()
    assert offloading.spec._scheduler_mmap.mmap_obj is None, "the tier still uses vLLM's memory"
    assert "still exported" not in caplog.text
