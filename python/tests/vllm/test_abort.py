"""Tests that a request aborted during a load or save releases everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import MIB, Agent, Cluster
from engine_checks import PROMPT_BLOCKS, prompt
from engine_model import model
from faults import eventually, freeze, observer, thaw
from stepped_engine import SteppedEngine, stepped_engine
from vllm.v1.request import RequestStatus


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Control plane member and an agent that these tests kill."""
    made = Cluster(tmp_path / "cluster", arena=64 * MIB, pool=128 * MIB)
    yield made
    made.stop()


@pytest.fixture
def stepped(own_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppedEngine]:
    """Engine whose loads wait while its agent is stopped."""
    with stepped_engine(model(tmp_path / "model"), own_cluster.agents[0], monkeypatch) as made:
        yield made


def resume(agent: Agent) -> None:
    """Lets the agent answer."""
    thaw(agent)


def restart(agent: Agent) -> None:
    """Restarts the agent, which never answers."""
    agent.restart()


@pytest.mark.parametrize("outcome", [resume, restart])
def test_a_request_aborted_during_its_load_releases_everything(
    stepped: SteppedEngine, own_cluster: Cluster, outcome: Callable[[Agent], None]
) -> None:
    (agent,) = own_cluster.agents
    stepped.add(prompt(1))
    stepped.finish()
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
    assert stepped.scheduler.has_requests(), "vLLM continues until they are free"
    outcome(agent)
    stepped.finish()
    stepped.check_nothing_is_held()
    with observer(agent) as seen:
        eventually(lambda: seen.stats()["read_leases"] == 0)
    # The next request can load the blocks.
    again = stepped.add(prompt(1))
    stepped.finish()
    assert again.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert stepped.scheduler.reset_prefix_cache()
    stepped.check_nothing_is_held()


@pytest.mark.parametrize("outcome", [resume, restart])
def test_a_request_aborted_during_its_save_releases_everything(
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
        "only the blocks that the save still reads are in use"
    )
    assert stepped.scheduler.has_requests(), "vLLM continues until they are free"
    outcome(agent)
    stepped.finish()
    stepped.check_nothing_is_held()
    with observer(agent) as seen:
        eventually(lambda: seen.stats()["reserved_bytes"] == 0)
    again = stepped.add(prompt(2))
    stepped.finish()
    assert again.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert stepped.scheduler.reset_prefix_cache()
    stepped.check_nothing_is_held()
