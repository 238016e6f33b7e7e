"""Tests that an engine with layer-wise loads and saves answers like one that computes everything, also in outages."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import outages
import pytest
from cluster import Agent, Cluster
from engine import BLOCK_TOKENS, Engine, connector
from engine_checks import PROMPT_BLOCKS, preempt_each_other, prompt, serve_and_save, serve_from_reprise
from faults import damage, damage_memory, drop_dram, eventually, observer

WHOLE = PROMPT_BLOCKS * BLOCK_TOKENS
OUTAGES = [signal.SIGKILL, signal.SIGSTOP]
ALONE = 199
"""Seed of the prompt served without an agent."""


@pytest.fixture(scope="module")
def started_alone(home: Path, weights: Path, cluster: Cluster) -> Iterator[tuple[Engine, dict[str, Any]]]:
    """Engine on the first node with both options, few blocks and small steps; and its answer before its agent ran."""
    small = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 128, "max_model_len": 1024}
    agent = cluster.agents[0]
    transfer = connector(agent.socket, layerwise_loads=True, layerwise_saves=True)
    with observer(agent) as seen:
        sessions = seen.stats()["sessions"]
    agent.kill()
    try:
        engine = Engine(weights, home / "layered.log", transfer, **small)
        try:
            answer = engine.generate([prompt(ALONE)])
        except BaseException:
            engine.kill()
            raise
    finally:
        agent.start()
    with observer(agent) as seen:
        # The earlier sessions, and two of this engine.
        eventually(lambda: seen.stats()["sessions"] >= sessions + 2)
    yield engine, answer
    engine.stop()


@pytest.fixture(scope="module")
def layered(started_alone: tuple[Engine, dict[str, Any]]) -> Engine:
    """The engine of ``started_alone``."""
    return started_alone[0]


@pytest.fixture
def agent(cluster: Cluster) -> Agent:
    """Agent of the engine's node."""
    return cluster.agents[0]


def counter(engine: Engine, name: str) -> float:
    """Returns a counter of the connector."""
    return engine.metrics().get(f"vllm:reprise_{name}", 0)


def test_an_engine_started_before_its_agent_serves_without_it_and_uses_it_later(
    plain: Engine, started_alone: tuple[Engine, dict[str, Any]]
) -> None:
    layered, answer = started_alone
    tokens = prompt(ALONE)
    expected = plain.generate([tokens])["tokens"]
    assert (answer["tokens"], answer["cached"], answer["reasons"]) == (expected, [0], ["length"])
    assert serve_and_save(layered, tokens)["tokens"] == expected
    assert serve_from_reprise(layered, tokens)["tokens"] == expected


def test_blocks_saved_during_the_computation_are_loaded_during_the_computation(plain: Engine, layered: Engine) -> None:
    tokens = prompt(200)
    expected = plain.generate([tokens])["tokens"]
    before = counter(layered, "saved_blocks")
    cold = serve_and_save(layered, tokens)
    assert (cold["tokens"], cold["cached"]) == (expected, [0])
    assert counter(layered, "saved_blocks") >= before + PROMPT_BLOCKS
    layered.clear_cache()
    warm = layered.generate([tokens])
    assert (warm["tokens"], warm["cached"]) == (expected, [WHOLE])


def test_engines_share_blocks_regardless_of_how_they_copy(plain: Engine, engine: Engine, layered: Engine) -> None:
    for seed, writer, reader in ((201, engine, layered), (202, layered, engine)):
        tokens = prompt(seed)
        expected = plain.generate([tokens])["tokens"]
        serve_and_save(writer, tokens)
        reader.clear_cache()
        answer = reader.generate([tokens])
        assert (answer["tokens"], answer["cached"]) == (expected, [WHOLE])


def test_a_prompt_of_full_blocks_computes_its_last_block(plain: Engine, layered: Engine) -> None:
    tokens = prompt(203, tail=0)
    expected = plain.generate([tokens])["tokens"]
    assert serve_and_save(layered, tokens)["tokens"] == expected
    layered.clear_cache()
    warm = layered.generate([tokens])
    assert (warm["tokens"], warm["cached"]) == (expected, [WHOLE - BLOCK_TOKENS])


def test_blocks_on_nvme_are_loaded_during_the_computation(plain: Engine, layered: Engine, agent: Agent) -> None:
    tokens = prompt(204)
    expected = plain.generate([tokens])["tokens"]
    serve_and_save(layered, tokens)
    with observer(agent) as seen:
        drop_dram(seen)
        from_nvme = seen.stats()["hit_blocks_own_nvme"]
        layered.clear_cache()
        answer = layered.generate([tokens])
        assert (answer["tokens"], answer["cached"]) == (expected, [WHOLE])
        assert seen.stats()["hit_blocks_own_nvme"] == from_nvme + PROMPT_BLOCKS


def test_requests_with_common_prefixes_that_preempt_each_other_give_the_same_tokens(
    plain: Engine, layered: Engine
) -> None:
    preempt_each_other(plain, layered, seed=210)


def test_a_hanging_agent_costs_at_most_a_second(plain: Engine, layered: Engine, agent: Agent) -> None:
    outages.check_hang_before_match(plain, layered, agent, seed=250)


@pytest.mark.parametrize("number", OUTAGES)
def test_an_outage_of_the_agent_during_loads_only_costs_time(
    plain: Engine, layered: Engine, agent: Agent, number: signal.Signals
) -> None:
    outages.check_outage_during_loads(plain, layered, agent, number, seed=2000 + 10 * number)


@pytest.mark.parametrize("number", OUTAGES)
def test_an_outage_of_the_agent_during_saves_only_costs_time(
    plain: Engine, layered: Engine, agent: Agent, number: signal.Signals
) -> None:
    outages.check_outage_during_saves(plain, layered, agent, number, seed=500_000 + 10_000 * number)


def test_a_hanging_agent_of_another_node_only_costs_time(
    plain: Engine, layered: Engine, other: Engine, cluster: Cluster
) -> None:
    outages.check_peer_hang_during_loads(plain, layered, cluster.agents[0], other, cluster.agents[1], seed=2500)


@pytest.mark.parametrize("place", ["dram", "nvme"])
def test_damaged_blocks_are_recomputed_in_every_request_and_never_saved_or_shared(
    plain: Engine, layered: Engine, agent: Agent, place: str
) -> None:
    stem = prompt(230 if place == "dram" else 231, tail=0)
    prompts = [stem + prompt(240 + index, blocks=2) for index in range(3)]
    expected = plain.generate(prompts)["tokens"]
    serve_and_save(layered, prompts[0])
    layered.clear_cache()
    failed = counter(layered, "failed_blocks")
    with observer(agent) as seen:
        if place == "dram":
            damage_memory(agent)
        else:
            drop_dram(seen)
            damage(agent.pool)
    answer = layered.generate(prompts)
    assert answer["tokens"] == expected
    assert answer["reasons"] == ["length"] * len(prompts)
    assert counter(layered, "failed_blocks") > failed
    # Blocks in vLLM's own cache, and then those saved during the failed load.
    assert layered.generate(prompts)["tokens"] == expected

    def is_found() -> bool:
        layered.clear_cache()
        again = layered.generate(prompts)
        assert again["tokens"] == expected
        return bool(again["cached"][0] > WHOLE - BLOCK_TOKENS)

    eventually(is_found)
