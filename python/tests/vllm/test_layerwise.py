"""An engine that loads and saves layer by layer says what one says that computes everything, whatever happens to its agent."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import outages
import pytest
from cluster import Agent, Cluster
from engine import BLOCK_TOKENS, Engine, connector
from faults import damage, damage_memory, drop_dram, eventually, observer
from serving import PROMPT_BLOCKS, preempt_each_other, prompt, see, see_again

WHOLE = PROMPT_BLOCKS * BLOCK_TOKENS
OUTAGES = [signal.SIGKILL, signal.SIGSTOP]
ALONE = 199
"""Seed of the prompt that was served without an agent."""


@pytest.fixture(scope="module")
def started_alone(home: Path, weights: Path, cluster: Cluster) -> Iterator[tuple[Engine, dict[str, Any]]]:
    """An engine on the first node with both options, with few blocks and small steps, and what it said before it had an agent."""
    small = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 128, "max_model_len": 1024}
    agent = cluster.agents[0]
    transfer = connector(agent.socket, layerwise_loads=True, layerwise_saves=True)
    with observer(agent) as seen:
        sessions = seen.stats()["sessions"]
    agent.kill()
    try:
        engine = Engine(weights, home / "layered.log", transfer, **small)
        try:
            said = engine.generate([prompt(ALONE)])
        except BaseException:
            engine.kill()
            raise
    finally:
        agent.start()
    with observer(agent) as seen:
        # Those that were there, and this engine's two.
        eventually(lambda: seen.stats()["sessions"] >= sessions + 2)
    yield engine, said
    engine.stop()


@pytest.fixture(scope="module")
def layered(started_alone: tuple[Engine, dict[str, Any]]) -> Engine:
    """That engine, with its agent."""
    return started_alone[0]


@pytest.fixture
def agent(cluster: Cluster) -> Agent:
    """Of the engine's node."""
    return cluster.agents[0]


def of_layered(engine: Engine, name: str) -> float:
    """One of the connector's counters."""
    return engine.metrics().get(f"vllm:reprise_{name}", 0)


def test_an_engine_that_is_started_before_its_agent_serves_without_it_and_finds_blocks_as_soon_as_it_is_there(
    plain: Engine, started_alone: tuple[Engine, dict[str, Any]]
) -> None:
    layered, said = started_alone
    tokens = prompt(ALONE)
    expected = plain.generate([tokens])["tokens"]
    assert (said["tokens"], said["cached"], said["reasons"]) == (expected, [0], ["length"])
    assert see(layered, tokens)["tokens"] == expected
    assert see_again(layered, tokens)["tokens"] == expected


def test_what_was_saved_beside_the_computation_is_loaded_beside_it(plain: Engine, layered: Engine) -> None:
    tokens = prompt(200)
    expected = plain.generate([tokens])["tokens"]
    before = of_layered(layered, "saved_blocks")
    cold = see(layered, tokens)
    assert (cold["tokens"], cold["cached"]) == (expected, [0])
    assert of_layered(layered, "saved_blocks") >= before + PROMPT_BLOCKS
    layered.forget()
    warm = layered.generate([tokens])
    assert (warm["tokens"], warm["cached"]) == (expected, [WHOLE])


def test_engines_share_blocks_whichever_way_they_copy(plain: Engine, engine: Engine, layered: Engine) -> None:
    for seed, writer, reader in ((201, engine, layered), (202, layered, engine)):
        tokens = prompt(seed)
        expected = plain.generate([tokens])["tokens"]
        see(writer, tokens)
        reader.forget()
        told = reader.generate([tokens])
        assert (told["tokens"], told["cached"]) == (expected, [WHOLE])


def test_a_prompt_of_whole_blocks_computes_its_last_block(plain: Engine, layered: Engine) -> None:
    tokens = prompt(203, tail=0)
    expected = plain.generate([tokens])["tokens"]
    assert see(layered, tokens)["tokens"] == expected
    layered.forget()
    warm = layered.generate([tokens])
    assert (warm["tokens"], warm["cached"]) == (expected, [WHOLE - BLOCK_TOKENS])


def test_blocks_on_nvme_are_loaded_beside_the_computation(plain: Engine, layered: Engine, agent: Agent) -> None:
    tokens = prompt(204)
    expected = plain.generate([tokens])["tokens"]
    see(layered, tokens)
    with observer(agent) as seen:
        drop_dram(seen)
        from_nvme = seen.stats()["hit_blocks_own_nvme"]
        layered.forget()
        told = layered.generate([tokens])
        assert (told["tokens"], told["cached"]) == (expected, [WHOLE])
        assert seen.stats()["hit_blocks_own_nvme"] == from_nvme + PROMPT_BLOCKS


def test_requests_that_share_prefixes_and_preempt_each_other_say_the_same(plain: Engine, layered: Engine) -> None:
    preempt_each_other(plain, layered, seed=210)


def test_an_agent_that_hangs_costs_a_second_at_the_most(plain: Engine, layered: Engine, agent: Agent) -> None:
    outages.hangs_before_it_is_asked(plain, layered, agent, seed=250)


@pytest.mark.parametrize("number", OUTAGES)
def test_an_agent_that_goes_in_the_middle_of_loads_costs_time_only(
    plain: Engine, layered: Engine, agent: Agent, number: signal.Signals
) -> None:
    outages.goes_during_loads(plain, layered, agent, number, seed=2000 + 10 * number)


@pytest.mark.parametrize("number", OUTAGES)
def test_an_agent_that_goes_in_the_middle_of_saves_costs_time_only(
    plain: Engine, layered: Engine, agent: Agent, number: signal.Signals
) -> None:
    outages.goes_during_saves(plain, layered, agent, number, seed=500_000 + 10_000 * number)


def test_an_agent_of_another_node_that_hangs_costs_time_only(
    plain: Engine, layered: Engine, other: Engine, cluster: Cluster
) -> None:
    outages.peer_hangs_during_loads(plain, layered, cluster.agents[0], other, cluster.agents[1], seed=2500)


@pytest.mark.parametrize("place", ["dram", "nvme"])
def test_damage_is_computed_again_in_every_request_of_the_batch_and_never_saved_or_shared(
    plain: Engine, layered: Engine, agent: Agent, place: str
) -> None:
    stem = prompt(230 if place == "dram" else 231, tail=0)
    prompts = [stem + prompt(240 + index, blocks=2) for index in range(3)]
    expected = plain.generate(prompts)["tokens"]
    see(layered, prompts[0])
    layered.forget()
    failed = of_layered(layered, "failed_blocks")
    with observer(agent) as seen:
        if place == "dram":
            damage_memory(agent)
        else:
            drop_dram(seen)
            damage(agent.pool)
    told = layered.generate(prompts)
    assert told["tokens"] == expected
    assert told["reasons"] == ["length"] * len(prompts)
    assert of_layered(layered, "failed_blocks") > failed
    # What vLLM keeps by itself, and then what was saved while a load had failed.
    assert layered.generate(prompts)["tokens"] == expected

    def found() -> bool:
        layered.forget()
        again = layered.generate(prompts)
        assert again["tokens"] == expected
        return bool(again["cached"][0] > WHOLE - BLOCK_TOKENS)

    eventually(found)
