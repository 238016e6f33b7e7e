"""What an engine says with Reprise is what it says without, wherever its KV comes from."""

from __future__ import annotations

import itertools
import signal

import outages
import pytest
from cluster import Cluster
from engine import BLOCK_TOKENS, Engine
from faults import damage, damage_memory, drop_dram, eventually, found_damaged, observer
from serving import PROMPT_BLOCKS, preempt_each_other, prompt, see, see_again

OUTAGES = [signal.SIGKILL, signal.SIGSTOP]


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
    preempt_each_other(plain, engine, seed=40)


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
    (expected,), recompute = outages.computed(plain, [tokens])
    see(engine, tokens)
    agent = cluster.agents[0]
    with observer(agent) as before:
        drop_dram(before)
        sessions = before.stats()["sessions"]
    agent.kill()
    engine.forget()
    outages.check(engine.generate([tokens]), [expected], recompute)
    agent.start()
    with observer(agent) as after:
        # Scheduler and worker of the engine, and this one.
        eventually(lambda: after.stats()["sessions"] >= sessions)
        from_nvme = after.stats()["hit_blocks_own_nvme"]
        engine.forget()
        told = engine.generate([tokens])
        assert told["tokens"] == [expected]
        assert told["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS], "on the first try: it was not saved anew"
        assert after.stats()["hit_blocks_own_nvme"] == from_nvme + PROMPT_BLOCKS


@pytest.mark.parametrize("number", OUTAGES)
def test_an_agent_that_goes_in_the_middle_of_loads_costs_time_only(
    plain: Engine, engine: Engine, cluster: Cluster, number: signal.Signals
) -> None:
    outages.goes_during_loads(plain, engine, cluster.agents[0], number, seed=1000 + 10 * number)


@pytest.mark.parametrize("number", OUTAGES)
def test_an_agent_that_goes_in_the_middle_of_saves_costs_time_only(
    plain: Engine, engine: Engine, cluster: Cluster, number: signal.Signals
) -> None:
    outages.goes_during_saves(plain, engine, cluster.agents[0], number, seed=10_000 * number)


def test_an_agent_that_hangs_costs_a_second_at_the_most(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    outages.hangs_before_it_is_asked(plain, engine, cluster.agents[0], seed=7)


def test_an_agent_of_another_node_that_hangs_costs_time_only(
    plain: Engine, engine: Engine, other: Engine, cluster: Cluster
) -> None:
    outages.peer_hangs_during_loads(plain, engine, cluster.agents[0], other, cluster.agents[1], seed=1500)


def test_damage_on_nvme_costs_time_only_and_is_counted(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    tokens = prompt(9)
    expected = plain.generate([tokens])["tokens"]
    see(engine, tokens)
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
        damage(cluster.agents[0].pool)
        engine.forget()
        before, dropped = engine.metrics().get("vllm:reprise_failed_blocks", 0), found_damaged(agent)
        told = engine.generate([tokens])
        assert told["tokens"] == expected
        assert told["reasons"] == ["length"]
        assert told["cached"][0] < PROMPT_BLOCKS * BLOCK_TOKENS
        assert engine.metrics()["vllm:reprise_failed_blocks"] > before
        eventually(lambda: found_damaged(agent) > dropped)


def test_damage_in_dram_costs_time_only_and_is_counted(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    tokens = prompt(10)
    expected = plain.generate([tokens])["tokens"]
    see(engine, tokens)
    engine.forget()
    with observer(cluster.agents[0]) as agent:
        before, dropped = engine.metrics().get("vllm:reprise_failed_blocks", 0), found_damaged(agent)
        damage_memory(cluster.agents[0])
        told = engine.generate([tokens])
        assert told["tokens"] == expected
        assert told["reasons"] == ["length"]
        assert told["cached"][0] < PROMPT_BLOCKS * BLOCK_TOKENS
        assert engine.metrics()["vllm:reprise_failed_blocks"] > before
        eventually(lambda: found_damaged(agent) > dropped)
