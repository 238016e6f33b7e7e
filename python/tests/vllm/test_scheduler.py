"""The scheduler side with vLLM's real block pool and match results set by the test."""

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
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, make_block_hash_with_group_id
from vllm.v1.request import Request

from reprise import KvMemory, Layout, Namespace, Session, Source, Transfers, block_keys
from reprise.vllm.events import KvEvents
from reprise.vllm.geometry import Geometry
from reprise.vllm.metadata import RepriseWorkerMetadata
from reprise.vllm.options import Options
from reprise.vllm.scheduler import SAVE_HOLDS_S, SchedulerSide

TOKENS = 16
POOL_BLOCKS = 64


@dataclass
class FakeMatch:
    """A pending match whose answer the test sets."""

    keys: bytes
    answer: list[int] | None = None
    all_ranks: bool = False
    position: int | None = None

    def poll(self, seconds: float) -> list[int] | None:
        if self.answer is None:
            time.sleep(seconds)
        return self.answer


class FakePending:
    """A hint that was answered at once."""

    def poll(self) -> Any:
        return SimpleNamespace(window=4, ignored=0, ready=[])


@dataclass
class FakeSession:
    """A session whose answers the test sets."""

    connected: bool = True
    answer: list[int] | None = field(default_factory=list)
    matches: list[FakeMatch] = field(default_factory=list)
    suspected: int = 0
    sessions: int = 1
    hints: list[tuple[list[Any], list[int], bool]] = field(default_factory=list)
    """Hints about requests that wait."""
    begun: list[list[tuple[int, bool, int, bytes]]] = field(default_factory=list)
    """Lists of requests that have begun."""

    def start_lookahead(
        self, iteration: float, requests: Any, cancelled: Any = (), all_ranks: bool = False, begun: Any = None
    ) -> FakePending:
        assert iteration > 0
        if begun is not None:
            self.begun.append(begun)
        if begun is None or requests or cancelled:
            self.hints.append((list(requests), list(cancelled), all_ranks))
        return FakePending()

    def start_match(
        self, keys: bytes, local: bool = False, all_ranks: bool = False, position: int | None = None
    ) -> FakeMatch | None:
        if not self.connected:
            return None
        self.matches.append(FakeMatch(keys, self.answer, all_ranks, position))
        return self.matches[-1]

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
            )
        )
    return Geometry(layer_names=("a", "b"), block_tokens=TOKENS, rank=0, namespaces=tuple(namespaces))


