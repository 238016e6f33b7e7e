"""Load or recompute in the connector: vLLM's block pool with match results set by the test, and a stepped engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import Cluster
from stepped_engine import TOKENS as ENGINE_TOKENS
from stepped_engine import expected, metadata_of, stepped_engine
from test_scheduler import TOKENS, FakeSession, blocks_of, output, request, side

from reprise import Source
from reprise.recompute import Prefill
from reprise.vllm.metadata import LoadTime, RepriseWorkerMetadata

SLOW_S, FAST_S = 10.0, 1e-6
"""Times of a step of 1,000 tokens: far slower and far faster than any load."""


def measured(scheduler: Any, step_s: float, load_s: float) -> None:
    """Sets the rates of computation and loads."""
    chooser = scheduler._chooser
    chooser.observe_step(Prefill(1000, 500.0), step_s)
    chooser.started("load", (4, 0, 0, 0))
    chooser.measured("load", (4, 0, 0, 0), load_s)
    chooser.ended("load")


@pytest.mark.parametrize(("step_s", "blocks"), [(SLOW_S, 5), (FAST_S, 0)])
def test_request_takes_the_faster_of_loading_and_computing(step_s: float, blocks: int) -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM] * 5))
    measured(scheduler, step_s, 0.001)
    new_request = request(8)
    assert scheduler.matched_tokens(new_request, 0) == (blocks * TOKENS, blocks > 0)
    name = "decisions_load" if blocks else "decisions_compute"
    assert scheduler.stats.data[name] == 1
    assert scheduler.stats.data.get("recomputed_blocks", 0) == 5 - blocks
    assert scheduler.matched_tokens(new_request, 0) == (blocks * TOKENS, blocks > 0)
    assert scheduler.stats.data[name] == 1, "vLLM asks again if it has no space"
    # Blocks that are computed although Reprise has them are not saved again.
    (save,) = scheduler.step(output({"r": (0, 8 * TOKENS)}, {"r": list(range(1, 9))})).saves
    assert save.blocks == (6, 7, 8)


def test_part_of_a_chain_is_loaded_with_the_limit_of_its_wait() -> None:
    answer = [Source.OWN_DRAM] * 2 + [Source.PEER_NVME] * 3
    scheduler = side(FakeSession(answer=answer), recompute_wait_base_ms=100.0, recompute_wait_per_token_us=1000.0)
    measured(scheduler, 1.0, 0.001)
    chooser = scheduler._chooser
    chooser.started("load", (0, 0, 0, 4))
    chooser.measured("load", (0, 0, 0, 4), 100.0)
    chooser.ended("load")
    new_request = request(8)
    assert scheduler.matched_tokens(new_request, 0) == (2 * TOKENS, True)
    scheduler.allocated(new_request, blocks_of(list(range(1, 9))), 2 * TOKENS)
    (load,) = scheduler.step(output({}, {})).loads
    assert load.blocks == (1, 2)
    assert load.limit == pytest.approx((0.132, 0.016))
    times = [LoadTime("r", (2, 0, 0, 0), 0.001)]
    ended = RepriseWorkerMetadata(load_times=times)
    ended.ended_loads["r"] = 1
    scheduler.handle_worker_output(SimpleNamespace(kv_connector_worker_meta=ended))
    assert chooser._started == {}


def test_steps_are_measured_with_the_tokens_of_prompts() -> None:
    scheduler = side(FakeSession())
    scheduler.matched_tokens(request(20), 0)
    scheduler.step(output({"r": (0, 20 * TOKENS), "decodes": (9, 1)}, {"r": list(range(1, 21)), "decodes": [21]}))
    assert scheduler._chooser.policy.limit(1, 0) is None
    scheduler.step(output({"r": (20 * TOKENS, 1)}, {"r": list(range(1, 22))}))
    assert scheduler._chooser.policy.limit(1, 0) is not None


@pytest.mark.parametrize("options", [{"load_or_recompute": False}, {"layerwise_loads": True}])
def test_everything_is_loaded_without_decisions(options: dict[str, bool]) -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM] * 5), **options)
    assert scheduler._chooser is None
    new_request = request(8)
    tokens, _ = scheduler.matched_tokens(new_request, 0)
    assert tokens == 5 * TOKENS
    scheduler.allocated(new_request, blocks_of(list(range(1, 9))), tokens)
    (load,) = scheduler.step(output({}, {})).loads
    assert load.limit is None


def test_answers_are_equal_whether_blocks_are_loaded_or_computed(
    weights: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [3 + token % 200 for token in range(10 * ENGINE_TOKENS + 5)]
    with stepped_engine(weights, cluster.agents[0], monkeypatch, load_or_recompute=True) as engine:
        engine.serve_and_save(prompt)
        chooser = engine.connector._scheduler._chooser
        loaded = engine.add(prompt)
        output = engine.scheduled_load(loaded)
        (plan,) = metadata_of(output).loads
        assert len(plan.blocks) == 10
        engine.end(output)
        engine.finish()
        assert chooser._started == {}
        engine.clear_cache()
        # The load has measured the source; computing is made faster than that.
        for _ in range(64):
            chooser.observe_step(Prefill(1000, 500.0), FAST_S)
        computed = engine.add(prompt)
        engine.finish()
        assert engine.computed[computed.request_id] == [(0, len(prompt))]
        answers = [list(request.output_token_ids) for request in (loaded, computed)]
        assert answers == [expected(prompt)] * 2
        engine.clear_cache()
        engine.check_nothing_is_held()
