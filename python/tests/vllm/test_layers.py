"""Layer-wise loads and saves: what the scheduler's side lets others have, and what a worker's side waits for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from test_scheduler import TOKENS, FakeSession, blocks_of, geometry, output, references, request, side

from reprise import Source
from reprise.vllm.connector import RepriseConnector
from reprise.vllm.metadata import LoadPlan, RepriseMetadata, RepriseWorkerMetadata, SavePlan
from reprise.vllm.options import Options
from reprise.vllm.scheduler import SchedulerSide
from reprise.vllm.worker import WorkerSide

LOADED, COMPUTED = (1, 2, 3), 4
"""Blocks of a request that loads three and computes the fourth in the same step."""


def layered(ranks: int = 1) -> SchedulerSide:
    """A scheduler's side that loads layer by layer, whose agent has three blocks."""
    return side(FakeSession(answer=[Source.OWN_DRAM] * 3), ranks=ranks, layerwise_loads=True)


def begin(scheduler: SchedulerSide) -> tuple[Any, RepriseMetadata]:
    """A step that loads three blocks of a request and computes its fourth."""
    asked = request(4)
    assert scheduler.matched_tokens(asked, 0) == (3 * TOKENS, False)
    assert scheduler.pool is not None
    blocks = [*LOADED, COMPUTED]
    # vLLM does so when it makes room.
    vllm_blocks = scheduler.pool.get_new_blocks(4)
    assert [block.block_id for block in vllm_blocks] == blocks
    scheduler.pool.cache_full_blocks(asked, vllm_blocks, 0, 4, TOKENS, 0)
    scheduler.allocated(asked, blocks_of([*blocks, 5]), 3 * TOKENS)
    return asked, scheduler.step(output({"r": (3 * TOKENS, TOKENS + 3)}, {"r": blocks}))


def in_prefix_cache(scheduler: SchedulerSide, asked: Any) -> list[bool]:
    """Which blocks of a request vLLM would give to another."""
    assert scheduler.pool is not None
    return [scheduler.pool.get_cached_block(block_hash, [0]) is not None for block_hash in asked.block_hashes]


def said(scheduler: SchedulerSide, **what: Any) -> RepriseMetadata:
    """What workers say of the step, and what they are told to do in the next one."""
    worker = RepriseWorkerMetadata(**what)
    scheduler.workers_said(SimpleNamespace(kv_connector_worker_meta=worker))  # type: ignore[arg-type]
    return scheduler.step(output({}, {}))


def test_a_request_whose_blocks_are_whole_is_saved_and_shared_after_the_step() -> None:
    scheduler = layered()
    asked, metadata = begin(scheduler)
    assert [plan.blocks for plan in metadata.loads] == [LOADED]
    assert metadata.saves == []
    assert in_prefix_cache(scheduler, asked) == [False] * 4
    assert scheduler.is_under_way(), "so that vLLM goes on until it is saved"
    (save,) = said(scheduler, whole_loads=Counter({"r": 1})).saves
    assert save.blocks == (COMPUTED,)
    assert in_prefix_cache(scheduler, asked) == [True] * 4
    assert said(scheduler).saves == [], "once"


def test_nothing_of_a_request_whose_load_failed_is_saved_or_shared() -> None:
    scheduler = layered()
    asked, _ = begin(scheduler)
    assert references(scheduler, COMPUTED) == 2
    assert said(scheduler, failed_loads={"r"}, ended_loads=Counter({"r": 1})).saves == []
    assert references(scheduler, COMPUTED) == 1
    assert in_prefix_cache(scheduler, asked) == [False] * 4
    assert not scheduler.is_under_way()
    again = scheduler.step(output({"r": (TOKENS, 3 * TOKENS)}, {"r": [*LOADED, COMPUTED]}))
    assert again.saves[0].blocks == (*LOADED, COMPUTED), "when it has been computed again"


def test_blocks_are_whole_when_every_rank_says_so() -> None:
    for whole, failed in ((2, set[str]()), (1, {"r"})):
        scheduler = layered(ranks=2)
        asked, _ = begin(scheduler)
        saves = said(scheduler, whole_loads=Counter({"r": whole}), failed_loads=failed).saves
        assert len(saves) == whole - 1
        assert in_prefix_cache(scheduler, asked) == [whole == 2] * 4


def test_another_request_of_the_same_step_is_saved_as_always() -> None:
    scheduler = layered()
    begin(scheduler)
    scheduler.session.answer = []  # type: ignore[attr-defined]
    scheduler.matched_tokens(request(2, "other"), 0)
    metadata = scheduler.step(output({"other": (0, 2 * TOKENS)}, {"other": [8, 9]}))
    assert [plan.blocks for plan in metadata.saves] == [(8, 9)]


def test_a_prompt_of_whole_blocks_leaves_one_to_compute() -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM] * 4), layerwise_loads=True)
    asked = request(4)
    asked.num_tokens = 4 * TOKENS
    assert scheduler.matched_tokens(asked, 0) == (3 * TOKENS, False)
    assert scheduler.matched_tokens(asked, 3 * TOKENS) == (0, False)