def side(session: Any, ranks: int = 1, **options: Any) -> Any:
    made: Any = SchedulerSide(
        geometry=geometry(ranks),
        # By default, a step has enough time even on a slow machine.
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


def output(
    new: dict[str, tuple[int, int]],
    ids: dict[str, list[int]],
    finished: set[str] | None = None,
    preempted: set[str] | None = None,
) -> Any:
    """Returns a step: requests with their computed tokens and their tokens of this step."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before) for name, (before, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={name: now for name, (_, now) in new.items()},
        scheduled_spec_decode_tokens={},
        finished_req_ids=finished or set(),
        preempted_req_ids=preempted or set(),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (ids[name],)),
    )


def keys_of(match: FakeMatch) -> list[bytes]:
    return [match.keys[at : at + 16] for at in range(0, len(match.keys), 16)]


def references(side: SchedulerSide, block: int) -> int:
    assert side.pool is not None
    return int(side.pool.blocks[block].ref_cnt)


def ended(save: int, times: int = 1, failed: set[str] | None = None) -> Any:
    results = RepriseWorkerMetadata(ended_saves=Counter({save: times}), failed_loads=failed or set())
    return SimpleNamespace(kv_connector_worker_meta=results)


def test_loads_blocks_beyond_vllms_own_and_saves_only_the_rest() -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM] * 5))
    new_request = request(8)
    scheduler.begin(new_request)
    assert scheduler.matched_tokens(new_request, 2 * TOKENS) == (3 * TOKENS, True)
    ids = list(range(10, 19))
    scheduler.allocated(new_request, blocks_of(ids), 3 * TOKENS)
    metadata = scheduler.step(output({}, {}))
    (load,) = metadata.loads
    assert load.blocks == (12, 13, 14)
    assert load.hashes == tuple(new_request.block_hashes[2:5])
    metadata = scheduler.step(output({"r": (5 * TOKENS, 3 * TOKENS + 3)}, {"r": ids}))
    (save,) = metadata.saves
    assert save.blocks == (15, 16, 17)
    assert save.hashes == tuple(new_request.block_hashes[5:8])


def test_saves_blocks_of_vllms_cache_that_reprise_does_not_have() -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM]))
    new_request = request(4)
    assert scheduler.matched_tokens(new_request, 3 * TOKENS) == (0, False)
    metadata = scheduler.step(output({"r": (3 * TOKENS, TOKENS)}, {"r": [1, 2, 3, 4]}))
    assert metadata.saves[0].blocks == (2, 3, 4)


def test_saves_a_block_once_when_it_is_full() -> None:
    scheduler = side(FakeSession())
    new_request = request(2)
    scheduler.matched_tokens(new_request, 0)
    assert scheduler.step(output({"r": (0, TOKENS - 1)}, {"r": [1, 2]})).saves == []
    (first,) = scheduler.step(output({"r": (TOKENS - 1, 1)}, {"r": [1, 2]})).saves
    assert (first.blocks, first.parent) == ((1,), None)
    (second,) = scheduler.step(output({"r": (TOKENS, TOKENS)}, {"r": [1, 2]})).saves
    assert (second.blocks, second.parent) == ((2,), first.hashes[0]), "the save names its parent"
    assert scheduler.step(output({"r": (2 * TOKENS, 5)}, {"r": [1, 2, 3]})).saves == []


def test_blocks_stay_referenced_until_every_rank_has_ended_their_save() -> None:
    scheduler = side(FakeSession(), ranks=2)
    scheduler.matched_tokens(request(2), 0)
    (save,) = scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": [1, 2]})).saves
    assert [references(scheduler, block) for block in (1, 2)] == [1, 1]
    assert scheduler.has_pending_transfers()
    scheduler.handle_worker_output(ended(save.save_id))
    assert references(scheduler, 1) == 1
    scheduler.handle_worker_output(ended(save.save_id))
    assert references(scheduler, 1) == 0
    assert not scheduler.has_pending_transfers()


def test_pending_saves_pin_at_most_a_share_of_vllms_blocks() -> None:
    scheduler = side(FakeSession())
    for index in range(3):
        scheduler.matched_tokens(request(8, f"r{index}"), 0)
    ids = {f"r{index}": list(range(1 + 8 * index, 9 + 8 * index)) for index in range(3)}
    metadata = scheduler.step(output({name: (0, 8 * TOKENS) for name in ids}, ids))
    assert len(metadata.saves) == 2, "a quarter of 64 blocks"


def test_blocks_beyond_the_pin_limit_are_saved_later_or_skipped() -> None:
    scheduler = side(FakeSession())
    new_request = request(24)
    scheduler.matched_tokens(new_request, 0)
    ids = {"r": list(range(1, 26))}
    (save,) = scheduler.step(output({"r": (0, 24 * TOKENS)}, ids)).saves
    assert save.blocks == tuple(range(1, 17)), "a quarter of 64 blocks"
    assert scheduler.step(output({"r": (24 * TOKENS, 1)}, ids)).saves == []
    scheduler.handle_worker_output(ended(save.save_id))
    (rest,) = scheduler.step(output({"r": (24 * TOKENS + 1, 1)}, ids)).saves
    assert rest.blocks == tuple(range(17, 25))
    assert rest.hashes == tuple(new_request.block_hashes[16:])
    late = request(20, "late")
    scheduler.matched_tokens(late, 0)
    scheduler.step(output({"late": (0, 20 * TOKENS)}, {"late": list(range(30, 51))}))
    scheduler.step(output({}, {}, finished={"r", "late"}))
    stats = scheduler.stats.take()
    assert stats is not None
    assert stats.data["left_out_blocks"] == 20 - 8, "12 blocks of the second request, as 8 of the first were pinned"


def test_vllm_waits_for_saves_only_if_their_end_frees_blocks() -> None:
    scheduler = side(FakeSession())
    scheduler.matched_tokens(request(2), 0)
    blocks = scheduler.pool.get_new_blocks(2)
    ids = [block.block_id for block in blocks]
    scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": ids}))
    assert scheduler.has_pending_transfers()
    assert not scheduler.saves_hold_blocks(), "the request still references the blocks"
    scheduler.pool.free_blocks(blocks[:1])
    assert scheduler.saves_hold_blocks()


def test_vllm_does_not_wait_for_a_slow_save(monkeypatch: Any) -> None:
    scheduler = side(FakeSession())
    scheduler.matched_tokens(request(2), 0)
    blocks = scheduler.pool.get_new_blocks(2)
    scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": [block.block_id for block in blocks]}))
    scheduler.pool.free_blocks(blocks)
    assert scheduler.saves_hold_blocks()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + SAVE_HOLDS_S)
    assert not scheduler.saves_hold_blocks()
    assert scheduler.has_pending_transfers()


def test_step_takes_at_most_its_budget_with_many_requests_and_a_hanging_agent(tmp_path: Path) -> None:
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
        # The last request gets its answer in a later step.
        deadline = time.monotonic() + 60.0
        while (result := scheduler.matched_tokens(new[-1], 0)) == (None, False):
            assert time.monotonic() < deadline
            scheduler.step(output({}, {}))
        assert result == (0, False)
    finally:
        session.close()
        cluster.stop()


def test_missing_answers_use_up_the_budget_of_a_step_once_for_all_requests() -> None:
    scheduler = side(FakeSession(answer=None), match_budget_ms=20.0, match_deadline_ms=600_000.0)
    steps = []
    for number in range(4):
        before = time.monotonic()
        for index in range(50):
            assert scheduler.matched_tokens(request(4, f"{number}.{index}"), 0) == (None, False)
        steps.append(time.monotonic() - before)
        scheduler.step(output({}, {}))
    # Separate budgets would take a second. A busy machine delays some steps.
    assert min(steps) < 0.2, steps
    before = time.monotonic()
    assert scheduler.matched_tokens(request(4, "late"), 0) == (None, False)
    assert time.monotonic() - before >= 0.015, "the next step has a new budget"


@dataclass
class PrefixSession(FakeSession):
    """A session whose agent has a number of leading blocks of one prompt."""

    available: int = 0

    def start_match(
        self, keys: bytes, local: bool = False, all_ranks: bool = False, position: int | None = None
    ) -> FakeMatch | None:
        before = sum(len(match.keys) // 16 for match in self.matches)
        self.answer = [Source.OWN_DRAM] * max(min(len(keys) // 16, self.available - before), 0)
        return super().start_match(keys, local, all_ranks, position)


@pytest.mark.parametrize(("available", "matches"), [(3, 1), (8, 2), (20, 3), (24, 3)])
def test_matches_a_long_prompt_in_parts(monkeypatch: pytest.MonkeyPatch, available: int, matches: int) -> None:
    monkeypatch.setattr("reprise.vllm.scheduler.KEYS_PER_MATCH", 8)
    session = PrefixSession(available=available)
    assert side(session).matched_tokens(request(24), 0) == (available * TOKENS, True)
    assert len(session.matches) == matches
    whole = block_keys(geometry().namespace, request(24).block_hashes)
    assert whole.startswith(b"".join(match.keys for match in session.matches))
    assert [match.position for match in session.matches] == [8 * part for part in range(matches)]


def test_parts_without_time_in_a_step_are_matched_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reprise.vllm.scheduler.KEYS_PER_MATCH", 8)
    session = PrefixSession(available=16)
    scheduler = side(session, match_budget_ms=1.0)
    new_request = request(24)
    deadline = time.monotonic() + 60
    while (result := scheduler.matched_tokens(new_request, 0)) == (None, False):
        assert time.monotonic() < deadline
        # The first match of the next step uses up its whole budget.
        scheduler.step(output({}, {}))
        scheduler._matcher._budget_left = 1e-9
    assert result == (16 * TOKENS, True)
    assert len(session.matches) == 3


def test_wait_for_an_answer_over_several_steps_is_counted_once() -> None:
    session = FakeSession(answer=None)
    scheduler = side(session, match_budget_ms=5.0, match_deadline_ms=10_000.0)
    new_request = request(2)
    for _ in range(3):
        assert scheduler.matched_tokens(new_request, 0) == (None, False)
        scheduler.step(output({}, {}))
    session.matches[0].answer = [Source.OWN_DRAM] * 2
    assert scheduler.matched_tokens(new_request, 0) == (2 * TOKENS, True)
    stats = scheduler.stats.take()
    assert stats is not None
    (waited,) = stats.data["match_seconds"]
    assert waited >= 0.01, "the sum over three steps"


def test_request_that_must_compute_its_whole_prompt_is_not_matched() -> None:
    session = FakeSession(answer=[Source.OWN_DRAM] * 2)
    scheduler = side(session)
    new_request = request(2)
    new_request.skip_reading_prefix_cache = True
    scheduler.begin(new_request)
    assert scheduler.matched_tokens(new_request, 0) == (0, False)
    assert session.matches == []


def test_step_waits_briefly_while_requests_compute_and_for_its_budget_otherwise() -> None:
    scheduler = side(FakeSession(answer=None), match_budget_ms=200.0, match_busy_ms=5.0, match_deadline_ms=10_000.0)
    running, waiting = request(1, "running"), request(4, "waiting")
    times = []
    for _ in range(2):
        scheduler.step(output({"running": (0, 1)}, {}))
        before = time.monotonic()
        for _ in range(10):
            assert scheduler.matched_tokens(waiting, 0) == (None, False)
        times.append(time.monotonic() - before)
    assert min(times) < 0.1, "5 ms per step, over all polls"
    scheduler.finish(running)
    before = time.monotonic()
    assert scheduler.matched_tokens(waiting, 0) == (None, False)
    assert time.monotonic() - before >= 0.1, "no other request is delayed"


def test_request_is_matched_on_arrival_and_again_after_a_long_wait(monkeypatch: Any) -> None:
    session = FakeSession(answer=[Source.OWN_DRAM])
    scheduler = side(session)
    soon, late = request(4, "soon"), request(4, "late")
    scheduler.begin(soon)
    scheduler.begin(late)
    assert len(session.matches) == 2
    assert scheduler.matched_tokens(soon, 0) == (TOKENS, True)
    assert len(session.matches) == 2, "the match from the arrival is used"
    session.answer = [Source.OWN_DRAM] * 3
    monkeypatch.setattr("reprise.vllm.scheduler.ANSWER_KEPT_S", 0.0)
    assert scheduler.matched_tokens(late, 0) == (3 * TOKENS, True), "blocks saved during the wait are found"
    assert len(session.matches) == 3


def test_request_continues_without_an_answer_after_the_deadline() -> None:
    session = FakeSession(answer=None)
    scheduler = side(session, match_budget_ms=1.0, match_deadline_ms=30.0)
    new_request = request(4)
    give_up = time.monotonic() + 60
    while scheduler.matched_tokens(new_request, 0) == (None, False):
        assert time.monotonic() < give_up
        scheduler.step(output({}, {}))
    assert session.suspected == 1
    assert len(session.matches) == 1, "the pending match is polled again, not started again"


def test_late_answer_is_used() -> None:
    session = FakeSession(answer=None)
    scheduler = side(session, match_budget_ms=1.0)
    new_request = request(4)
    assert scheduler.matched_tokens(new_request, 0) == (None, False)
    session.matches[0].answer = [Source.PEER_DRAM] * 4
    assert scheduler.matched_tokens(new_request, 0) == (4 * TOKENS, True)


def test_failed_load_is_not_retried_for_its_request() -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM] * 4))
    new_request = request(4)
    assert scheduler.matched_tokens(new_request, 0) == (4 * TOKENS, True)
    scheduler.handle_worker_output(SimpleNamespace(kv_connector_worker_meta=RepriseWorkerMetadata(failed_loads={"r"})))
    assert scheduler.matched_tokens(new_request, 0) == (0, False)


def test_without_an_agent_no_block_is_found_or_pinned() -> None:
    scheduler = side(FakeSession(connected=False))
    new_request = request(4)
    assert scheduler.matched_tokens(new_request, 0) == (0, False)
    metadata = scheduler.step(output({"r": (0, 4 * TOKENS)}, {"r": [1, 2, 3, 4]}))
    assert (metadata.loads, metadata.saves) == ([], [])


def test_one_match_covers_the_blocks_of_all_ranks() -> None:
    session, alone = FakeSession(answer=[Source.OWN_DRAM] * 2), FakeSession()
    scheduler = side(session, ranks=2)
    assert scheduler.matched_tokens(request(4), 0) == (2 * TOKENS, True)
    (match,) = session.matches
    expected = b"".join(block_keys(namespace, request(4).block_hashes) for namespace in geometry(ranks=2).namespaces)
    assert (match.keys, match.all_ranks) == (expected, True)
    side(alone).matched_tokens(request(4), 0)
    assert not alone.matches[0].all_ranks


def test_scheduler_finds_blocks_saved_by_two_ranks(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster", arena=16 * MIB, pool=128 * MIB)
    shape, new_request = geometry(ranks=2), request(4)
    sessions = tuple(Session(cluster.agents[0].socket, namespace, namespace.layout) for namespace in shape.namespaces)
    try:
        for session, namespace, blocks in zip(sessions, shape.namespaces, (4, 3), strict=True):
            assert session.wait_connected(60.0)
            memory = KvMemory([torch.ones(8, 2, TOKENS, 8) for _ in range(2)], namespace.layout)
            transfers = Transfers(session, memory)
            save = transfers.save(block_keys(namespace, new_request.block_hashes[:blocks]), range(blocks))
            assert transfers.wait([save], 60.0)
            transfers.close()
        scheduler = side(sessions[0], ranks=2, match_deadline_ms=600_000.0)
        assert scheduler.matched_tokens(new_request, 0) == (3 * TOKENS, True)
    finally:
        for session in sessions:
            session.close()
        cluster.stop()


def test_change_of_weights_invalidates_earlier_saves() -> None:
    session = FakeSession(answer=[Source.OWN_DRAM] * 4)
    scheduler = side(session)
    new_request = request(4)
    assert scheduler.matched_tokens(new_request, 0) == (4 * TOKENS, True)
    session.answer = []
    scheduler.invalidate()
    assert scheduler.matched_tokens(new_request, 0) == (0, False)
    before, after = session.matches
    assert not set(keys_of(before)) & set(keys_of(after))
    (save,) = scheduler.step(output({"r": (0, 4 * TOKENS)}, {"r": [1, 2, 3, 4]})).saves
    assert not set(save.hashes) & set(new_request.block_hashes)


@pytest.mark.parametrize(("may_load", "skips"), [(True, False), (True, True), (False, False)])
def test_request_running_during_a_change_of_weights_is_saved_only_after_recomputation(
    may_load: bool, skips: bool
) -> None:
    scheduler = side(FakeSession())
    scheduler.may_load = may_load
    new_request = request(4)
    new_request.skip_reading_prefix_cache = skips
    scheduler.matched_tokens(new_request, 0)
    scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": [1, 2]}))
    scheduler.invalidate()
    assert scheduler.step(output({"r": (2 * TOKENS, 2 * TOKENS)}, {"r": [1, 2, 3, 4]})).saves == []
    # The request is preempted and starts again from its first token.
    scheduler.matched_tokens(new_request, 0)
    (save,) = scheduler.step(output({"r": (0, 4 * TOKENS)}, {"r": [5, 6, 7, 8]})).saves
    assert len(save.hashes) == 4


def cached_in(scheduler: Any, new_request: Any, ids: list[int]) -> None:
    """Enters blocks into vLLM's prefix cache, as if the request had computed them."""
    for block_hash, block in zip(new_request.block_hashes, ids, strict=False):
        key = make_block_hash_with_group_id(block_hash, 0)
        scheduler.pool.cached_block_hash_to_block.insert(key, scheduler.pool.blocks[block])


def test_unsaved_blocks_of_a_preempted_request_are_saved_before_they_are_reused() -> None:
    scheduler = side(FakeSession(), save_decode_blocks=False)
    running = request(4)
    running.num_prompt_tokens = 2 * TOKENS
    scheduler.matched_tokens(running, 0)
    ids = [1, 2, 3, 4]
    (saved,) = scheduler.step(output({"r": (0, 4 * TOKENS)}, {"r": ids})).saves
    assert saved.blocks == (1, 2)
    cached_in(scheduler, running, ids)
    (saved,) = scheduler.step(output({}, {}, preempted={"r"})).saves
    assert (saved.blocks, saved.position, len(saved.hashes)) == ((3, 4), 2, 2)
    assert [references(scheduler, block) for block in ids] == [1] * 4, "vLLM does not reuse them before"
    assert scheduler.stats.data["swapped_out_blocks"] == 2
    assert scheduler.step(output({}, {}, preempted={"r"})).saves == [], "once"


def test_blocks_of_a_preempted_request_that_vllm_has_reused_are_not_saved() -> None:
    scheduler = side(FakeSession(), save_decode_blocks=False)
    running = request(4)
    running.num_prompt_tokens = TOKENS
    scheduler.matched_tokens(running, 0)
    # The fourth block is not full yet.
    scheduler.step(output({"r": (0, 3 * TOKENS + 5)}, {"r": [1, 2, 3, 4]}))
    cached_in(scheduler, running, [1, 2, 3, 4])
    reused = make_block_hash_with_group_id(running.block_hashes[2], 0)
    scheduler.pool.cached_block_hash_to_block.pop(reused, 3)
    (saved,) = scheduler.step(output({}, {}, preempted={"r"})).saves
    assert saved.blocks == (2,)
    unsaved = request(2, "unsaved")
    unsaved.kv_transfer_params = {"kv_no_store": True}
    scheduler.matched_tokens(unsaved, 0)
    scheduler.step(output({"unsaved": (0, 2 * TOKENS)}, {"unsaved": [5, 6]}))
    assert scheduler.step(output({}, {}, preempted={"unsaved"})).saves == []


def test_a_preempted_request_is_matched_again_and_loads_its_generated_tokens() -> None:
    session = FakeSession(answer=[Source.OWN_DRAM] * 2)
    scheduler = side(session)
    running = request(2)
    assert scheduler.matched_tokens(running, 0) == (2 * TOKENS, True)
    scheduler.allocated(running, blocks_of([1, 2]), 2 * TOKENS)
    scheduler.step(output({"r": (2 * TOKENS, 5)}, {"r": [1, 2, 3]}))
    running.block_hashes += [bytes([9]) * 32]
    session.answer = [Source.OWN_DRAM] * 3
    scheduler.step(output({}, {}, preempted={"r"}))
    assert scheduler.matched_tokens(running, 0) == (3 * TOKENS, True), "not the match of its prompt"
    scheduler.allocated(running, blocks_of([4, 5, 6]), 3 * TOKENS)
    assert scheduler.stats.data["swapped_in_blocks"] == 3


def test_blocks_computed_on_cached_blocks_of_old_weights_are_not_saved() -> None:
    scheduler = side(FakeSession())
    cached = scheduler.pool.cached_block_hash_to_block
    block = scheduler.pool.blocks[1]
    cached.insert(b"of the old weights", block)
    scheduler.invalidate()
    scheduler.matched_tokens(request(4), 2 * TOKENS)
    assert scheduler.step(output({"r": (2 * TOKENS, 2 * TOKENS)}, {"r": [1, 2, 3, 4]})).saves == []
    # A request computed from its first token has KV of the new weights only.
    scheduler.matched_tokens(request(4, "new"), 0)
    assert len(scheduler.step(output({"new": (0, 4 * TOKENS)}, {"new": [5, 6, 7, 8]})).saves) == 1
    # Now vLLM's own cache is empty.
    cached.pop(b"of the old weights", block.block_id)
    scheduler.invalidate()
    scheduler.matched_tokens(request(4, "later"), 2 * TOKENS)
    assert len(scheduler.step(output({"later": (2 * TOKENS, 2 * TOKENS)}, {"later": [1, 2, 3, 4]})).saves) == 1


def test_metadata_marks_a_step_without_computation() -> None:
    scheduler = side(FakeSession())
    assert scheduler.step(output({}, {})).is_idle
    assert not scheduler.step(output({"a": (0, 5)}, {"a": [1]})).is_idle


def test_state_of_a_finished_request_is_dropped() -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM] * 2))
    scheduler.matched_tokens(request(4), 0)
    assert len(scheduler.hit_sources(request(4))) == 2
    scheduler.step(output({}, {}, finished={"r"}))
    assert scheduler.hit_sources(request(4)) == ()


