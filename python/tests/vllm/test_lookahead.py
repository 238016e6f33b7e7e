"""Hints of vLLM's scheduler: requests that wait have their blocks in DRAM before they run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from engine import Engine, connector
from engine_checks import PROMPT_BLOCKS, TRIES, prompt, serve_and_save
from faults import drop_dram, observer
from stepped_engine import SteppedEngine, expected, stepped_engine
from test_scheduler import TOKENS, FakeSession, blocks_of, output, request, side
from vllm.v1.request import RequestStatus

from reprise import Source, block_keys

TAIL = 5
LONG = 200
"""Tokens that a request generates while another one waits."""


def hinting(answer: list[int], **options: Any) -> tuple[Any, FakeSession]:
    """Returns a scheduler side that has measured an iteration, and its session."""
    session = FakeSession(answer=answer)
    scheduler = side(session, **options)
    scheduler.begin(request(2, "running"))
    scheduler.step(output({"running": (0, TOKENS)}, {"running": [1, 2, 3]}))
    return scheduler, session


def step(scheduler: Any, *names: str, **more: Any) -> None:
    """Runs a step of requests that compute, after the pause between hints."""
    time.sleep(0.003)
    scheduler._lookahead._next_at = 0.0
    scheduler.step(output({name: (0, 1) for name in names}, {name: [1, 2, 3] for name in names}, **more))


def test_hints_name_the_blocks_of_this_node_beyond_vllms_own() -> None:
    nvme, peer = Source.OWN_NVME, Source.PEER_NVME
    scheduler, session = hinting([Source.OWN_DRAM, nvme, nvme, peer, nvme])
    scheduler.begin(request(8, "waits"))
    step(scheduler, "running")
    ((number, iterations, confidence, keys),) = session.hints[-1][0]
    assert (iterations, confidence) == (1, 1.0)
    assert keys == session.matches[-1].keys[: 3 * 16], "up to the first block of another node"
    step(scheduler, "running")
    assert session.hints[-1][0] == [(number, 1, 1.0, b"")]


def test_requests_with_all_blocks_in_dram_are_not_hinted() -> None:
    scheduler, session = hinting([Source.OWN_DRAM] * 4)
    scheduler.begin(request(8, "waits"))
    step(scheduler, "running")
    assert session.hints == []


def test_blocks_of_running_and_preempted_requests_are_listed_until_their_end() -> None:
    scheduler, session = hinting([])
    first = request(3, "first")
    scheduler.begin(first)
    scheduler._lookahead._begun_at = scheduler._lookahead._next_at = 0.0
    ids = {"running": [1, 2, 3], "first": [4, 5, 6]}
    scheduler.step(output({"running": (TOKENS, 1), "first": (0, 2 * TOKENS)}, ids))
    of_running, of_first = session.begun[-1]
    assert (of_running[1:3], of_first[1:3]) == ((False, 0), (False, 0))
    assert (len(of_running[3]), len(of_first[3])) == (16, 32), "the blocks that they save"
    assert len(session.hints) == 0, "no request waits"
    before = len(session.begun)
    step(scheduler, "running", "first")
    assert len(session.begun) == before, "nothing has changed"
    scheduler._lookahead._begun_at = 0.0
    step(scheduler, "running", preempted={"first"})
    assert session.begun[-1] == [(of_running[0], False, 1, b""), (of_first[0], True, 2, b"")]
    scheduler.finish(first)
    scheduler._lookahead._begun_at = 0.0
    step(scheduler, "running", finished={"first"})
    assert [number for number, *_ in session.begun[-1]] == [of_running[0]]


def test_keys_of_several_ranks_are_sent_block_after_block() -> None:
    scheduler, session = hinting([Source.OWN_NVME] * 2, ranks=2)
    scheduler.begin(request(3, "waits"))
    step(scheduler, "running")
    ((*_, keys),) = session.hints[-1][0]
    matched = session.matches[-1].keys
    of_rank = [[matched[at : at + 16] for at in range(first, first + 32, 16)] for first in (0, 3 * 16)]
    assert keys == of_rank[0][0] + of_rank[1][0] + of_rank[0][1] + of_rank[1][1]
    assert session.hints[-1][2], "keys of all ranks"


def test_keys_to_read_ahead_are_derived_within_the_budget_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, session = hinting([Source.OWN_NVME] * 7)
    scheduler.begin(request(7, "waits"))
    derived: list[int] = []

    def keys_that_use_up_the_budget(namespace: Any, hashes: Sequence[bytes]) -> bytes:
        derived.append(len(hashes))
        scheduler._matcher._budget_left = 0.0
        return block_keys(namespace, hashes)

    monkeypatch.setattr("reprise.vllm.scheduler.block_keys", keys_that_use_up_the_budget)
    monkeypatch.setattr("reprise.vllm.match_calls.KEYS_PER_PART", 3)
    for parts in ([3], [3, 3], [3, 3, 1]):
        assert session.hints == [], "not before all keys are derived"
        step(scheduler, "running")
        assert derived == parts
    ((*_, keys),) = session.hints[-1][0]
    assert keys == session.matches[-1].keys


def test_the_match_of_a_hint_serves_the_schedule_of_its_request() -> None:
    scheduler, session = hinting([Source.OWN_NVME] * 2)
    waits = request(3, "waits")
    scheduler.begin(waits)
    step(scheduler, "running")
    matches = len(session.matches)
    assert scheduler.matched_tokens(waits, 0) == (2 * TOKENS, True)
    assert len(session.matches) == matches
    scheduler.allocated(waits, blocks_of([4, 5, 6]), 2 * TOKENS)
    step(scheduler, "running")
    assert session.hints[-1][:2] == ([], []), "its load has begun"


def test_preempted_and_finished_requests_are_cancelled() -> None:
    scheduler, session = hinting([Source.OWN_NVME] * 2)
    first, second = request(3, "first"), request(3, "second")
    scheduler.begin(first)
    scheduler.begin(second)
    step(scheduler, "running")
    one, two = (number for number, *_ in session.hints[-1][0])
    step(scheduler, "running", "first")
    step(scheduler, "running", preempted={"first"})
    assert session.hints[-1][1] == [one]
    assert [number for number, *_ in session.hints[-1][0]][1:] == [two], "the preempted request runs first"
    scheduler.finish(second)
    step(scheduler, "running", finished={"second"})
    assert session.hints[-1][1] == [two]


def test_requests_are_hinted_in_the_order_of_their_priority() -> None:
    scheduler, session = hinting([Source.OWN_NVME])
    scheduler.by_priority = True
    for name, priority in (("later", 1), ("sooner", 0)):
        waits = request(2, name)
        waits.priority, waits.arrival_time = priority, 1.0
        scheduler.begin(waits)
    step(scheduler, "running")
    assert [number for number, *_ in session.hints[-1][0]] == [3, 2]


def test_an_engine_that_loads_nothing_or_has_lookahead_disabled_sends_no_hints() -> None:
    scheduler, session = hinting([Source.OWN_NVME], lookahead=False)
    scheduler.begin(request(2, "waits"))
    assert scheduler._lookahead is None
    scheduler.step(output({"running": (0, 1)}, {"running": [1, 2, 3]}))
    assert session.hints == []


@pytest.fixture(scope="module")
def agents(home: Path) -> Iterator[Cluster]:
    """A node whose agent has no other engine."""
    cluster = Cluster(home / "lookahead")
    yield cluster
    cluster.stop()


def saved_on_nvme(engine: SteppedEngine, *seeds: int) -> list[list[int]]:
    """Returns prompts whose blocks are on NVMe only."""
    prompts = [prompt(seed, tail=TAIL) for seed in seeds]
    for tokens in prompts:
        engine.serve_and_save(tokens)
    with observer(engine.agent) as seen:
        drop_dram(seen)
    return prompts


def test_blocks_of_a_waiting_request_are_in_dram_before_it_is_scheduled(
    weights: Path, agents: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agents.agents[0]
    with stepped_engine(weights, agent, monkeypatch, sequences=1) as engine, observer(agent) as seen:
        first, second = saved_on_nvme(engine, 1, 2)
        before = seen.stats()

        def more(name: str) -> int:
            return int(seen.stats()[name] - before[name])

        running = engine.add(prompt(3, blocks=1), max_tokens=LONG)
        waits, last = engine.add(first), engine.add(second)
        engine.step_until(lambda: more("prefetch_blocks") == 2 * PROMPT_BLOCKS)
        assert running.status == RequestStatus.RUNNING
        assert {waits.status, last.status} == {RequestStatus.WAITING}
        engine.finish()
        for each, tokens in ((waits, first), (last, second)):
            assert list(each.output_token_ids) == expected(tokens)
        assert list(running.output_token_ids) == expected(running.prompt_token_ids or [], LONG)
        assert (more("prefetch_used_blocks"), more("hit_blocks_own_nvme")) == (2 * PROMPT_BLOCKS, 0)
        assert (more("hit_blocks_own_dram"), more("prefetch_wasted_bytes")) == (2 * PROMPT_BLOCKS, 0)
        assert (more("prefetch_ignored_requests"), more("prefetch_ignored_times")) == (0, 0)
        assert more("prefetch_unknown_keys") == 0
        engine.clear_cache()
        engine.check_nothing_is_held()


def test_an_aborted_request_that_waits_is_cancelled(
    weights: Path, agents: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agents.agents[0]
    with stepped_engine(weights, agent, monkeypatch, sequences=1) as engine, observer(agent) as seen:
        (tokens,) = saved_on_nvme(engine, 4)
        before = seen.stats()
        engine.add(prompt(5, blocks=1), max_tokens=LONG)
        waits = engine.add(tokens)
        engine.step_until(lambda: seen.stats()["prefetch_blocks"] == before["prefetch_blocks"] + PROMPT_BLOCKS)
        assert seen.stats()["prefetch_staged_bytes"] > 0
        engine.abort(waits)
        cancelled = before["prefetch_cancelled_requests"] + 1
        engine.step_until(lambda: seen.stats()["prefetch_cancelled_requests"] == cancelled)
        assert seen.stats()["prefetch_staged_bytes"] == 0
        engine.finish()


class RecordedSession:
    """A session that records the cancelled requests of its hints."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.listed: list[list[int]] = []
        self.cancelled: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def start_lookahead(self, iteration: float, requests: Any, cancelled: Any, all_ranks: bool, begun: Any) -> Any:
        self.listed.append([number for number, *_ in requests])
        self.cancelled += cancelled
        return self._session.start_lookahead(iteration, requests, cancelled, all_ranks, begun)


