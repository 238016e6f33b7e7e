"""The scheduler's side against vLLM's real block pool, with answers that the test gives."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster import MIB, Cluster
from faults import freeze, thaw
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from reprise import KvMemory, Layout, Namespace, Session, Source, Transfers, block_keys
from reprise.vllm.events import KvEvents
from reprise.vllm.geometry import Geometry
from reprise.vllm.metadata import RepriseMetadata, RepriseWorkerMetadata
from reprise.vllm.options import Options
from reprise.vllm.ranks import RankSessions
from reprise.vllm.scheduler import SAVE_HOLDS_S, SchedulerSide

TOKENS = 16
POOL_BLOCKS = 64


@dataclass
class Question:
    """A match whose answer the test decides."""

    keys: bytes
    answer: list[int] | None = None

    def poll(self, patience: float) -> list[int] | None:
        if self.answer is None:
            time.sleep(patience)
        return self.answer


@dataclass
class FakeSession:
    """A session that answers with what it is told."""

    connected: bool = True
    answer: list[int] | None = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    suspected: int = 0

    def start_match(self, keys: bytes, local: bool = False) -> Question | None:
        if not self.connected:
            return None
        self.questions.append(Question(keys, self.answer))
        return self.questions[-1]

    def suspect(self) -> None:
        self.suspected += 1


def geometry(ranks: int = 1) -> Geometry:
    namespaces = []
    for rank in range(ranks):
        layout = Layout(
            layers=2,
            parts=1,
            kv_heads=2,
            head_dim=8,
            dtype="fp32",
            tokens_per_block=TOKENS,
            tp_rank=rank,
            tp_size=ranks,
        )
        namespaces.append(
            Namespace(
                model="m",
                revision="1",
                layout=layout,
                hash_algorithm="sha256",
                hash_seed="s",
                engine_format="test",
                tenant_salt="",
            )
        )
    return Geometry(layer_names=("a", "b"), block_tokens=TOKENS, rank=0, namespaces=tuple(namespaces))


def side(session: Any, ranks: int = 1, **options: Any) -> Any:
    made: Any = SchedulerSide(
        geometry=geometry(ranks),
        # Where a test says nothing else, a step has time for everything, however slow the machine is.
        options=Options.read({"match_budget_ms": 10_000.0, **options}),
        session=session,
        may_load=True,
        may_save=True,
        ranks=ranks,
    )
    made.pool = BlockPool(num_gpu_blocks=POOL_BLOCKS, enable_caching=True, hash_block_size=TOKENS)
    return made


def request(blocks: int, name: str = "r") -> Any:
    hashes = [bytes([index]) * 32 for index in range(blocks)]
    tokens = list(range(blocks * TOKENS + 3))
    return SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        num_prompt_tokens=len(tokens),
        num_tokens=len(tokens),
        all_token_ids=tokens,
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
        session_id=None,
        skip_reading_prefix_cache=False,
    )


def blocks_of(ids: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (ids,))


def output(new: dict[str, tuple[int, int]], ids: dict[str, list[int]], finished: set[str] | None = None) -> Any:
    """A step: requests with tokens that were computed before and tokens of this step."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before) for name, (before, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={name: now for name, (_, now) in new.items()},
        finished_req_ids=finished or set(),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (ids[name],)),
    )


def keys_of(question: Question) -> list[bytes]:
    return [question.keys[at : at + 16] for at in range(0, len(question.keys), 16)]


def references(side: SchedulerSide, block: int) -> int:
    assert side.pool is not None
    return int(side.pool.blocks[block].ref_cnt)


def ended(save: int, times: int = 1, failed: set[str] | None = None) -> Any:
    said = RepriseWorkerMetadata(ended_saves=Counter({save: times}), failed_loads=failed or set())
    return SimpleNamespace(kv_connector_worker_meta=said)


def test_what_is_there_beyond_vllms_own_is_loaded_and_only_the_rest_is_saved() -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM] * 5))
    asked = request(8)
    scheduler.begin(asked)
    assert scheduler.matched_tokens(asked, 2 * TOKENS) == (3 * TOKENS, True)
    ids = list(range(10, 19))
    scheduler.allocated(asked, blocks_of(ids), 3 * TOKENS)
    metadata = scheduler.step(output({}, {}))
    (load,) = metadata.loads
    assert load.blocks == (12, 13, 14)
    assert load.hashes == tuple(asked.block_hashes[2:5])
    metadata = scheduler.step(output({"r": (5 * TOKENS, 3 * TOKENS + 3)}, {"r": ids}))
    (save,) = metadata.saves
    assert save.blocks == (15, 16, 17)
    assert save.hashes == tuple(asked.block_hashes[5:8])


