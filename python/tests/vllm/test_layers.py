"""Layer-wise loads and saves: which blocks the scheduler side publishes, and what the worker side waits for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from test_scheduler import TOKENS, FakeSession, blocks_of, geometry, output, references, request, side

from reprise import Source
from reprise.layer_reports import Computation, LayerReports
from reprise.vllm.connector import RepriseConnector
from reprise.vllm.metadata import LoadPlan, RepriseMetadata, RepriseWorkerMetadata, SavePlan
from reprise.vllm.options import Options
from reprise.vllm.scheduler import SchedulerSide
from reprise.vllm.worker import WorkerSide

LOADED, COMPUTED = (1, 2, 3), 4
"""Blocks of a request that loads three blocks and computes a fourth in the same step."""


def layered(ranks: int = 1) -> SchedulerSide:
    """Returns a scheduler side with layer-wise loads, whose agent has three blocks."""
    return side(FakeSession(answer=[Source.OWN_DRAM] * 3), ranks=ranks, layerwise_loads=True)


def begin(scheduler: SchedulerSide) -> tuple[Any, RepriseMetadata]:
    """Runs a step that loads three blocks of a request and computes its fourth."""
    asked = request(4)
    assert scheduler.matched_tokens(asked, 0) == (3 * TOKENS, False)
    assert scheduler.pool is not None
    blocks = [*LOADED, COMPUTED]
    # vLLM does this when it allocates blocks.
    vllm_blocks = scheduler.pool.get_new_blocks(4)
    assert [block.block_id for block in vllm_blocks] == blocks
    scheduler.pool.cache_full_blocks(asked, vllm_blocks, 0, 4, TOKENS, 0)
    scheduler.allocated(asked, blocks_of([*blocks, 5]), 3 * TOKENS)
    return asked, scheduler.step(output({"r": (3 * TOKENS, TOKENS + 3)}, {"r": blocks}))


def in_prefix_cache(scheduler: SchedulerSide, asked: Any) -> list[bool]:
    """Returns for each block of a request whether it is in vLLM's prefix cache."""
    assert scheduler.pool is not None
    return [scheduler.pool.get_cached_block(block_hash, [0]) is not None for block_hash in asked.block_hashes]


def next_step(scheduler: SchedulerSide, **results: Any) -> RepriseMetadata:
    """Passes workers' results to the scheduler side and returns the metadata of the next step."""
    worker = RepriseWorkerMetadata(**results)
    scheduler.handle_worker_output(SimpleNamespace(kv_connector_worker_meta=worker))  # type: ignore[arg-type]
    return scheduler.step(output({}, {}))


def test_request_with_verified_blocks_is_saved_and_shared_after_the_step() -> None:
    scheduler = layered()
    asked, metadata = begin(scheduler)
    assert [plan.blocks for plan in metadata.loads] == [LOADED]
    assert metadata.saves == []
    assert in_prefix_cache(scheduler, asked) == [False] * 4
    assert scheduler.has_pending_transfers(), "vLLM must continue until the save ends"
    (save,) = next_step(scheduler, whole_loads=Counter({"r": 1})).saves
    assert save.blocks == (COMPUTED,)
    assert in_prefix_cache(scheduler, asked) == [True] * 4
    assert next_step(scheduler).saves == [], "the save is submitted once"


def test_no_block_of_a_request_with_a_failed_load_is_saved_or_shared() -> None:
    scheduler = layered()
    asked, _ = begin(scheduler)
    assert references(scheduler, COMPUTED) == 2
    assert next_step(scheduler, failed_loads={"r"}, ended_loads=Counter({"r": 1})).saves == []
    assert references(scheduler, COMPUTED) == 1
    assert in_prefix_cache(scheduler, asked) == [False] * 4
    assert not scheduler.has_pending_transfers()
    again = scheduler.step(output({"r": (TOKENS, 3 * TOKENS)}, {"r": [*LOADED, COMPUTED]}))
    assert again.saves[0].blocks == (*LOADED, COMPUTED), "saved after recomputation"


def test_load_is_verified_when_every_rank_has_loaded_all_blocks() -> None:
    for whole, failed in ((2, set[str]()), (1, {"r"})):
        scheduler = layered(ranks=2)
        asked, _ = begin(scheduler)
        saves = next_step(scheduler, whole_loads=Counter({"r": whole}), failed_loads=failed).saves
        assert len(saves) == whole - 1
        assert in_prefix_cache(scheduler, asked) == [whole == 2] * 4


