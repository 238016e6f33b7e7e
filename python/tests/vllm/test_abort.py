"""A request that is aborted while its blocks are loaded or saved gives everything back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import MIB, Agent, Cluster
from engine_model import model
from faults import eventually, freeze, observer, thaw
from serving import PROMPT_BLOCKS, prompt
from stepped import SteppedEngine, stepped_engine
from vllm.v1.request import RequestStatus


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A member and an agent, which are killed here."""
    made = Cluster(tmp_path / "cluster", arena=64 * MIB, pool=128 * MIB)
    yield made
    made.stop()


@pytest.fixture
def stepped(own_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppedEngine]:
    """An engine whose loads wait for as long as its agent is stopped."""
    with stepped_engine(model(tmp_path / "model"), own_cluster.agents[0], monkeypatch) as made:
        yield made


def go_on(agent: Agent) -> None:
    """The agent answers what it was asked."""
    thaw(agent)


def end(agent: Agent) -> None:
    """The agent never answers, and another is there."""
    agent.restart()


@pytest.mark.parametrize("outcome", [go_on, end])
def test_a_request_that_is_aborted_while_it_is_loaded_gives_everything_back(
    stepped: SteppedEngine, own_cluster: Cluster, outcome: Callable[[Agent], None]
) -> None:
    (agent,) = own_cluster.agents
    stepped.add(prompt(1))
    stepped.rest()
    with observer(agent) as seen:
        eventually(lambda: seen.stats()["nvme_blocks"] >= PROMPT_BLOCKS)
    assert stepped.scheduler.reset_prefix_cache()
    loaded = stepped.add(prompt(1))
    output = stepped.schedule()
    assert loaded.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    freeze(agent)
    # The load is submitted to an agent that does not answer.
    stepped.scheduler.update_from_output(output, stepped.work(output))
    stepped.abort(loaded)
    for _ in range(3):
        stepped.step()
    assert stepped.free_blocks <= stepped.free_at_first - PROMPT_BLOCKS, "a load still writes to these blocks"
    assert stepped.scheduler.has_requests(), "vLLM goes on until they are free"
    outcome(agent)
    stepped.rest()
    stepped.check_nothing_is_held()
    with observer(agent) as seen:
        eventually(lambda: seen.stats()["read_leases"] == 0)
    # And it is of use to the next.
    again = stepped.add(prompt(1))
    stepped.rest()
    assert again.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert stepped.scheduler.reset_prefix_cache()
    stepped.check_nothing_is_held()


@pytest.mark.parametrize("outcome", [go_on, end])
def test_a_request_that_is_aborted_while_it_is_saved_gives_everything_back(
    stepped: SteppedEngine, own_cluster: Cluster, outcome: Callable[[Agent], None]
) -> None:
    (agent,) = own_cluster.agents
    saved = stepped.add(prompt(2))
    output = stepped.schedule()
    assert output.num_scheduled_tokens == {saved.request_id: saved.num_prompt_tokens}
    freeze(agent)
    result = stepped.work(output)
    stepped.abort(saved)
    stepped.scheduler.update_from_output(output, result)
    assert stepped.free_blocks == stepped.free_at_first - PROMPT_BLOCKS, (
        "the save still reads these, and no others are held"
    )
    assert stepped.scheduler.has_requests(), "vLLM goes on until they are free"
    outcome(agent)
    stepped.rest()
    stepped.check_nothing_is_held()
    with observer(agent) as seen:
        eventually(lambda: seen.stats()["reserved_bytes"] == 0)
    again = stepped.add(prompt(2))
    stepped.rest()
    assert again.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert stepped.scheduler.reset_prefix_cache()
    stepped.check_nothing_is_held()
