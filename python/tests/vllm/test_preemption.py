"""Swap of preempted requests, with vLLM's own scheduler, a memory for 63 blocks and a real agent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from cluster import Cluster
from engine_checks import prompt
from stepped_engine import SteppedEngine, expected, stepped_engine

PROMPT, LONG, SEEDS = 12, 200, (21, 22, 23, 24)
"""Blocks of each prompt, and tokens that each request generates: 19 blocks at its end."""


def serve(engine: SteppedEngine) -> tuple[list[list[int]], int]:
    """Serves requests that need 76 blocks at their end; returns their answers and the number of preemptions."""
    requests = [engine.add(prompt(seed, blocks=PROMPT), max_tokens=LONG) for seed in SEEDS]
    engine.finish()
    return [list(each.output_token_ids) for each in requests], sum(each.num_preemptions for each in requests)


@pytest.mark.parametrize("saves_generated", [True, False])
def test_preempted_requests_load_their_generated_tokens_and_answer_as_without_preemption(
    saves_generated: bool, weights: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stepped_engine(weights, cluster.agents[0], monkeypatch, save_decode_blocks=saves_generated) as engine:
        counted: Counter[str] = Counter()
        # vLLM takes the statistics after each step.
        stats = engine.connector._scheduler.stats
        monkeypatch.setattr(stats, "add", lambda name, count: counted.update({name: count}))
        answers, preemptions = serve(engine)
        assert answers == [expected(prompt(seed, blocks=PROMPT), LONG) for seed in SEEDS]
        assert preemptions > 0
        assert counted["swapped_in_blocks"] > 0
        if not saves_generated:
            assert counted["swapped_out_blocks"] > 0, "blocks of generated tokens, which no step has saved"
        engine.check_nothing_is_held()
