"""An engine that loads and saves layer by layer says what one says that computes everything, whatever happens to its agent."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Agent, Cluster
from engine import BLOCK_TOKENS, Engine, connector
from faults import agent_that_goes, damage, damage_memory, drop_dram, eventually, freeze, observer, thaw
from serving import PROMPT_BLOCKS, prompt, see

WHOLE = PROMPT_BLOCKS * BLOCK_TOKENS
BUSY_MACHINE_S = 1.0
"""What other processes of a test machine may cost a request."""


@pytest.fixture(scope="module")
def layered(home: Path, weights: Path, cluster: Cluster) -> Iterator[Engine]:
    """An engine on the first node with both options, with few blocks and small steps."""
    small = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 128, "max_model_len": 1024}
    transfer = connector(cluster.agents[0].socket, layerwise_loads=True, layerwise_saves=True)
    engine = Engine(weights, home / "layered.log", transfer, **small)
    yield engine
    engine.stop()


@pytest.fixture
def agent(cluster: Cluster) -> Agent:
    """Of the engine's node."""
    return cluster.agents[0]


def of_layered(engine: Engine, name: str) -> float:
    """One of the connector's counters."""
    return engine.metrics().get(f"vllm:reprise_{name}", 0)


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
    stems = [prompt(210 + stem, blocks=4, tail=0) for stem in range(3)]
    prompts = [stems[index % 3] + prompt(220 + index, blocks=2) for index in range(12)]
    # 9.2 blocks in the end, of which 4 are shared: 12 + 12 x 6 of the engine's 63, while the first is still at work.
    max_tokens = 96
    expected = plain.generate(prompts, max_tokens=max_tokens)["tokens"]
    preempted = layered.metrics()["vllm:num_preemptions"]
    for _ in range(2):
        layered.forget()
        told = layered.generate(prompts, max_tokens=max_tokens)
        assert told["tokens"] == expected
        assert told["reasons"] == ["length"] * len(prompts)
    assert layered.metrics()["vllm:num_preemptions"] > preempted, "the engine has too much memory for this test"


def test_an_agent_that_hangs_costs_a_second_at_the_most(plain: Engine, layered: Engine, agent: Agent) -> None:
    tokens = prompt(250)
    expected = plain.generate([tokens])["tokens"]
    recompute = plain.generate([tokens])["seconds"]
    see(layered, tokens)
    layered.forget()
    freeze(agent)
    try:
        hung = layered.generate([tokens])
    finally:
        thaw(agent)
    assert hung["tokens"] == expected
    assert hung["seconds"] < recompute + 1.0 + BUSY_MACHINE_S


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_goes_in_the_middle_of_loads_costs_time_only(
    plain: Engine, layered: Engine, agent: Agent, number: signal.Signals
) -> None:
    prompts = [prompt(260 + 10 * number + index, blocks=6) for index in range(8)]
    expected = plain.generate(prompts, max_tokens=16)["tokens"]

    def all_found() -> bool:
        layered.forget()
        told = layered.generate(prompts, max_tokens=16)
        assert told["tokens"] == expected
        return told["cached"] == [6 * BLOCK_TOKENS] * len(prompts)

    for served_blocks in (1, 13, 25):
        eventually(all_found, within=60.0)
        layered.forget()
        with agent_that_goes(agent, number, served_blocks):
            told = layered.generate(prompts, max_tokens=16)
        assert told["tokens"] == expected
        assert told["reasons"] == ["length"] * len(prompts)
    eventually(all_found, within=60.0)


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
