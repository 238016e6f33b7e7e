"""A load of which some blocks do not come: vLLM computes from the first of them on, and nothing wrong is cached, saved or said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import MIB, Agent, Cluster
from engine_model import model
from serving import PROMPT_BLOCKS, prompt
from stepped import TOKENS, SteppedEngine, expected, lose, spoil, stepped_engine
from vllm.v1.request import Request, RequestStatus

from reprise.vllm import scheduler

WHOLE = PROMPT_BLOCKS * TOKENS
LENGTH = len(prompt(0))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent of these tests' own."""
    cluster = Cluster(tmp_path_factory.mktemp("failures") / "cluster", arena=64 * MIB, pool=128 * MIB)
    yield cluster.agents[0]
    cluster.stop()


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that nobody computes."""
    return model(tmp_path_factory.mktemp("failures") / "model", seed=3)


@pytest.fixture(params=[False, True], ids=["between-steps", "layer-wise"])
def layerwise(request: pytest.FixtureRequest) -> bool:
    """Whether blocks are loaded while their request computes."""
    return bool(request.param)


@pytest.fixture
def stepped(
    small_model: Path, node: Agent, layerwise: bool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SteppedEngine]:
    """An engine of either kind."""
    # A request that comes back is asked about anew, however short it was away.
    monkeypatch.setattr(scheduler, "ANSWER_KEPT_S", 0.0)
    with stepped_engine(small_model, node, monkeypatch, layerwise_loads=layerwise) as made:
        yield made


def in_the_step_of_the_load(layerwise: bool, end: int) -> list[tuple[int, int]]:
    """What a request computes before it is known that its load has failed."""
    return [(WHOLE, end)] if layerwise else []


def check_whole(engine: SteppedEngine, request: Request) -> None:
    """What is left of a request that has ended is right, on every side, and nobody holds any of it."""
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert list(request.output_token_ids) == expected(request.prompt_token_ids or [], request.max_tokens)
    engine.check_nothing_is_held()
    # Checks what vLLM would give to others.
    engine.cached(request)
    assert engine.saved(request) == [True] * len(request.block_hashes)


@pytest.mark.parametrize(("fault", "lost"), [("gone", 0), ("gone", 3), ("gone", 7), ("damaged", 3)])
def test_a_request_computes_from_the_first_block_on_that_does_not_come(
    stepped: SteppedEngine, node: Agent, layerwise: bool, fault: str, lost: int
) -> None:
    tokens = prompt(500 + 10 * lost + 2 * (fault == "gone") + layerwise)
    stepped.see(tokens)
    if fault == "damaged":
        spoil(node, tokens, lost)
    asked = stepped.add(tokens)
    output = stepped.scheduled_load(asked)
    assert asked.num_computed_tokens == (LENGTH if layerwise else WHOLE), "vLLM counts on it"
    if fault == "gone":
        lose(output, asked, lost)
    stepped.end(output)
    stepped.until(lambda: asked.num_computed_tokens < WHOLE)
    assert asked.num_computed_tokens == lost * TOKENS
    assert list(asked.output_token_ids) == [], "nothing is said of what was computed with it"
    stepped.rest()
    assert stepped.computed[asked.request_id] == [*in_the_step_of_the_load(layerwise, LENGTH), (lost * TOKENS, LENGTH)]
    check_whole(stepped, asked)
    if not layerwise:
        assert stepped.cached(asked) == PROMPT_BLOCKS
    # And it is there for the next.
    stepped.forget()
    again = stepped.add(tokens)
    stepped.rest()
    assert stepped.computed[again.request_id] == [(WHOLE, LENGTH)]
    check_whole(stepped, again)


def test_of_two_requests_that_share_a_prefix_only_the_one_whose_load_failed_computes_it(
    stepped: SteppedEngine, layerwise: bool
) -> None:
    stem = prompt(600 + layerwise, blocks=4, tail=0)
    prompts = [stem + prompt(seed + layerwise, blocks=PROMPT_BLOCKS - 4) for seed in (610, 620)]
    for tokens in prompts:
        stepped.see(tokens)
    failed, whole = (stepped.add(tokens) for tokens in prompts)
    output = stepped.scheduled_load(failed)
    # In what both have.
    lose(output, failed, 2)
    stepped.end(output)
    stepped.rest()
    assert stepped.computed[failed.request_id] == [*in_the_step_of_the_load(layerwise, LENGTH), (2 * TOKENS, LENGTH)]
    assert stepped.computed[whole.request_id] == [(WHOLE, LENGTH)]
    for asked in (failed, whole):
        check_whole(stepped, asked)
    # One that finds the prefix in vLLM's own cache.
    third = stepped.add(stem + prompt(630 + layerwise, blocks=1))
    stepped.rest()
    assert stepped.computed[third.request_id][0][0] >= len(stem)
    check_whole(stepped, third)


def test_a_request_that_is_aborted_before_its_failure_is_known_leaves_nothing_wrong_behind(
    stepped: SteppedEngine, layerwise: bool
) -> None:
    tokens = prompt(640 + layerwise)
    stepped.see(tokens)
    gone = stepped.add(tokens)
    output = stepped.scheduled_load(gone)
    lose(output, gone, 4)
    result = stepped.work(output)
    # As vLLM does with what its clients have said while the step was computed.
    stepped.abort(gone)
    stepped.scheduler.update_from_output(output, result)
    stepped.rest()
    stepped.check_nothing_is_held()
    assert stepped.cached(gone) == 0, "nobody knows what its blocks hold"
    again = stepped.add(tokens)
    stepped.rest()
    assert stepped.computed[again.request_id] == [(WHOLE, LENGTH)], "it was loaded"
    check_whole(stepped, again)


def test_a_request_that_was_preempted_and_whose_load_fails_goes_on_where_it_was(
    stepped: SteppedEngine, layerwise: bool
) -> None:
    tokens = prompt(650 + layerwise)
    stepped.see(tokens)
    asked = stepped.add(tokens, max_tokens=4)
    stepped.until(lambda: asked.num_output_tokens == 2)
    stepped.forget(preempt=True)
    assert (asked.status, asked.num_preemptions) == (RequestStatus.PREEMPTED, 1)
    output = stepped.scheduled_load(asked)
    lose(output, asked, 3)
    stepped.end(output)
    stepped.rest()
    so_far = LENGTH + 2
    assert stepped.computed[asked.request_id] == [
        (WHOLE, LENGTH),
        (LENGTH, LENGTH + 1),
        *in_the_step_of_the_load(layerwise, so_far),
        (3 * TOKENS, so_far),
        (so_far, so_far + 1),
    ]
    check_whole(stepped, asked)


@pytest.mark.parametrize("layerwise", [True], indirect=True)
def test_a_request_that_is_preempted_when_its_load_has_failed_computes_everything(stepped: SteppedEngine) -> None:
    tokens = prompt(660)
    stepped.see(tokens)
    asked = stepped.add(tokens, max_tokens=2)
    output = stepped.scheduled_load(asked)
    lose(output, asked, 5)
    stepped.end(output)
    assert (asked.status, asked.num_computed_tokens) == (RequestStatus.RUNNING, 5 * TOKENS)
    stepped.forget(preempt=True)
    stepped.rest()
    assert asked.num_preemptions == 1
    assert stepped.computed[asked.request_id] == [(WHOLE, LENGTH), (0, LENGTH), (LENGTH, LENGTH + 1)]
    check_whole(stepped, asked)