def test_blocks_that_vllm_has_and_reprise_has_not_are_saved() -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM]))
    asked = request(4)
    assert scheduler.matched_tokens(asked, 3 * TOKENS) == (0, False)
    metadata = scheduler.step(output({"r": (3 * TOKENS, TOKENS)}, {"r": [1, 2, 3, 4]}))
    assert metadata.saves[0].blocks == (2, 3, 4)


def test_a_block_is_saved_once_and_when_it_is_full() -> None:
    scheduler = side(FakeSession())
    asked = request(2)
    scheduler.matched_tokens(asked, 0)
    assert scheduler.step(output({"r": (0, TOKENS - 1)}, {"r": [1, 2]})).saves == []
    (first,) = scheduler.step(output({"r": (TOKENS - 1, 1)}, {"r": [1, 2]})).saves
    assert (first.blocks, first.parent) == ((1,), None)
    (second,) = scheduler.step(output({"r": (TOKENS, TOKENS)}, {"r": [1, 2]})).saves
    assert (second.blocks, second.parent) == ((2,), first.hashes[0]), "the agent is told what it follows"
    assert scheduler.step(output({"r": (2 * TOKENS, 5)}, {"r": [1, 2, 3]})).saves == []


def test_blocks_keep_a_reference_until_every_rank_has_ended_their_save() -> None:
    scheduler = side(FakeSession(), ranks=2)
    scheduler.matched_tokens(request(2), 0)
    (save,) = scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": [1, 2]})).saves
    assert [references(scheduler, block) for block in (1, 2)] == [1, 1]
    assert scheduler.is_under_way()
    scheduler.workers_said(ended(save.save_id))
    assert references(scheduler, 1) == 1
    scheduler.workers_said(ended(save.save_id))
    assert references(scheduler, 1) == 0
    assert not scheduler.is_under_way()


def test_at_most_a_share_of_vllms_blocks_waits_for_saves() -> None:
    scheduler = side(FakeSession())
    for index in range(3):
        scheduler.matched_tokens(request(8, f"r{index}"), 0)
    ids = {f"r{index}": list(range(1 + 8 * index, 9 + 8 * index)) for index in range(3)}
    metadata = scheduler.step(output({name: (0, 8 * TOKENS) for name in ids}, ids))
    assert len(metadata.saves) == 2, "a quarter of 64 blocks"


def test_what_there_is_room_for_is_saved_and_the_rest_later_or_left_out() -> None:
    scheduler = side(FakeSession())
    asked = request(24)
    scheduler.matched_tokens(asked, 0)
    ids = {"r": list(range(1, 26))}
    (save,) = scheduler.step(output({"r": (0, 24 * TOKENS)}, ids)).saves
    assert save.blocks == tuple(range(1, 17)), "a quarter of 64 blocks"
    assert scheduler.step(output({"r": (24 * TOKENS, 1)}, ids)).saves == []
    scheduler.workers_said(ended(save.save_id))
    (rest,) = scheduler.step(output({"r": (24 * TOKENS + 1, 1)}, ids)).saves
    assert rest.blocks == tuple(range(17, 25))
    assert rest.hashes == tuple(asked.block_hashes[16:])
    late = request(20, "late")
    scheduler.matched_tokens(late, 0)
    scheduler.step(output({"late": (0, 20 * TOKENS)}, {"late": list(range(30, 51))}))
    scheduler.step(output({}, {}, finished={"r", "late"}))
    told = scheduler.stats.take()
    assert told is not None
    assert told.data["left_out_blocks"] == 20 - 8, "of the second request; 8 blocks of the first were waiting"


def test_vllm_waits_for_saves_only_where_their_end_frees_blocks() -> None:
    scheduler = side(FakeSession())
    scheduler.matched_tokens(request(2), 0)
    blocks = scheduler.pool.get_new_blocks(2)
    ids = [block.block_id for block in blocks]
    scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": ids}))
    assert scheduler.is_under_way()
    assert not scheduler.saves_hold_blocks(), "the request has them as well"
    scheduler.pool.free_blocks(blocks[:1])
    assert scheduler.saves_hold_blocks()