def test_complete_save_publishes_an_event_with_its_tokens() -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM]), ranks=1)
    scheduler.events = KvEvents(scheduler.geometry)
    new_request = request(3)
    scheduler.matched_tokens(new_request, 0)
    (save,) = scheduler.step(output({"r": (TOKENS, 2 * TOKENS)}, {"r": [1, 2, 3]})).saves
    assert scheduler.events.take() == []
    scheduler.handle_worker_output(ended(save.save_id))
    (event,) = scheduler.events.take()
    keys = [block_keys(scheduler.geometry.namespace, [block_hash]) for block_hash in new_request.block_hashes]
    assert (event.parent_block_hash, event.block_hashes) == (keys[0], keys[1:])
    assert event.token_ids == new_request.all_token_ids[TOKENS : 3 * TOKENS]
    assert scheduler.events.take() == [], "an event is returned once"


def test_partial_save_publishes_no_event() -> None:
    scheduler = side(FakeSession(), ranks=2)
    scheduler.events = KvEvents(scheduler.geometry)
    scheduler.matched_tokens(request(2), 0)
    (save,) = scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": [1, 2]})).saves
    results = RepriseWorkerMetadata(ended_saves=Counter({save.save_id: 1}), partial_saves={save.save_id})
    scheduler.handle_worker_output(SimpleNamespace(kv_connector_worker_meta=results))
    scheduler.handle_worker_output(ended(save.save_id))
    assert not scheduler.has_pending_transfers()
    assert scheduler.events.take() == []


def test_event_has_the_same_fields_as_vllms_own_event() -> None:
    hash_blocks = get_hash_fn_by_name("sha256")
    init_none_hash(hash_blocks)
    new_request: Any = Request(
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
    pool.cache_full_blocks(new_request, pool.get_new_blocks(3), 0, 3, TOKENS, 0)
    (theirs,) = pool.take_events()
    events = KvEvents(geometry())
    events.plan(1, new_request, 0, new_request.block_hashes, ())
    events.ended(1, whole=True)
    (ours,) = events.take()
    assert ours.extra_keys == [("law", "salt"), ("law",), ("law",)]
    names = (
        "extra_keys",
        "group_idx",
        "session_id",
        "token_ids",
        "block_size",
        "lora_id",
        "lora_name",
        "parent_block_hash",
    )
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sokcet": "/x"}, "did you mean 'socket'"),
        ({"zzz": 1}, "expected one of"),
        ({"match_budget_ms": "5"}, "expected a number"),
        ({"match_budget_ms": -1}, "above 0"),
        ({"save_decode_blocks": 1}, "true or false"),
        ({"tenant": 3}, "a string"),
    ],
)
def test_rejects_invalid_options(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Options.read(given)
