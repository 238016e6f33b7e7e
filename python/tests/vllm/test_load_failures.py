"""Tests loads of which some blocks fail: vLLM computes from the first of them on, and nothing wrong is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import MIB, Agent, Cluster
from engine_checks import PROMPT_BLOCKS, prompt
from engine_model import model
from stepped_engine import TOKENS, SteppedEngine, expected, lose, spoil, stepped_engine
from vllm.v1.request import Request, RequestStatus

from reprise.vllm import scheduler

WHOLE = PROMPT_BLOCKS * TOKENS
LENGTH = len(prompt(0))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """Agent that only these tests use."""
    cluster = Cluster(tmp_path_factory.mktemp("failures") / "cluster", arena=64 * MIB, pool=128 * MIB)
    yield cluster.agents[0]
    cluster.stop()


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model whose forward pass is not used."""
    return model(tmp_path_factory.mktemp("failures") / "model", seed=3)


@pytest.fixture(params=[False, True], ids=["between-steps", "layer-wise"])
def layerwise(request: pytest.FixtureRequest) -> bool:
    """Whether blocks are loaded during the computation of their request."""
    return bool(request.param)


@pytest.fixture
def stepped(
    small_model: Path, node: Agent, layerwise: bool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SteppedEngine]:
    """Engine of either kind."""
    # A request that returns gets a new match, however recent the last one was.
    monkeypatch.setattr(scheduler, "ANSWER_KEPT_S", 0.0)
    with stepped_engine(small_model, node, monkeypatch, layerwise_loads=layerwise) as made:
        yield made


def computed_with_load(layerwise: bool, end: int) -> list[tuple[int, int]]:
    """Returns the positions that a request computes before the failure of its load is known."""
    return [(WHOLE, end)] if layerwise else []


def check_request(engine: SteppedEngine, request: Request) -> None:
    """Checks that the results of an ended request are correct everywhere, and that nothing is still in use."""
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert list(request.output_token_ids) == expected(request.prompt_token_ids or [], request.max_tokens)
    engine.check_nothing_is_held()
    # Checks the blocks that vLLM would reuse.
    engine.cached(request)
    assert engine.saved(request) == [True] * len(request.block_hashes)


@pytest.mark.parametrize(("fault", "lost"), [("gone", 0), ("gone", 3), ("gone", 7), ("damaged", 3)])
def test_a_request_computes_from_the_first_failed_block_on(
    stepped: SteppedEngine, node: Agent, layerwise: bool, fault: str, lost: int
) -> None:
    tokens = prompt(500 + 10 * lost + 2 * (fault == "gone") + layerwise)
    stepped.serve_and_save(tokens)
    if fault == "damaged":
        spoil(node, tokens, lost)
    request = stepped.add(tokens)
    output = stepped.scheduled_load(request)
    assert request.num_computed_tokens == (LENGTH if layerwise else WHOLE), "vLLM expects the load to succeed"
    if fault == "gone":
        lose(output, request, lost)
    stepped.end(output)
    stepped.step_until(lambda: request.num_computed_tokens < WHOLE)
    assert request.num_computed_tokens == lost * TOKENS
    assert list(request.output_token_ids) == [], "no token of the discarded computation is returned"
    stepped.finish()
    assert stepped.computed[request.request_id] == [*computed_with_load(layerwise, LENGTH), (lost * TOKENS, LENGTH)]
    check_request(stepped, request)
    if not layerwise:
        assert stepped.cached(request) == PROMPT_BLOCKS
    # The next request finds all blocks.
    stepped.clear_cache()
    again = stepped.add(tokens)
    stepped.finish()
    assert stepped.computed[again.request_id] == [(WHOLE, LENGTH)]
    check_request(stepped, again)


def test_only_the_request_whose_load_failed_computes_a_common_prefix(stepped: SteppedEngine, layerwise: bool) -> None:
    stem = prompt(600 + layerwise, blocks=4, tail=0)
    prompts = [stem + prompt(seed + layerwise, blocks=PROMPT_BLOCKS - 4) for seed in (610, 620)]
    for tokens in prompts:
        stepped.serve_and_save(tokens)
    failed, whole = (stepped.add(tokens) for tokens in prompts)
    output = stepped.scheduled_load(failed)
    # A block of the common prefix.
    lose(output, failed, 2)
    stepped.end(output)
    stepped.finish()
    assert stepped.computed[failed.request_id] == [*computed_with_load(layerwise, LENGTH), (2 * TOKENS, LENGTH)]
    assert stepped.computed[whole.request_id] == [(WHOLE, LENGTH)]
    for request in (failed, whole):
        check_request(stepped, request)
    # A request that finds the prefix in vLLM's own cache.
    third = stepped.add(stem + prompt(630 + layerwise, blocks=1))
    stepped.finish()
    assert stepped.computed[third.request_id][0][0] >= len(stem)
    check_request(stepped, third)


def test_a_request_aborted_before_its_failure_is_known_leaves_no_wrong_blocks(
    stepped: SteppedEngine, layerwise: bool
) -> None:
    tokens = prompt(640 + layerwise)
    stepped.serve_and_save(tokens)
    aborted = stepped.add(tokens)
    output = stepped.scheduled_load(aborted)
    lose(output, aborted, 4)
    result = stepped.work(output)
    # As vLLM handles aborts that arrive during a step.
    stepped.abort(aborted)
    stepped.scheduler.update_from_output(output, result)
    stepped.finish()
    stepped.check_nothing_is_held()
    assert stepped.cached(aborted) == 0, "the contents of its blocks are unknown"
    again = stepped.add(tokens)
    stepped.finish()
    assert stepped.computed[again.request_id] == [(WHOLE, LENGTH)], "the blocks were loaded"
    check_request(stepped, again)


def test_a_preempted_request_whose_load_fails_continues_at_its_position(
    stepped: SteppedEngine, layerwise: bool
) -> None:
    tokens = prompt(650 + layerwise)
    stepped.serve_and_save(tokens)
    request = stepped.add(tokens, max_tokens=4)
    stepped.step_until(lambda: request.num_output_tokens == 2)
    stepped.clear_cache(preempt=True)
    assert (request.status, request.num_preemptions) == (RequestStatus.PREEMPTED, 1)
    output = stepped.scheduled_load(request)
    lose(output, request, 3)
    stepped.end(output)
    stepped.finish()
    so_far = LENGTH + 2
    assert stepped.computed[request.request_id] == [
        (WHOLE, LENGTH),
        (LENGTH, LENGTH + 1),
        *computed_with_load(layerwise, so_far),
        (3 * TOKENS, so_far),
        (so_far, so_far + 1),
    ]
    check_request(stepped, request)


@pytest.mark.parametrize("layerwise", [True], indirect=True)
def test_a_request_preempted_after_a_failed_load_computes_everything(stepped: SteppedEngine) -> None:
    tokens = prompt(660)
    stepped.serve_and_save(tokens)
    request = stepped.add(tokens, max_tokens=2)
    output = stepped.scheduled_load(request)
    lose(output, request, 5)
    stepped.end(output)
    assert (request.status, request.num_computed_tokens) == (RequestStatus.RUNNING, 5 * TOKENS)
    stepped.clear_cache(preempt=True)
    stepped.finish()
    assert request.num_preemptions == 1
    assert stepped.computed[request.request_id] == [(WHOLE, LENGTH), (0, LENGTH), (LENGTH, LENGTH + 1)]
    check_request(stepped, request)