@dataclass
class FakeTransfers:
    """Transfers that end when the test says so; notes what is asked of them."""

    calls: list[Any] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)

    def load_by_layers(self, keys: bytes, blocks: tuple[int, ...]) -> int:
        self.calls.append(("load", blocks))
        return 1

    def save_by_layers(self, keys: bytes, blocks: tuple[int, ...], parent: bytes | None) -> int:
        self.calls.append(("save by layers", blocks))
        return 2

    def save(self, keys: bytes, blocks: tuple[int, ...], parent: bytes | None) -> int:
        self.calls.append(("save", blocks))
        return 3

    def wait_layer(self, ids: list[int], layer: int, timeout: float) -> bool:
        self.calls.append(("layer", layer))
        return True

    def note_filled(self, ids: list[int], layers: int) -> None:
        self.calls.append(("filled", layers))

    def wait(self, ids: list[int], timeout: float) -> bool:
        self.calls.append(("end", *ids))
        # The first round is not enough.
        return self.calls.count(("end", *ids)) > 1

    def finished(self) -> list[Any]:
        ended, self.ended = self.ended, []
        return ended


def worker(**options: Any) -> tuple[WorkerSide, FakeTransfers]:
    """A worker's side with transfers of the test's."""
    transfers = FakeTransfers()
    made = WorkerSide(geometry=geometry(), options=Options.read(options), session=None)  # type: ignore[arg-type]
    made._transfers = transfers  # type: ignore[assignment]
    return made, transfers


def step_of(*, load: bool = True, save: bool = True) -> RepriseMetadata:
    """What a step is to do."""
    return RepriseMetadata(
        loads=[LoadPlan("r", (b"1" * 32,), (1,))] if load else [],
        saves=[SavePlan(7, (b"2" * 32,), (2,))] if save else [],
    )


def test_a_step_waits_for_each_layer_and_tells_each_that_is_computed() -> None:
    made, transfers = worker(layerwise_loads=True, layerwise_saves=True)
    metadata = step_of()
    made.start_loads(metadata)
    for name in ("a", "b"):
        made.layer_begins(name, metadata)
        made.layer_ends(name)
    made.end_step(metadata, is_whole=True)
    computing = [("save by layers", (2,)), ("layer", 0), ("filled", 1), ("layer", 1), ("filled", 2)]
    assert transfers.calls == [("load", (1,)), *computing, ("end", 1), ("end", 1), ("filled", 2)]
    transfers.ended = [SimpleNamespace(id=1, ok=[True], error=None)]
    assert made.loaded() == set(), "vLLM does not wait for it"
    said = made.take_said()
    assert said is not None
    assert (said.whole_loads, said.failed_loads) == (Counter({"r": 1}), set())
    assert made.take_said() is None


def test_a_load_that_failed_is_told_with_the_step_that_computed_with_it() -> None:
    made, transfers = worker(layerwise_loads=True)
    metadata = step_of(save=False)
    made.start_loads(metadata)
    transfers.ended = [SimpleNamespace(id=1, ok=[False], error="the agent is gone")]
    # Before the end of the step, as vLLM asks where a draft model follows.
    assert made.loaded() == set()
    assert ("end", 1) in transfers.calls
    assert made.take_failed_blocks() == {1}
    said = made.take_said()
    assert said is not None
    assert (said.whole_loads, said.failed_loads) == (Counter(), {"r"})


def test_layers_in_another_order_are_told_when_those_before_them_are_filled() -> None:
    made, transfers = worker(layerwise_saves=True)
    metadata = step_of(load=False)
    for name in ("b", "unknown", "a"):
        made.layer_begins(name, metadata)
        made.layer_ends(name)
    assert [call for call in transfers.calls if call[0] == "filled"] == [("filled", 0), ("filled", 2)]


def test_loads_that_vllm_submits_behind_the_forward_pass_are_submitted_before_its_first_layer() -> None:
    made, transfers = worker(layerwise_loads=True)
    metadata = step_of(save=False)
    made.layer_begins("a", metadata)
    made.start_loads(metadata)
    assert transfers.calls == [("load", (1,)), ("layer", 0)]


def test_a_layer_without_kv_of_its_own_waits_for_whole_loads() -> None:
    made, transfers = worker(layerwise_loads=True)
    metadata = step_of(save=False)
    made.start_loads(metadata)
    made.layer_begins("shares its blocks", metadata)
    assert transfers.calls[1:] == [("end", 1), ("end", 1)]


def test_a_step_without_a_forward_pass_saves_what_is_whole() -> None:
    made, transfers = worker(layerwise_saves=True)
    made.end_step(step_of(load=False), is_whole=True)
    assert transfers.calls == [("save", (2,))]


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_forward_pass_that_fails_has_nothing_saved(layerwise: bool) -> None:
    made, transfers = worker(layerwise_saves=layerwise)
    metadata = step_of(load=False)
    connector: Any = object.__new__(RepriseConnector)
    connector._scheduler, connector._worker, connector._is_layerwise = None, made, layerwise
    connector._connector_metadata = metadata
    with pytest.raises(RuntimeError, match="out of memory"):
        try:
            connector.wait_for_layer_load("a")
            connector.save_kv_layer("a", None, None)
            raise RuntimeError("out of memory")
        finally:
            connector.wait_for_save()
    assert transfers.calls == ([("save by layers", (2,)), ("filled", 1)] if layerwise else [])
    connector.wait_for_save()
    assert transfers.calls[-1] == ("save", (2,)), "the next step is another"