def test_another_request_of_the_same_step_is_saved() -> None:
    scheduler = layered()
    begin(scheduler)
    scheduler.session.answer = []  # type: ignore[attr-defined]
    scheduler.matched_tokens(request(2, "other"), 0)
    metadata = scheduler.step(output({"other": (0, 2 * TOKENS)}, {"other": [8, 9]}))
    assert [plan.blocks for plan in metadata.saves] == [(8, 9)]


def test_prompt_of_full_blocks_leaves_the_last_block_to_compute() -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM] * 4), layerwise_loads=True)
    asked = request(4)
    asked.num_tokens = 4 * TOKENS
    assert scheduler.matched_tokens(asked, 0) == (3 * TOKENS, False)
    assert scheduler.matched_tokens(asked, 3 * TOKENS) == (0, False)


@dataclass
class FakeTransfers:
    """Transfers that end when the test sets it; records all calls."""

    calls: list[Any] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)

    def load_by_layers(self, keys: bytes, blocks: tuple[int, ...]) -> int:
        self.calls.append(("load", blocks))
        return 1

    def save_by_layers(
        self, keys: bytes, blocks: tuple[int, ...], parent: bytes | None, position: int | None, priority: str
    ) -> int:
        self.calls.append(("save by layers", blocks))
        return 2

    def save(
        self, keys: bytes, blocks: tuple[int, ...], parent: bytes | None, position: int | None, priority: str
    ) -> int:
        self.calls.append(("save", blocks))
        return 3

    def wait_layer(self, ids: list[int], layer: int, timeout: float) -> bool:
        self.calls.append(("layer", layer))
        return True

    def note_filled(self, ids: list[int], layers: int) -> None:
        self.calls.append(("filled", layers))

    def wait(self, ids: list[int], timeout: float) -> bool:
        self.calls.append(("end", *ids))
        # The first wait times out.
        return self.calls.count(("end", *ids)) > 1

    def extents(self) -> None:
        """Returns that all blocks take the arena."""

    def finished(self) -> list[Any]:
        ended, self.ended = self.ended, []
        return ended


def worker(**options: Any) -> tuple[WorkerSide, FakeTransfers]:
    """Returns a worker side with fake transfers."""
    transfers = FakeTransfers()
    made = WorkerSide(geometry=geometry(), options=Options.read(options), session=None)  # type: ignore[arg-type]
    made._transfers = transfers  # type: ignore[assignment]
    return made, transfers


def step_of(*, load: bool = True, save: bool = True) -> RepriseMetadata:
    """Returns the metadata of a step."""
    return RepriseMetadata(
        loads=[LoadPlan("r", (b"1" * 32,), (1,))] if load else [],
        saves=[SavePlan(7, (b"2" * 32,), (2,), 0)] if save else [],
    )


def test_step_waits_for_each_layer_and_reports_each_computed_layer() -> None:
    made, transfers = worker(layerwise_loads=True, layerwise_saves=True)
    metadata = step_of()
    made.start_loads(metadata)
    for name in ("a", "b"):
        made.begin_layer(name, metadata)
        made.end_layer(name)
    made.end_step(metadata, is_complete=True)
    computing = [("save by layers", (2,)), ("layer", 0), ("filled", 1), ("layer", 1), ("filled", 2)]
    assert transfers.calls == [("load", (1,)), *computing, ("end", 1), ("end", 1), ("filled", 2)]
    transfers.ended = [SimpleNamespace(id=1, ok=[True], error=None, by_extents=0, ran=0.1, sources=[None])]
    assert made.loaded() == set(), "vLLM does not wait for the request"
    results = made.take_worker_output()
    assert results is not None
    assert (results.whole_loads, results.failed_loads) == (Counter({"r": 1}), set())
    assert made.take_worker_output() is None


def test_failed_load_is_reported_with_the_step_that_used_it() -> None:
    made, transfers = worker(layerwise_loads=True)
    metadata = step_of(save=False)
    made.start_loads(metadata)
    transfers.ended = [
        SimpleNamespace(id=1, ok=[False], error="the agent is gone", by_extents=0, ran=0.1, sources=[None])
    ]
    # vLLM calls this before the end of the step if a draft model follows.
    assert made.loaded() == set()
    assert ("end", 1) in transfers.calls
    assert made.take_failed_blocks() == {1}
    results = made.take_worker_output()
    assert results is not None
    assert (results.whole_loads, results.failed_loads) == (Counter(), {"r"})