def test_vllm_does_not_wait_for_a_save_that_takes_long(monkeypatch: Any) -> None:
    scheduler = side(FakeSession())
    scheduler.matched_tokens(request(2), 0)
    blocks = scheduler.pool.get_new_blocks(2)
    scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": [block.block_id for block in blocks]}))
    scheduler.pool.free_blocks(blocks)
    assert scheduler.saves_hold_blocks()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + SAVE_HOLDS_S)
    assert not scheduler.saves_hold_blocks()
    assert scheduler.is_under_way()


def test_a_step_costs_its_budget_however_many_requests_come_while_the_agent_hangs(tmp_path: Path) -> None:
    budget_s = 0.005
    cluster = Cluster(tmp_path / "cluster", arena=16 * MIB, pool=128 * MIB)
    session = Session(cluster.agents[0].socket, geometry().namespace, geometry().layout, timeout=600.0)
    try:
        assert session.wait_connected(60.0)
        freeze(cluster.agents[0])
        scheduler = side(session, match_budget_ms=budget_s * 1e3, match_deadline_ms=600_000.0)
        steps = []
        for number in range(4):
            new = [request(0, f"{number}.{index}") for index in range(100)]
            for each in new:
                each.block_hashes = [f"{each.request_id}:{block}".encode() for block in range(1024)]
            scheduler.step(output({}, {}))
            began = time.monotonic()
            assert {scheduler.matched_tokens(each, 0) for each in new} == {(None, False)}
            steps.append(time.monotonic() - began)
        assert min(steps) < 10 * budget_s, steps
        thaw(cluster.agents[0])
        # The last comes to its turn in a later step, with an answer.
        give_up = time.monotonic() + 60.0
        while (told := scheduler.matched_tokens(new[-1], 0)) == (None, False):
            assert time.monotonic() < give_up
            scheduler.step(output({}, {}))
        assert told == (0, False)
    finally:
        session.close()
        cluster.stop()


def test_an_answer_that_does_not_come_costs_the_budget_of_a_step_once_for_all_requests() -> None:
    scheduler = side(FakeSession(answer=None), match_budget_ms=20.0, match_deadline_ms=10_000.0)
    before = time.monotonic()
    for index in range(50):
        assert scheduler.matched_tokens(request(4, f"r{index}"), 0) == (None, False)
    assert time.monotonic() - before < 0.2
    scheduler.step(output({}, {}))
    before = time.monotonic()
    assert scheduler.matched_tokens(request(4, "late"), 0) == (None, False)
    assert time.monotonic() - before >= 0.015, "the next step has a budget of its own"