def test_a_preempted_request_is_cancelled_and_answers_as_without_preemption(
    weights: Path, agents: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agents.agents[0]
    with stepped_engine(weights, agent, monkeypatch, sequences=1) as engine:
        (tokens,) = saved_on_nvme(engine, 6)
        hints = engine.connector._scheduler._lookahead
        hints.session = session = RecordedSession(hints.session)
        engine.add(prompt(7, blocks=1), max_tokens=LONG)
        preempted = engine.add(tokens, max_tokens=40)
        engine.step_until(lambda: bool(session.listed and session.listed[-1]))
        (number,) = session.listed[-1]
        engine.step_until(lambda: preempted.num_output_tokens > 3)
        engine.clear_cache(preempt=True)
        assert preempted.status == RequestStatus.PREEMPTED
        engine.step_until(lambda: session.cancelled == [number])
        engine.finish()
        assert list(preempted.output_token_ids) == expected(tokens, 40)


def test_real_engine_finds_the_blocks_of_queued_requests_in_dram(
    home: Path, weights: Path, agents: Cluster, plain: Engine
) -> None:
    agent = agents.agents[0]
    engine = Engine(weights, home / "lookahead.log", connector(agent.socket), max_num_seqs=1)
    try:
        prompts = [prompt(seed) for seed in (11, 12, 13)]
        for tokens in prompts:
            serve_and_save(engine, tokens)
        answers = plain.generate([prompt(14, blocks=1), *prompts], max_tokens=64)["tokens"]
        wanted = len(prompts) * PROMPT_BLOCKS
        with observer(agent) as seen:
            for _ in range(TRIES):
                engine.clear_cache()
                drop_dram(seen)
                before = seen.stats()
                answer = engine.generate([prompt(14, blocks=1), *prompts], max_tokens=64)
                after = seen.stats()
                assert answer["tokens"] == answers
                used = after["prefetch_used_blocks"] - before["prefetch_used_blocks"]
                from_nvme = after["hit_blocks_own_nvme"] - before["hit_blocks_own_nvme"]
                # While engines use all cores, an agent may answer too late.
                if (used, from_nvme) == (wanted, 0):
                    break
            else:
                raise AssertionError(f"{used} of {wanted} blocks were read ahead, {from_nvme} by loads: {after}")
    finally:
        engine.stop()