def test_layers_computed_out_of_order_are_reported_when_earlier_layers_are_filled() -> None:
    made, transfers = worker(layerwise_saves=True)
    metadata = step_of(load=False)
    for name in ("b", "unknown", "a"):
        made.begin_layer(name, metadata)
        made.end_layer(name)
    assert [call for call in transfers.calls if call[0] == "filled"] == [("filled", 0), ("filled", 2)]


def test_loads_are_submitted_before_the_first_layer_even_if_vllm_submits_them_later() -> None:
    made, transfers = worker(layerwise_loads=True)
    metadata = step_of(save=False)
    made.begin_layer("a", metadata)
    made.start_loads(metadata)
    assert transfers.calls == [("load", (1,)), ("layer", 0)]


def test_layer_without_its_own_kv_waits_for_the_end_of_all_loads() -> None:
    made, transfers = worker(layerwise_loads=True)
    metadata = step_of(save=False)
    made.start_loads(metadata)
    made.begin_layer("shares its blocks", metadata)
    assert transfers.calls[1:] == [("end", 1), ("end", 1)]


def test_step_without_a_forward_pass_saves_its_blocks() -> None:
    made, transfers = worker(layerwise_saves=True)
    made.end_step(step_of(load=False), is_complete=True)
    assert transfers.calls == [("save", (2,))]


@pytest.mark.parametrize("layerwise", [True, False])
def test_failed_forward_pass_saves_no_block(layerwise: bool) -> None:
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
    assert transfers.calls[-1] == ("save", (2,)), "the next step saves again"


def test_step_has_its_computation_and_an_idle_step_has_none() -> None:
    scheduler = side(FakeSession())
    for name in ("new", "old"):
        scheduler.begin(request(4, name))
    step = output({"new": (TOKENS, 2 * TOKENS)}, {"new": [1, 2, 3]})
    generating = request(4, "old").num_prompt_tokens + 5
    step.scheduled_cached_reqs = SimpleNamespace(req_ids=["old"], num_computed_tokens=[generating])
    step.num_scheduled_tokens["old"] = 1
    step.kv_connector_block_state = SimpleNamespace(get_block_ids=lambda name: None)
    mixed = Computation("prefill", input_tokens=2 * TOKENS + 1, prefix_tokens=TOKENS + generating)
    assert scheduler.step(step).computation == mixed
    step.scheduled_new_reqs, step.num_scheduled_tokens = [], {"old": 4}
    step.scheduled_spec_decode_tokens = {"old": [7, 8, 9]}
    assert scheduler.step(step).computation == Computation("decode", input_tokens=4, prefix_tokens=generating)
    assert scheduler.step(output({}, {})).computation is None


@dataclass
class FakeReportSession:
    """Session that records the reported computations and times."""

    reports: list[tuple[Any, Any]] = field(default_factory=list)

    def start_layer_report(
        self, model: str, phase: Any, input_tokens: int = 0, prefix_tokens: int = 0, previous_micros: int | None = None
    ) -> Any:
        self.reports.append((phase, previous_micros))
        return SimpleNamespace(poll=lambda: SimpleNamespace(layer_micros=100))


@pytest.mark.parametrize("layerwise", [True, False])
def test_connector_reports_its_layers_unless_they_wait_for_loads(layerwise: bool) -> None:
    made, _ = worker(layerwise_loads=layerwise)
    session, times = FakeReportSession(), iter(range(100))
    made.reports = LayerReports(session, "m", ("a", "b"), now=lambda: float(next(times)))  # type: ignore[arg-type]
    connector: Any = object.__new__(RepriseConnector)
    connector._scheduler, connector._worker, connector._is_layerwise = None, made, layerwise
    for loads in (False, True, False):
        connector._connector_metadata = step_of(load=loads, save=False)
        connector._connector_metadata.computation = Computation("decode", 1, 0)
        for name in ("a", "b"):
            connector.wait_for_layer_load(name)
            connector.save_kv_layer(name, None, None)
        connector.wait_for_save()
    assert [phase for phase, _ in session.reports] == ["decode"] * (2 if layerwise else 3)
    assert all(micros > 0 for _, micros in session.reports[1:])
    connector._connector_metadata = RepriseMetadata(is_idle=True)
    connector.wait_for_save()
    assert session.reports[-1][0] is None