@dataclass
class Holding(FakeSession):
    """A session whose agent has so many leading blocks of one prompt."""

    there: int = 0

    def start_match(self, keys: bytes, local: bool = False) -> Question | None:
        before = sum(len(question.keys) // 16 for question in self.questions)
        self.answer = [Source.OWN_DRAM] * max(min(len(keys) // 16, self.there - before), 0)
        return super().start_match(keys, local)


@pytest.mark.parametrize(("there", "questions"), [(3, 1), (8, 2), (20, 3), (24, 3)])
def test_a_prompt_that_is_longer_than_a_question_is_asked_about_in_parts(
    monkeypatch: pytest.MonkeyPatch, there: int, questions: int
) -> None:
    monkeypatch.setattr("reprise.vllm.scheduler.KEYS_PER_MATCH", 8)
    session = Holding(there=there)
    assert side(session).matched_tokens(request(24), 0) == (there * TOKENS, True)
    assert len(session.questions) == questions
    whole = block_keys(geometry().namespace, request(24).block_hashes)
    assert whole.startswith(b"".join(question.keys for question in session.questions))


def test_parts_of_a_long_prompt_that_a_step_has_no_time_for_are_asked_about_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reprise.vllm.scheduler.KEYS_PER_MATCH", 8)
    session = Holding(there=16)
    scheduler = side(session, match_budget_ms=1.0)
    asked = request(24)
    give_up = time.monotonic() + 5
    while (told := scheduler.matched_tokens(asked, 0)) == (None, False):
        assert time.monotonic() < give_up
        # Nothing is left of the next step either, once its first question is out.
        scheduler.step(output({}, {}))
        scheduler._asker._budget_left = 1e-9
    assert told == (16 * TOKENS, True)
    assert len(session.questions) == 3


def test_the_wait_for_an_answer_is_counted_once_whatever_its_steps() -> None:
    session = FakeSession(answer=None)
    scheduler = side(session, match_budget_ms=5.0, match_deadline_ms=10_000.0)
    asked = request(2)
    for _ in range(3):
        assert scheduler.matched_tokens(asked, 0) == (None, False)
        scheduler.step(output({}, {}))
    session.questions[0].answer = [Source.OWN_DRAM] * 2
    assert scheduler.matched_tokens(asked, 0) == (2 * TOKENS, True)
    told = scheduler.stats.take()
    assert told is not None
    (waited,) = told.data["match_seconds"]
    assert waited >= 0.01, "in three steps"


def test_a_request_that_is_to_compute_its_whole_prompt_is_not_asked_about() -> None:
    session = FakeSession(answer=[Source.OWN_DRAM] * 2)
    scheduler = side(session)
    asked = request(2)
    asked.skip_reading_prefix_cache = True
    scheduler.begin(asked)
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert session.questions == []


def test_while_others_compute_a_step_waits_briefly_and_for_its_budget_when_they_are_over() -> None:
    scheduler = side(FakeSession(answer=None), match_budget_ms=200.0, match_busy_ms=5.0, match_deadline_ms=10_000.0)
    running, waiting = request(1, "running"), request(4, "waiting")
    times = []
    for _ in range(2):
        scheduler.step(output({"running": (0, 1)}, {}))
        before = time.monotonic()
        for _ in range(10):
            assert scheduler.matched_tokens(waiting, 0) == (None, False)
        times.append(time.monotonic() - before)
    assert min(times) < 0.1, "5 ms in each step, in all looks"
    scheduler.over(running)
    before = time.monotonic()
    assert scheduler.matched_tokens(waiting, 0) == (None, False)
    assert time.monotonic() - before >= 0.1, "nobody else waits"


def test_a_request_is_asked_about_when_it_comes_and_again_when_it_has_waited_long(monkeypatch: Any) -> None:
    session = FakeSession(answer=[Source.OWN_DRAM])
    scheduler = side(session)
    soon, late = request(4, "soon"), request(4, "late")
    scheduler.begin(soon)
    scheduler.begin(late)
    assert len(session.questions) == 2
    assert scheduler.matched_tokens(soon, 0) == (TOKENS, True)
    assert len(session.questions) == 2, "the answer was on its way"
    session.answer = [Source.OWN_DRAM] * 3
    monkeypatch.setattr("reprise.vllm.scheduler.ANSWER_KEPT_S", 0.0)
    assert scheduler.matched_tokens(late, 0) == (3 * TOKENS, True), "saved while it waited"
    assert len(session.questions) == 3


def test_a_request_goes_on_without_an_answer_after_the_deadline() -> None:
    session = FakeSession(answer=None)
    scheduler = side(session, match_budget_ms=1.0, match_deadline_ms=30.0)
    asked = request(4)
    give_up = time.monotonic() + 5
    while scheduler.matched_tokens(asked, 0) == (None, False):
        assert time.monotonic() < give_up
        scheduler.step(output({}, {}))
    assert session.suspected == 1
    assert len(session.questions) == 1, "the same question is looked at again, not asked again"


def test_an_answer_that_comes_later_is_used() -> None:
    session = FakeSession(answer=None)
    scheduler = side(session, match_budget_ms=1.0)
    asked = request(4)
    assert scheduler.matched_tokens(asked, 0) == (None, False)
    session.questions[0].answer = [Source.PEER_DRAM] * 4
    assert scheduler.matched_tokens(asked, 0) == (4 * TOKENS, True)


def test_a_load_that_failed_is_not_tried_again_for_its_request() -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM] * 4))
    asked = request(4)
    assert scheduler.matched_tokens(asked, 0) == (4 * TOKENS, True)
    scheduler.workers_said(SimpleNamespace(kv_connector_worker_meta=RepriseWorkerMetadata(failed_loads={"r"})))
    assert scheduler.matched_tokens(asked, 0) == (0, False)


def test_without_an_agent_nothing_is_found_and_nothing_is_pinned() -> None:
    scheduler = side(FakeSession(connected=False))
    asked = request(4)
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert scheduler.step(output({"r": (0, 4 * TOKENS)}, {"r": [1, 2, 3, 4]})) == RepriseMetadata()


