"""Load or recompute: measurements and decisions of an engine, and the limit of a wait for a load."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from cluster import Cluster
from conftest import keys_of, memory_of, tensors
from faults import freeze, thaw

from reprise import Layout, Namespace, Session, Source, Transfers
from reprise.options import SharedOptions
from reprise.recompute import COUNTERS, NO_PREFILL, LoadChooser, Prefill, counts_of

LONG = 60.0
BLOCK_TOKENS, BLOCK_BYTES = 16, 1 << 20
PREFILL = Prefill(1000, 500.0)


class TestOptions(SharedOptions):
    """Options of an adapter."""

    __test__ = False
    where = "options"


@dataclass
class Clock:
    """A clock that the test sets."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Counted:
    """Counters."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, count: int) -> None:
        assert name in COUNTERS
        self.counts[name] += count


def chooser(counted: Counted, delay: int = 0, **options: float | bool) -> LoadChooser:
    made = LoadChooser.create(TestOptions.read(options), BLOCK_TOKENS, BLOCK_BYTES, counted, delay)
    assert made is not None
    made.now = Clock()
    return made


def step(made: LoadChooser, prefill: Prefill | None, seconds: float) -> None:
    """Begins a step and lets its time pass."""
    made.step(prefill)
    assert isinstance(made.now, Clock)
    made.now.seconds += seconds


def measure_load(made: LoadChooser, source: Source, blocks: int, seconds: float) -> None:
    counts = counts_of([source] * blocks)
    made.started("load", counts)
    made.measured("load", counts, seconds)
    made.ended("load")


def test_option_turns_decisions_off() -> None:
    options = TestOptions.read({"load_or_recompute": False})
    assert LoadChooser.create(options, BLOCK_TOKENS, BLOCK_BYTES, Counted()) is None


@pytest.mark.parametrize("value", [0, -1, math.nan, "1"])
def test_rejects_invalid_limits_with_their_unit(value: object) -> None:
    with pytest.raises(ValueError, match=r"microseconds|µs"):
        TestOptions.read({"recompute_wait_per_token_us": value})
    with pytest.raises(ValueError, match=r"milliseconds|ms"):
        TestOptions.read({"recompute_wait_cap_ms": value})


def test_everything_is_loaded_before_measurements_and_the_cheaper_way_taken_afterwards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted = Counted()
    made = chooser(counted)
    sources = [Source.OWN_DRAM] * 2 + [Source.OWN_NVME] * 2
    with caplog.at_level(logging.INFO, "reprise"):
        decision = made.choose(sources, 0, is_computing=False)
        assert (decision.blocks, decision.reason, decision.limit) == (4, "unmeasured", None)
        step(made, PREFILL, 0.1)
        step(made, NO_PREFILL, 0.02)
        # 16 tokens take 1.6 ms.
        measure_load(made, Source.OWN_DRAM, 10, 0.001)
        measure_load(made, Source.OWN_NVME, 10, 0.1)
        for _ in range(2):
            decision = made.choose(sources, 0, is_computing=False)
            assert (decision.blocks, decision.reason, decision.requested) == (2, "part", [2, 0, 0, 0])
        assert made.choose(sources[2:], 0, is_computing=False).blocks == 0
        assert made.choose(sources[:2], 0, is_computing=False).reason == "load"
    assert counted.counts == Counter(
        decisions_unmeasured=1, decisions_part=2, decisions_compute=1, decisions_load=1, recomputed_blocks=6
    )
    logged = [record.message for record in caplog.records if "load or recompute" in record.message]
    assert len(logged) == 4, "the first decision of each kind is logged"
    assert "loading 2 of 4 found blocks" in logged[1]


def test_limit_of_the_wait_is_the_bound_and_the_time_of_computing_arrived_blocks() -> None:
    made = chooser(
        Counted(), recompute_wait_cap_ms=60.0, recompute_wait_base_ms=10.0, recompute_wait_per_token_us=1000.0
    )
    step(made, PREFILL, 0.1)
    step(made, None, 0.0)
    decision = made.choose([Source.PEER_DRAM] * 2, 0, is_computing=False)
    assert decision.limit == pytest.approx((0.042, 0.0016))
    assert made.choose([Source.PEER_DRAM] * 9, 0, is_computing=False).limit == pytest.approx((0.06, 0.0016))


def test_time_of_a_pause_is_not_that_of_a_step() -> None:
    made = chooser(Counted())
    step(made, PREFILL, 1.0)
    made.pause()
    step(made, None, 5.0)
    step(made, PREFILL, 0.1)
    assert made.choose([Source.OWN_DRAM], 0, is_computing=False).limit is None
    step(made, PREFILL, 0.1)
    limit = made.choose([Source.OWN_DRAM], 0, is_computing=False).limit
    assert limit is not None
    assert limit[1] == pytest.approx(0.0016)


def test_steps_scheduled_ahead_are_measured_when_they_compute() -> None:
    made = chooser(Counted(), delay=1)
    step(made, PREFILL, 0.001)
    # The engine schedules this step while the first one computes.
    step(made, NO_PREFILL, 0.1)
    step(made, NO_PREFILL, 0.02)
    limit = made.choose([Source.OWN_DRAM], 0, is_computing=False).limit
    assert limit is not None
    assert limit[1] == pytest.approx(0.0016)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 61.0])
def test_impossible_times_are_ignored_and_counted(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    counted = Counted()
    made = chooser(counted)
    with caplog.at_level(logging.WARNING, "reprise"):
        made.observe_step(PREFILL, seconds)
        made.observe_step(PREFILL, seconds)
        assert made.choose([Source.OWN_DRAM], 0, is_computing=False).limit is None
    assert counted.counts["ignored_measurements"] == 2
    assert len([record for record in caplog.records if "impossible" in record.message]) == 1
    load = counts_of([Source.OWN_DRAM])
    made.started("load", load)
    made.measured("load", load, -1.0)
    made.measured("load", (5, 0, 0, 0), 0.1)
    assert counted.counts["ignored_measurements"] == 4
    made.measured("load", load, 0.0)
    made.measured("other", load, -1.0)
    assert counted.counts["ignored_measurements"] == 4, "a load that did not run does not count"


def test_load_ends_at_its_limit_although_the_agent_hangs(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    keys, blocks = keys_of(namespace, range(8)), range(8)
    with Session(cluster.agents[0].socket, namespace, layout, timeout=LONG) as session:
        assert session.wait_connected(LONG)
        memory = memory_of(tensors(8, seed=1), layout)
        with Transfers(
            session, memory, load_deadline=LONG, load_stall=LONG, load_standstill=LONG, save_stall=LONG
        ) as transfers:
            assert transfers.wait([transfers.save(keys, blocks)], LONG)
            within = transfers.load(keys, blocks, (LONG, 0.0))
            assert transfers.wait([within], LONG)
            _, done = transfers.finished()
            assert done.ok == [True] * 8
            assert 0 < done.ran <= done.seconds
            freeze(cluster.agents[0])
            try:
                began = time.monotonic()
                late = transfers.load(keys, blocks, (0.2, 0.001))
                assert transfers.wait([late], LONG / 2)
                # Much less than the other limits, even on a slow machine.
                assert 0.15 < time.monotonic() - began < LONG / 4
            finally:
                thaw(cluster.agents[0])
            (done,) = transfers.finished()
            assert not any(done.ok)


def test_load_behind_others_does_not_start_after_its_limit(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(4))
    with Session(cluster.agents[0].socket, namespace, layout, timeout=LONG) as session:
        assert session.wait_connected(LONG)
        with Transfers(session, memory_of(tensors(4, seed=1), layout), load_stall=1.0) as transfers:
            assert transfers.wait([transfers.save(keys, range(4))], LONG)
            transfers.finished()
            late = transfers.load(keys, range(4), (0.0, 0.0))
            assert transfers.wait([late], LONG)
            (done,) = transfers.finished()
            assert done.ok == [False] * 4
            assert done.error is not None
            assert "computing is faster" in done.error
