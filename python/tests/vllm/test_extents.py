"""vLLM's engine whose blocks move through extents: rings on a controller that the agent emulates, and pool files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from engine import BLOCK_TOKENS, Engine, connector
from engine_checks import PROMPT_BLOCKS, counters, prompt, serve_and_save, serve_from_reprise
from faults import observer

PATIENT = {"load_stall_ms": 5000.0, "load_standstill_ms": 5000.0}
"""Times that a busy machine does not exceed."""

BACKENDS = {"queues": "gpu-queue-emulated", "files": "staged-host"}


@pytest.fixture(params=sorted(BACKENDS))
def lent(request: pytest.FixtureRequest, home: Path) -> Iterator[tuple[str, Cluster]]:
    """What the agent of a cluster lends, and the cluster."""
    cluster = Cluster(home / f"cluster-{request.param}", lends=request.param)
    yield request.param, cluster
    cluster.stop()


def test_blocks_move_by_the_backend_with_equal_answers_and_a_killed_agent_costs_only_misses(
    lent: tuple[str, Cluster], plain: Engine, home: Path, weights: Path
) -> None:
    lends, cluster = lent
    agent = cluster.agents[0]
    tokens = [prompt(900 + number) for number in range(2)]
    expected = [plain.generate([one])["tokens"] for one in tokens]
    log = home / f"extents-{lends}.log"
    engine = Engine(weights, log, connector(agent.socket, **PATIENT), environment={"VLLM_LOGGING_LEVEL": "INFO"})
    try:
        first = serve_and_save(engine, tokens[0])
        assert (first["tokens"], first["cached"]) == (expected[0], [0])
        again = serve_from_reprise(engine, tokens[0])
        assert again["tokens"] == expected[0]
        counts = counters(engine)
        print(f"backend {BACKENDS[lends]}: {counts}")
        assert counts["extent_saved_blocks"] >= PROMPT_BLOCKS
        assert counts["extent_loaded_blocks"] == counts["loaded_blocks"] >= PROMPT_BLOCKS
        with observer(agent) as seen:
            stats = seen.stats()
        assert stats["loads"] == 0, "no block went through the arena"
        assert stats["extent_commits"] >= PROMPT_BLOCKS
        agent.kill()
        engine.clear_cache()
        without = engine.generate([tokens[0]])
        assert (without["tokens"], without["cached"], without["reasons"]) == (expected[0], [0], ["length"])
        agent.start()
        assert serve_and_save(engine, tokens[1])["tokens"] == expected[1]
        for one, answer in zip(tokens, expected, strict=True):
            served = serve_from_reprise(engine, one)
            assert (served["tokens"], served["cached"]) == (answer, [PROMPT_BLOCKS * BLOCK_TOKENS])
    finally:
        engine.stop()
    assert f"backend of loads: {BACKENDS[lends]}, of saves: {BACKENDS[lends]}" in log.read_text()