def test_ranks_are_asked_about_together_and_a_block_counts_when_all_have_it() -> None:
    first, second = FakeSession(answer=[Source.OWN_DRAM] * 4), FakeSession(answer=[Source.OWN_DRAM] * 2)
    of_ranks: Any = (first, second)
    scheduler = side(RankSessions(of_ranks), ranks=2, match_budget_ms=50.0)
    assert scheduler.matched_tokens(request(4), 0) == (2 * TOKENS, True)
    of_first, of_second = keys_of(first.questions[0]), keys_of(second.questions[0])
    assert len(of_first) == len(of_second) == 4
    assert not set(of_first) & set(of_second)
    # One that has not answered, and one whom nobody answers.
    scheduler.step(output({}, {}))
    first.answer = None
    assert scheduler.matched_tokens(request(4, "late"), 0) == (None, False)
    assert [len(session.questions) for session in of_ranks] == [2, 2]
    scheduler.step(output({}, {}))
    second.connected = False
    assert scheduler.matched_tokens(request(4, "later"), 0) == (0, False)


def test_blocks_that_two_ranks_have_saved_are_found_by_their_scheduler(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster", arena=16 * MIB, pool=128 * MIB)
    shape, asked = geometry(ranks=2), request(4)
    sessions = tuple(Session(cluster.agents[0].socket, namespace, namespace.layout) for namespace in shape.namespaces)
    try:
        for session, namespace, blocks in zip(sessions, shape.namespaces, (4, 3), strict=True):
            assert session.wait_connected(60.0)
            memory = KvMemory([torch.ones(8, 2, TOKENS, 8) for _ in range(2)], namespace.layout)
            transfers = Transfers(session, memory)
            save = transfers.save(block_keys(namespace, asked.block_hashes[:blocks]), range(blocks))
            assert transfers.wait([save], 60.0)
            transfers.close()
        scheduler = side(RankSessions(sessions), ranks=2, match_deadline_ms=600_000.0)
        assert scheduler.matched_tokens(asked, 0) == (3 * TOKENS, True)
    finally:
        for session in sessions:
            session.close()
        cluster.stop()


def test_after_a_change_of_weights_nothing_from_before_is_found_or_saved_over() -> None:
    session = FakeSession(answer=[Source.OWN_DRAM] * 4)
    scheduler = side(session)
    asked = request(4)
    assert scheduler.matched_tokens(asked, 0) == (4 * TOKENS, True)
    session.answer = []
    scheduler.forget()
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    before, after = session.questions
    assert not set(keys_of(before)) & set(keys_of(after))
    (save,) = scheduler.step(output({"r": (0, 4 * TOKENS)}, {"r": [1, 2, 3, 4]})).saves
    assert not set(save.hashes) & set(asked.block_hashes)


@pytest.mark.parametrize(("may_load", "skips"), [(True, False), (True, True), (False, False)])
def test_what_runs_while_the_weights_change_is_not_saved_until_it_is_computed_anew(may_load: bool, skips: bool) -> None:
    scheduler = side(FakeSession())
    scheduler.may_load = may_load
    asked = request(4)
    asked.skip_reading_prefix_cache = skips
    scheduler.matched_tokens(asked, 0)
    scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": [1, 2]}))
    scheduler.forget()
    assert scheduler.step(output({"r": (2 * TOKENS, 2 * TOKENS)}, {"r": [1, 2, 3, 4]})).saves == []
    # Preempted, and begun again at its first token.
    scheduler.matched_tokens(asked, 0)
    (save,) = scheduler.step(output({"r": (0, 4 * TOKENS)}, {"r": [5, 6, 7, 8]})).saves
    assert len(save.hashes) == 4


def test_what_is_computed_on_blocks_that_vllm_did_not_give_up_is_not_saved() -> None:
    scheduler = side(FakeSession())
    held = scheduler.pool.cached_block_hash_to_block
    block = scheduler.pool.blocks[1]
    held.insert(b"of the weights before", block)
    scheduler.forget()
    scheduler.matched_tokens(request(4), 2 * TOKENS)
    assert scheduler.step(output({"r": (2 * TOKENS, 2 * TOKENS)}, {"r": [1, 2, 3, 4]})).saves == []
    # From its first token on it is the new weights'.
    scheduler.matched_tokens(request(4, "new"), 0)
    assert len(scheduler.step(output({"new": (0, 4 * TOKENS)}, {"new": [5, 6, 7, 8]})).saves) == 1
    # vLLM's own blocks are gone.
    held.pop(b"of the weights before", block.block_id)
    scheduler.forget()
    scheduler.matched_tokens(request(4, "later"), 2 * TOKENS)
    assert len(scheduler.step(output({"later": (2 * TOKENS, 2 * TOKENS)}, {"later": [1, 2, 3, 4]})).saves) == 1


def test_workers_are_told_of_a_step_that_computes_nothing() -> None:
    scheduler = side(FakeSession())
    assert scheduler.step(output({}, {})).is_idle
    assert not scheduler.step(output({"a": (0, 5)}, {"a": [1]})).is_idle


def test_a_finished_request_is_forgotten() -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM] * 2))
    scheduler.matched_tokens(request(4), 0)
    assert len(scheduler.hit_sources(request(4))) == 2
    scheduler.step(output({}, {}, finished={"r"}))
    assert scheduler.hit_sources(request(4)) == ()


