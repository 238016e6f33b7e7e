"""Tests that an engine with Reprise answers like an engine without, for every source of its KV."""

from __future__ import annotations

import itertools
import signal

import outages
import pytest
from cluster import Cluster
from engine import BLOCK_TOKENS, Engine
from engine_checks import PROMPT_BLOCKS, preempt_each_other, prompt, serve_and_save, serve_from_reprise
from faults import damage, damage_memory, drop_dram, eventually, found_damaged, observer

OUTAGES = [signal.SIGKILL, signal.SIGSTOP]


def test_a_saved_prompt_is_loaded_from_dram_and_gives_the_same_tokens(plain: Engine, engine: Engine) -> None:
    tokens = prompt(1)
    expected = plain.generate([tokens])["tokens"]
    cold = serve_and_save(engine, tokens)
    assert cold["tokens"] == expected
    assert cold["cached"] == [0]
    assert serve_from_reprise(engine, tokens)["tokens"] == expected


def test_a_prompt_of_full_blocks_computes_only_its_last_token(plain: Engine, engine: Engine) -> None:
    tokens = prompt(2, tail=0)
    expected = plain.generate([tokens])["tokens"]
    assert serve_and_save(engine, tokens)["tokens"] == expected
    engine.clear_cache()
    warm = engine.generate([tokens])
    assert warm["tokens"] == expected
    assert warm["cached"][0] >= len(tokens) - 1


def test_prompts_with_a_common_prefix_load_it_and_compute_the_rest(plain: Engine, engine: Engine) -> None:
    stem = prompt(3, tail=0)
    prompts = [stem + prompt(30 + index, blocks=1) for index in range(4)]
    expected = plain.generate(prompts)["tokens"]
    serve_and_save(engine, stem)
    engine.clear_cache()
    warm = engine.generate(prompts)
    assert warm["tokens"] == expected
    assert all(cached >= PROMPT_BLOCKS * BLOCK_TOKENS for cached in warm["cached"]), warm["cached"]


def from_peers(stats: dict[str, int]) -> int:
    """Returns the number of blocks that an agent has loaded from other nodes."""
    return stats["hit_blocks_peer_dram"] + stats["hit_blocks_peer_nvme"]


def test_an_engine_on_another_node_finds_the_blocks(
    plain: Engine, engine: Engine, other: Engine, cluster: Cluster
) -> None:
    seeds = itertools.count(400)
    with observer(cluster.agents[0]) as first, observer(cluster.agents[1]) as second:

        def is_found_immediately() -> bool:
            # A new prompt each time, because a missed one is also saved on the second node.
            tokens = prompt(next(seeds))
            serve_and_save(engine, tokens)
            drop_dram(first)
            before = from_peers(second.stats())
            answer = other.generate([tokens])
            assert answer["tokens"] == plain.generate([tokens])["tokens"]
            if answer["cached"] != [PROMPT_BLOCKS * BLOCK_TOKENS]:
                # The directory does not have the blocks yet.
                return False
            assert from_peers(second.stats()) == before + PROMPT_BLOCKS
            return True

        eventually(is_found_immediately, within=60.0)


