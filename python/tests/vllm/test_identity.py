"""What an engine says with Reprise is what it says without, wherever its KV comes from."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from engine import BLOCK_TOKENS, Engine, connector
from engine_model import VOCABULARY, model
from faults import damage, drop_dram, eventually, observer

PROMPT_BLOCKS = 8

BUSY_MACHINE_S = 1.0
"""What other processes of a test machine may cost a request."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("identity")


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[Cluster]:
    cluster = Cluster(home / "cluster", agents=2)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def weights(home: Path) -> Path:
    return model(home / "model")


@pytest.fixture(scope="module")
def plain(home: Path, weights: Path) -> Iterator[Engine]:
    """An engine that knows nothing of Reprise, and forgets what it has seen."""
    engine = Engine(weights, home / "plain.log", enable_prefix_caching=False)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def engine(home: Path, weights: Path, cluster: Cluster) -> Iterator[Engine]:
    # Few blocks, so that many requests preempt each other; small steps, so that prompts are computed in chunks.
    small = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 128, "max_model_len": 1024}
    engine = Engine(weights, home / "engine.log", connector(cluster.agents[0].socket), **small)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def other(home: Path, weights: Path, cluster: Cluster) -> Iterator[Engine]:
    """An engine on another node."""
    engine = Engine(weights, home / "other.log", connector(cluster.agents[1].socket))
    yield engine
    engine.stop()


