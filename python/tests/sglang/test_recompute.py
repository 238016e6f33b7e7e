"""Load or recompute in SGLang's storage: measured steps of its scheduler, and the number of pages to load."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pool import HostPool
from sglang.srt.mem_cache.hicache_storage import PoolName
from test_storage import Make, hashes, make, same

from reprise import Source
from reprise.recompute import LoadChooser, NoCounters, Prefill
from reprise.sglang import steps
from reprise.sglang.options import StorageOptions

__all__ = ["make"]


class Mode:
    """A forward mode of SGLang."""

    def __init__(self, is_prefill: bool) -> None:
        self.is_prefill = is_prefill

    def is_extend(self) -> bool:
        return self.is_prefill


def batch(*parts: tuple[int, int]) -> Any:
    """Returns a batch of prompts, with new tokens and tokens before them; without any, one of decode."""
    return SimpleNamespace(
        forward_mode=Mode(bool(parts)),
        extend_lens=[new for new, _ in parts] or None,
        prefix_lens=[before for _, before in parts] or None,
    )


class Scheduler:
    """The parts of SGLang's scheduler that are measured."""

    def __init__(self) -> None:
        self._sched_idled, self.enable_overlap = True, False
        self.ran: list[Any] = []

    def run_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> str:
        self._sched_idled = False
        self.ran.append(batch)
        return "result"


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Scheduler]]:
    """A class of SGLang's scheduler that no other test has wrapped."""
    made = type("Scheduler", (Scheduler,), {"run_batch": Scheduler.run_batch})
    module = ModuleType(steps.SCHEDULER[0])
    module.Scheduler = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, steps.SCHEDULER[0], module)
    monkeypatch.setattr(steps, "_wrapped", None)
    yield made
    steps._choosers.clear()


def chooser() -> LoadChooser:
    made = LoadChooser.create(StorageOptions.read({}), 16, 1 << 20, NoCounters())
    assert made is not None
    return made


def test_steps_of_the_scheduler_are_measured(scheduler: type[Scheduler]) -> None:
    made, clock = chooser(), [0.0]
    made.now = lambda: clock[0]
    steps.measure(made)
    steps.measure(made)
    engine = scheduler()
    assert engine.run_batch(batch((1000, 0))) == "result"
    clock[0] = 0.1
    assert made.is_computing
    assert engine.run_batch(batch()) == "result"
    limit = made.policy.limit(1, 0)
    assert limit is not None
    assert limit[1] == pytest.approx(0.0016)
    assert len(engine.ran) == 2, "each batch runs once"
    clock[0] = 9.0
    assert not made.is_computing


def test_pause_of_the_scheduler_is_not_measured(scheduler: type[Scheduler]) -> None:
    made, clock = chooser(), [0.0]
    made.now = lambda: clock[0]
    steps.measure(made)
    engine = scheduler()
    engine.run_batch(batch((1000, 0)))
    clock[0], engine._sched_idled = 50.0, True
    engine.run_batch(batch((1000, 0)))
    assert made.policy.limit(1, 0) is None


def test_unknown_version_of_sglang_is_not_measured_and_still_computes(
    scheduler: type[Scheduler], caplog: pytest.LogCaptureFixture
) -> None:
    made = chooser()
    steps.measure(made)
    engine = scheduler()
    del engine.enable_overlap
    with caplog.at_level("WARNING", "reprise"):
        assert engine.run_batch(batch((1000, 0))) == "result"
        assert engine.run_batch(batch((1000, 0))) == "result"
    assert len([record for record in caplog.records if "cannot be measured" in record.message]) == 1
    assert made.policy.limit(1, 0) is None


def test_steps_that_cannot_be_measured_any_longer_make_old_ones_invalid(scheduler: type[Scheduler]) -> None:
    made, clock = chooser(), [0.0]
    made.now = lambda: clock[0]
    steps.measure(made)
    engine = scheduler()
    engine.run_batch(batch((1000, 0)))
    clock[0] = 0.1
    engine.run_batch(batch())
    assert made.policy.limit(1, 0) is not None
    assert engine.run_batch(SimpleNamespace(forward_mode=None)) == "result"
    assert made.policy.limit(1, 0) is None
    assert made.policy.decide([Source.OWN_NVME] * 3).reason == "unmeasured"
    assert not made.is_computing


def test_engine_without_this_method_loads_all_pages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, steps.SCHEDULER[0], ModuleType(steps.SCHEDULER[0]))
    with caplog.at_level("INFO", "reprise"):
        steps.measure(chooser())
    assert "all found pages are loaded" in caplog.text


def test_storage_has_only_pages_that_are_faster_to_load(make: Make) -> None:
    written, read = HostPool("page_first", False), HostPool("page_first", False)
    written.fill(1)
    keys = hashes(1, 20)
    writer, reader = make(written), make(read)
    assert writer.batch_set_v1(keys, written.indices(list(range(20)))) == [True] * 20
    chooser = reader._store(PoolName.KV).chooser
    assert chooser is not None
    assert reader.batch_exists(keys) == 20, "nothing is measured"
    chooser.observe_step(Prefill(1000, 500.0), 50.0)
    assert reader.batch_exists(keys) == 20, "the source is not measured"
    assert reader.batch_get_v1(keys, read.indices(list(range(20)))) == [True] * 20
    assert same(written, list(range(20)), read, list(range(20)))
    assert reader.batch_exists(keys) == 20, "loading is faster"
    for _ in range(400):
        chooser.observe_step(Prefill(1000, 500.0), 1e-6)
    assert reader.batch_exists(keys) == 0, "computing is faster"
    assert reader.exists(keys[0])
    without = make(HostPool("page_first", False), {"load_or_recompute": False})
    assert without._store(PoolName.KV).chooser is None