def test_a_prompt_only_on_nvme_gives_the_same_tokens(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    tokens = prompt(8)
    expected = plain.generate([tokens])["tokens"]
    serve_and_save(engine, tokens)
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
        from_nvme = agent.stats()["hit_blocks_own_nvme"]
        assert serve_from_reprise(engine, tokens)["tokens"] == expected
        assert agent.stats()["hit_blocks_own_nvme"] == from_nvme + PROMPT_BLOCKS


def test_requests_with_common_prefixes_that_preempt_each_other_give_the_same_tokens(
    plain: Engine, engine: Engine
) -> None:
    preempt_each_other(plain, engine, seed=40)


def test_salts_do_not_share(plain: Engine, engine: Engine) -> None:
    tokens = prompt(5)
    expected = plain.generate([tokens])["tokens"]
    serve_and_save(engine, tokens, salt="one")
    engine.clear_cache()
    again = engine.generate([tokens], salt="two")
    assert again["tokens"] == expected
    assert again["cached"] == [0]
    assert serve_from_reprise(engine, tokens, salt="one")["tokens"] == expected


def test_a_killed_agent_only_costs_time_and_has_the_durable_blocks_after_its_restart(
    plain: Engine, engine: Engine, cluster: Cluster
) -> None:
    tokens = prompt(6)
    (expected,), recompute = outages.computed(plain, [tokens])
    serve_and_save(engine, tokens)
    agent = cluster.agents[0]
    with observer(agent) as before:
        drop_dram(before)
        sessions = before.stats()["sessions"]
    agent.kill()
    engine.clear_cache()
    outages.check(engine.generate([tokens]), [expected], recompute)
    agent.start()
    with observer(agent) as after:
        # Sessions of the engine's scheduler and worker, and of this test.
        eventually(lambda: after.stats()["sessions"] >= sessions)
        from_nvme = after.stats()["hit_blocks_own_nvme"]
        engine.clear_cache()
        answer = engine.generate([tokens])
        assert answer["tokens"] == [expected]
        assert answer["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS], "found on the first try, without another save"
        assert after.stats()["hit_blocks_own_nvme"] == from_nvme + PROMPT_BLOCKS


@pytest.mark.parametrize("number", OUTAGES)
def test_an_outage_of_the_agent_during_loads_only_costs_time(
    plain: Engine, engine: Engine, cluster: Cluster, number: signal.Signals
) -> None:
    outages.check_outage_during_loads(plain, engine, cluster.agents[0], number, seed=1000 + 10 * number)


@pytest.mark.parametrize("number", OUTAGES)
def test_an_outage_of_the_agent_during_saves_only_costs_time(
    plain: Engine, engine: Engine, cluster: Cluster, number: signal.Signals
) -> None:
    outages.check_outage_during_saves(plain, engine, cluster.agents[0], number, seed=10_000 * number)


def test_a_hanging_agent_costs_at_most_a_second(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    outages.check_hang_before_match(plain, engine, cluster.agents[0], seed=7)


def test_a_hanging_agent_of_another_node_only_costs_time(
    plain: Engine, engine: Engine, other: Engine, cluster: Cluster
) -> None:
    outages.check_peer_hang_during_loads(plain, engine, cluster.agents[0], other, cluster.agents[1], seed=1500)


def test_damage_on_nvme_only_costs_time_and_is_counted(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    tokens = prompt(9)
    expected = plain.generate([tokens])["tokens"]
    serve_and_save(engine, tokens)
    with observer(cluster.agents[0]) as agent:
        drop_dram(agent)
        damage(cluster.agents[0].pool)
        engine.clear_cache()
        before, dropped = engine.metrics().get("vllm:reprise_failed_blocks", 0), found_damaged(agent)
        answer = engine.generate([tokens])
        assert answer["tokens"] == expected
        assert answer["reasons"] == ["length"]
        assert answer["cached"][0] < PROMPT_BLOCKS * BLOCK_TOKENS
        assert engine.metrics()["vllm:reprise_failed_blocks"] > before
        eventually(lambda: found_damaged(agent) > dropped)


def test_damage_in_dram_only_costs_time_and_is_counted(plain: Engine, engine: Engine, cluster: Cluster) -> None:
    tokens = prompt(10)
    expected = plain.generate([tokens])["tokens"]
    serve_and_save(engine, tokens)
    engine.clear_cache()
    with observer(cluster.agents[0]) as agent:
        before, dropped = engine.metrics().get("vllm:reprise_failed_blocks", 0), found_damaged(agent)
        damage_memory(cluster.agents[0])
        answer = engine.generate([tokens])
        assert answer["tokens"] == expected
        assert answer["reasons"] == ["length"]
        assert answer["cached"][0] < PROMPT_BLOCKS * BLOCK_TOKENS
        assert engine.metrics()["vllm:reprise_failed_blocks"] > before
        eventually(lambda: found_damaged(agent) > dropped)
