"""What an engine says with Reprise is what it says without, wherever its KV comes from."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Iterator

import pytest
from cluster import Cluster
from engine import BLOCK_TOKENS, Engine
from faults import (
    agent_that_goes,
    agent_that_hangs,
    crawling,
    damage,
    damage_memory,
    drop_dram,
    eventually,
    freeze,
    observer,
    thaw,
)
from serving import PROMPT_BLOCKS, prompt, see, see_again

BUSY_MACHINE_S = 1.0
"""What other processes of a test machine may cost a request."""


def test_a_prompt_that_was_seen_is_loaded_from_dram_and_gives_the_same_tokens(plain: Engine, engine: Engine) -> None:
    tokens = prompt(1)
    expected = plain.generate([tokens])["tokens"]
    cold = see(engine, tokens)
    assert cold["tokens"] == expected
    assert cold["cached"] == [0]
    assert see_again(engine, tokens)["tokens"] == expected


def test_a_prompt_of_whole_blocks_computes_its_last_token_only(plain: Engine, engine: Engine) -> None:
    tokens = prompt(2, tail=0)
    expected = plain.generate([tokens])["tokens"]
    assert see(engine, tokens)["tokens"] == expected
    engine.forget()
    warm = engine.generate([tokens])
    assert warm["tokens"] == expected
    assert warm["cached"][0] >= len(tokens) - 1


def test_prompts_that_share_a_prefix_load_it_and_compute_the_rest(plain: Engine, engine: Engine) -> None:
    stem = prompt(3, tail=0)
    prompts = [stem + prompt(30 + index, blocks=1) for index in range(4)]
    expected = plain.generate(prompts)["tokens"]
    see(engine, stem)
    engine.forget()
    warm = engine.generate(prompts)
    assert warm["tokens"] == expected
    assert all(cached >= PROMPT_BLOCKS * BLOCK_TOKENS for cached in warm["cached"]), warm["cached"]


def from_peers(stats: dict[str, int]) -> int:
    """Blocks that an agent has loaded from others."""
    return stats["hit_blocks_peer_dram"] + stats["hit_blocks_peer_nvme"]


def test_an_engine_on_another_node_finds_it(plain: Engine, engine: Engine, other: Engine, cluster: Cluster) -> None:
    seeds = itertools.count(400)
    with observer(cluster.agents[0]) as first, observer(cluster.agents[1]) as second:

        def found_at_once() -> bool:
            # A new prompt each time: one that was missed is saved on the second node as well, and found there.
            tokens = prompt(next(seeds))
            see(engine, tokens)
            drop_dram(first)
            before = from_peers(second.stats())
            told = other.generate([tokens])
            assert told["tokens"] == plain.generate([tokens])["tokens"]
            if told["cached"] != [PROMPT_BLOCKS * BLOCK_TOKENS]:
                # The directory has not heard of it yet.
                return False
            assert from_peers(second.stats()) == before + PROMPT_BLOCKS
            return True

        eventually(found_at_once, within=60.0)


def test_a_prompt_that_is_on_nvme_only_gives_the_same_tokens(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    tokens = prompt(8)
    expected = plain.generate([tokens])["tokens"]
    see(engine, tokens)
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
        from_nvme = agent.stats()["hit_blocks_own_nvme"]
        assert see_again(engine, tokens)["tokens"] == expected
        assert agent.stats()["hit_blocks_own_nvme"] == from_nvme + PROMPT_BLOCKS


def test_many_requests_that_share_prefixes_and_preempt_each_other_give_the_same_tokens(
    plain: Engine, engine: Engine
) -> None:
    stems = [prompt(40 + stem, blocks=4, tail=0) for stem in range(3)]
    prompts = [stems[index % 3] + prompt(50 + index, blocks=2) for index in range(12)]
    # 9.2 blocks in the end, of which 4 are shared: 12 + 12 x 6 of the engine's 63, while the first is still at work.
    max_tokens = 96
    expected = plain.generate(prompts, max_tokens=max_tokens)["tokens"]
    for _ in range(2):
        engine.forget()
        told = engine.generate(prompts, max_tokens=max_tokens)
        assert told["tokens"] == expected
        assert told["reasons"] == ["length"] * len(prompts)
    assert engine.metrics()["vllm:num_preemptions"] > 0, "the engine has too much memory for this test"


def test_salts_do_not_share(plain: Engine, engine: Engine) -> None:
    tokens = prompt(5)
    expected = plain.generate([tokens])["tokens"]
    see(engine, tokens, salt="one")
    engine.forget()
    again = engine.generate([tokens], salt="two")
    assert again["tokens"] == expected
    assert again["cached"] == [0]
    assert see_again(engine, tokens, salt="one")["tokens"] == expected


def test_an_agent_that_is_killed_costs_time_only_and_what_was_durable_is_there_again(
    plain: Engine, engine: Engine, cluster: Cluster
) -> None:
    tokens = prompt(6)
    expected = plain.generate([tokens])["tokens"]
    see(engine, tokens)
    agent = cluster.agents[0]
    with observer(agent) as before:
        drop_dram(before)
        sessions = before.stats()["sessions"]
    agent.kill()
    engine.forget()
    without = engine.generate([tokens])
    assert without["tokens"] == expected
    assert without["reasons"] == ["length"]
    agent.start()
    with observer(agent) as after:
        # Scheduler and worker of the engine, and this one.
        eventually(lambda: after.stats()["sessions"] >= sessions)
        from_nvme = after.stats()["hit_blocks_own_nvme"]
        engine.forget()
        told = engine.generate([tokens])
        assert told["tokens"] == expected
        assert told["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS], "on the first try: it was not saved anew"
        assert after.stats()["hit_blocks_own_nvme"] == from_nvme + PROMPT_BLOCKS


@pytest.mark.parametrize("fault", ["killed", "hangs"])
def test_an_agent_that_goes_in_the_middle_of_a_load_costs_time_only(
    plain: Engine, engine: Engine, cluster: Cluster, fault: str
) -> None:
    agent = cluster.agents[0]
    prompts = [prompt((70 if fault == "killed" else 80) + index, blocks=6) for index in range(6)]
    expected = plain.generate(prompts)["tokens"]
    recompute = plain.generate(prompts)["seconds"]

    def all_found() -> bool:
        engine.forget()
        told = engine.generate(prompts)
        assert told["tokens"] == expected
        return bool(told["cached"] == [6 * BLOCK_TOKENS] * len(prompts))

    @contextlib.contextmanager
    def it_goes() -> Iterator[None]:
        if fault == "killed":
            with agent_that_goes(agent, signal.SIGKILL, served_blocks=1), crawling(agent):
                yield
        else:
            with agent_that_hangs(agent, served_blocks=1):
                yield

    def loads_fail_under_way() -> bool:
        eventually(all_found, within=60.0)
        with observer(agent) as seen:
            drop_dram(seen)
        before = engine.metrics().get("vllm:reprise_failed_blocks", 0)
        engine.forget()
        with it_goes():
            told = engine.generate(prompts)
        assert told["tokens"] == expected
        assert told["reasons"] == ["length"] * len(prompts)
        assert told["seconds"] < recompute + 1.0 + BUSY_MACHINE_S
        # Otherwise it went before or after them.
        return engine.metrics().get("vllm:reprise_failed_blocks", 0) > before

    eventually(loads_fail_under_way, within=120.0)
    eventually(all_found, within=60.0)


def test_an_agent_that_hangs_costs_a_second_at_the_most(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    tokens = prompt(7)
    expected = plain.generate([tokens])["tokens"]
    recompute = plain.generate([tokens])["seconds"]
    see(engine, tokens)
    engine.forget()
    agent = cluster.agents[0]
    freeze(agent)
    try:
        hung = engine.generate([tokens])
    finally:
        thaw(agent)
    assert hung["tokens"] == expected
    assert hung["cached"] == [0], "nobody said that it is there"
    assert hung["seconds"] < recompute + 1.0 + BUSY_MACHINE_S


def test_another_node_s_agent_that_hangs_costs_a_second_at_the_most(
    plain: Engine, engine: Engine, other: Engine, cluster: Cluster
) -> None:
    seeds = itertools.count(450)

    def hangs_in_a_load() -> bool:
        tokens = prompt(next(seeds))
        expected = plain.generate([tokens])["tokens"]
        recompute = plain.generate([tokens])["seconds"]
        see(engine, tokens)
        before = other.metrics().get("vllm:reprise_failed_blocks", 0)
        freeze(cluster.agents[0])
        try:
            hung = other.generate([tokens])
        finally:
            thaw(cluster.agents[0])
        assert hung["tokens"] == expected
        assert hung["seconds"] < recompute + 1.0 + BUSY_MACHINE_S
        # Otherwise the directory had not heard of it yet, or the second node asks the first for nothing for a while.
        return other.metrics().get("vllm:reprise_failed_blocks", 0) > before

    eventually(hangs_in_a_load, within=60.0)


def test_damage_on_nvme_costs_time_only_and_is_counted(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    tokens = prompt(9)
    expected = plain.generate([tokens])["tokens"]
    see(engine, tokens)
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
        damage(cluster.agents[0].pool)
        engine.forget()
        before = engine.metrics().get("vllm:reprise_failed_blocks", 0)
        told = engine.generate([tokens])
        assert told["tokens"] == expected
        assert told["reasons"] == ["length"]
        assert told["cached"][0] < PROMPT_BLOCKS * BLOCK_TOKENS
        assert engine.metrics()["vllm:reprise_failed_blocks"] > before


def test_damage_in_dram_costs_time_only_and_is_counted(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    tokens = prompt(10)
    expected = plain.generate([tokens])["tokens"]
    see(engine, tokens)
    engine.forget()
    before = engine.metrics().get("vllm:reprise_failed_blocks", 0)
    damage_memory(cluster.agents[0])
    told = engine.generate([tokens])
    assert told["tokens"] == expected
    assert told["reasons"] == ["length"]
    assert engine.metrics()["vllm:reprise_failed_blocks"] > before