def test_a_save_is_told_of_with_its_tokens_when_every_rank_has_kept_all_of_it() -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM]), ranks=1)
    scheduler.events = KvEvents(scheduler.geometry)
    asked = request(3)
    scheduler.matched_tokens(asked, 0)
    (save,) = scheduler.step(output({"r": (TOKENS, 2 * TOKENS)}, {"r": [1, 2, 3]})).saves
    assert scheduler.events.take() == []
    scheduler.workers_said(ended(save.save_id))
    (event,) = scheduler.events.take()
    keys = [block_keys(scheduler.geometry.namespace, [block_hash]) for block_hash in asked.block_hashes]
    assert (event.parent_block_hash, event.block_hashes) == (keys[0], keys[1:])
    assert event.token_ids == asked.all_token_ids[TOKENS : 3 * TOKENS]
    assert scheduler.events.take() == [], "once"


def test_a_save_that_was_kept_in_part_is_not_told_of() -> None:
    scheduler = side(FakeSession(), ranks=2)
    scheduler.events = KvEvents(scheduler.geometry)
    scheduler.matched_tokens(request(2), 0)
    (save,) = scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": [1, 2]})).saves
    said = RepriseWorkerMetadata(ended_saves=Counter({save.save_id: 1}), partial_saves={save.save_id})
    scheduler.workers_said(SimpleNamespace(kv_connector_worker_meta=said))
    scheduler.workers_said(ended(save.save_id))
    assert not scheduler.is_under_way()
    assert scheduler.events.take() == []


def test_an_event_says_of_its_blocks_what_vllm_s_own_says() -> None:
    hash_blocks = get_hash_fn_by_name("sha256")
    init_none_hash(hash_blocks)
    asked: Any = Request(
        request_id="r",
        prompt_token_ids=list(range(3 * TOKENS + 3)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest("law", 1, "/nowhere"),
        cache_salt="salt",
        session_id="conversation",
        block_hasher=get_request_block_hasher(TOKENS, hash_blocks),
    )
    pool = BlockPool(POOL_BLOCKS, enable_caching=True, hash_block_size=TOKENS, enable_kv_cache_events=True)
    pool.cache_full_blocks(asked, pool.get_new_blocks(3), 0, 3, TOKENS, 0)
    (theirs,) = pool.take_events()
    events = KvEvents(geometry())
    events.plan(1, asked, 0, asked.block_hashes, ())
    events.ended(1, whole=True)
    (ours,) = events.take()
    assert ours.extra_keys == [("law", "salt"), ("law",), ("law",)]
    told = (
        "extra_keys",
        "group_idx",
        "session_id",
        "token_ids",
        "block_size",
        "lora_id",
        "lora_name",
        "parent_block_hash",
    )
    assert [getattr(ours, name) for name in told] == [getattr(theirs, name) for name in told]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sokcet": "/x"}, "did you mean 'socket'"),
        ({"whatever": 1}, "known are"),
        ({"match_budget_ms": "5"}, "must be a number"),
        ({"match_budget_ms": -1}, "above 0"),
        ({"save_decode_blocks": 1}, "true or false"),
        ({"tenant": 3}, "a string"),
    ],
)
def test_a_wrong_option_is_refused_with_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Options.read(given)