def prompt(seed: int, blocks: int = PROMPT_BLOCKS, tail: int = 5) -> list[int]:
    """A prompt of whole blocks and a tail."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK_TOKENS + tail)]


def saved(engine: Engine, blocks: int) -> None:
    """Waits until an engine has ended the save of so many blocks in all, new or not."""

    def all_ended() -> bool:
        metrics = engine.metrics()
        names = ("saved_blocks", "duplicate_blocks", "unsaved_blocks")
        return sum(metrics.get(f"vllm:reprise_{name}", 0) for name in names) >= blocks

    eventually(all_ended)


def ended_saves(engine: Engine) -> int:
    metrics = engine.metrics()
    return int(
        sum(metrics.get(f"vllm:reprise_{name}", 0) for name in ("saved_blocks", "duplicate_blocks", "unsaved_blocks"))
    )


def test_a_prompt_that_was_seen_is_loaded_from_dram_and_gives_the_same_tokens(plain: Engine, engine: Engine) -> None:
    tokens = prompt(1)
    expected = plain.generate([tokens])["tokens"]
    before = ended_saves(engine)
    cold = engine.generate([tokens])
    assert cold["tokens"] == expected
    assert cold["cached"] == [0]
    saved(engine, before + PROMPT_BLOCKS)
    engine.forget()
    warm = engine.generate([tokens])
    assert warm["tokens"] == expected
    assert warm["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS]


def test_a_prompt_of_whole_blocks_computes_its_last_token_only(plain: Engine, engine: Engine) -> None:
    tokens = prompt(2, tail=0)
    expected = plain.generate([tokens])["tokens"]
    before = ended_saves(engine)
    assert engine.generate([tokens])["tokens"] == expected
    saved(engine, before + PROMPT_BLOCKS)
    engine.forget()
    warm = engine.generate([tokens])
    assert warm["tokens"] == expected
    assert warm["cached"][0] >= len(tokens) - 1


def test_prompts_that_share_a_prefix_load_it_and_compute_the_rest(plain: Engine, engine: Engine) -> None:
    stem = prompt(3, tail=0)
    prompts = [stem + prompt(30 + index, blocks=1) for index in range(4)]
    expected = plain.generate(prompts)["tokens"]
    before = ended_saves(engine)
    engine.generate([stem])
    saved(engine, before + PROMPT_BLOCKS)
    engine.forget()
    warm = engine.generate(prompts)
    assert warm["tokens"] == expected
    assert all(cached >= PROMPT_BLOCKS * BLOCK_TOKENS for cached in warm["cached"]), warm["cached"]


def test_an_engine_on_another_node_finds_it(plain: Engine, engine: Engine, other: Engine) -> None:
    tokens = prompt(4)
    expected = plain.generate([tokens])["tokens"]
    before = ended_saves(engine)
    engine.generate([tokens])
    saved(engine, before + PROMPT_BLOCKS)

    def found() -> bool:
        other.forget()
        told = other.generate([tokens])
        assert told["tokens"] == expected
        return told["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS]

    eventually(found)


def test_a_prompt_that_is_on_nvme_only_gives_the_same_tokens(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    tokens = prompt(8)
    expected = plain.generate([tokens])["tokens"]
    before = ended_saves(engine)
    engine.generate([tokens])
    saved(engine, before + PROMPT_BLOCKS)
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
        from_nvme = agent.stats()["hit_blocks_own_nvme"]
        engine.forget()
        told = engine.generate([tokens])
        assert told["tokens"] == expected
        assert told["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS]
        assert agent.stats()["hit_blocks_own_nvme"] == from_nvme + PROMPT_BLOCKS


def test_many_requests_that_share_prefixes_and_preempt_each_other_give_the_same_tokens(
    plain: Engine, engine: Engine
) -> None:
    stems = [prompt(40 + stem, blocks=4, tail=0) for stem in range(3)]
    prompts = [stems[index % 3] + prompt(50 + index, blocks=2) for index in range(12)]
    expected = plain.generate(prompts, max_tokens=48)["tokens"]
    for _ in range(2):
        engine.forget()
        told = engine.generate(prompts, max_tokens=48)
        assert told["tokens"] == expected
        assert told["reasons"] == ["length"] * len(prompts)
    assert engine.metrics()["vllm:num_preemptions"] > 0, "the engine has too much memory for this test"


def test_salts_do_not_share(plain: Engine, engine: Engine) -> None:
    tokens = prompt(5)
    expected = plain.generate([tokens])["tokens"]
    before = ended_saves(engine)
    engine.generate([tokens], salt="one")
    saved(engine, before + PROMPT_BLOCKS)
    engine.forget()
    again = engine.generate([tokens], salt="two")
    assert again["tokens"] == expected
    assert again["cached"] == [0]


def test_an_agent_that_is_killed_costs_time_only_and_what_was_durable_is_there_again(
    plain: Engine, engine: Engine, cluster: Cluster
) -> None:
    tokens = prompt(6)
    expected = plain.generate([tokens])["tokens"]
    before = ended_saves(engine)
    engine.generate([tokens])
    saved(engine, before + PROMPT_BLOCKS)
    agent = cluster.agents[0]
    agent.kill()
    engine.forget()
    without = engine.generate([tokens])
    assert without["tokens"] == expected
    assert without["reasons"] == ["length"]
    agent.start()

    def found() -> bool:
        engine.forget()
        told = engine.generate([tokens])
        assert told["tokens"] == expected
        return told["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS]

    eventually(found)


def test_an_agent_that_hangs_costs_a_second_at_the_most(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    tokens = prompt(7)
    expected = plain.generate([tokens])["tokens"]
    recompute = plain.generate([tokens])["seconds"]
    before = ended_saves(engine)
    engine.generate([tokens])
    saved(engine, before + PROMPT_BLOCKS)
    engine.forget()
    agent = cluster.agents[0]
    agent.signal(signal.SIGSTOP)
    try:
        hung = engine.generate([tokens])
    finally:
        agent.signal(signal.SIGCONT)
    assert hung["tokens"] == expected
    assert hung["seconds"] < recompute + 1.0 + BUSY_MACHINE_S


def test_damage_on_nvme_costs_time_only_and_is_counted(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    tokens = prompt(9)
    expected = plain.generate([tokens])["tokens"]
    before = ended_saves(engine)
    engine.generate([tokens])
    saved(engine, before + PROMPT_BLOCKS)
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
        damage(cluster.agents[0].pool)
        engine.forget()
        told = engine.generate([tokens])
        assert told["tokens"] == expected
        assert told["reasons"] == ["length"]
        assert told["cached"][0] < PROMPT_BLOCKS * BLOCK_TOKENS
        assert engine.metrics()["vllm:reprise_failed_blocks"] > 0
