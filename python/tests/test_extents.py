"""Transfers through extents: rings on an emulated NVMe controller, files of the pool, and the arena where neither reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster import MIB, Cluster
from conftest import keys_of, memory_of, tensors
from faults import damage, drop_dram, eventually, freeze, observer, thaw

from reprise import ExtentReport, Finished, Layout, Namespace, Session, Source, Transfers

BLOCKS = 24
LONG = 60.0
"""Seconds; longer than any call takes unless it hangs."""

BACKENDS = {"queues": "gpu-queue-emulated", "files": "staged-host"}
"""Names of backends, by what the agent lends."""

Start = Callable[[str], Cluster]


@pytest.fixture
def start(built: None, tmp_path: Path) -> Iterator[Start]:
    """Factory of a cluster whose agent lends queue pairs, files, or nothing."""
    started: list[Cluster] = []

    def start(lends: str) -> Cluster:
        started.append(Cluster(tmp_path / f"cluster-{lends}", arena=16 * MIB, pool=128 * MIB, lends=lends))
        return started[-1]

    yield start
    for cluster in started:
        cluster.stop()


@pytest.fixture
def connect(namespace: Namespace, layout: Layout) -> Iterator[Callable[[Cluster], Session]]:
    """Factory of sessions with the first agent."""
    sessions: list[Session] = []

    def connect(cluster: Cluster) -> Session:
        sessions.append(Session(cluster.agents[0].socket, namespace, layout, timeout=LONG))
        assert sessions[-1].wait_connected(LONG)
        return sessions[-1]

    yield connect
    for session in sessions:
        session.close()


def transfers_of(session: Session, engine: list[np.ndarray], layout: Layout, **changes: float) -> Transfers:
    """Returns transfers that nothing but a hang ends early."""
    patience = {"load_deadline": LONG, "load_stall": LONG, "load_standstill": LONG, "save_stall": LONG, **changes}
    return Transfers(session, memory_of(engine, layout), extents=True, **patience)


def ended(transfers: Transfers, number: int) -> Finished:
    """Waits for a transfer and returns its result."""
    assert transfers.wait([number], LONG)
    return next(done for done in transfers.finished() if done.id == number)


def report_of(transfers: Transfers) -> ExtentReport:
    """Returns the report of transfers with extents."""
    report = transfers.extents()
    assert report is not None
    if any("without a C++ compiler" in reason or "built without extents" in reason for reason in report.unusable):
        pytest.skip(report.unusable[0])
    return report


def same(engine: list[np.ndarray], saved: list[np.ndarray], at: slice) -> bool:
    """Returns whether blocks of the engine have the saved bytes."""
    return all(np.array_equal(layer[at], expected) for layer, expected in zip(engine, saved, strict=True))


@pytest.mark.parametrize("lends", ["queues", "files"])
def test_blocks_move_through_extents_byte_exact(
    start: Start, connect: Callable[[Cluster], Session], namespace: Namespace, layout: Layout, lends: str
) -> None:
    cluster = start(lends)
    keys = keys_of(namespace, range(BLOCKS))
    engine = tensors(2 * BLOCKS, seed=1)
    saved_bytes = [layer[:BLOCKS].copy() for layer in engine]
    with transfers_of(connect(cluster), engine, layout) as transfers:
        saved = ended(transfers, transfers.save(keys, range(BLOCKS)))
        report = report_of(transfers)
        print(f"backend of saves: {report.save_backend}")
        assert (report.load_backend, report.save_backend) == (None, BACKENDS[lends]), report.unusable
        assert (saved.committed, saved.unsaved, saved.by_extents, saved.error) == (BLOCKS, 0, BLOCKS, None)
        again = ended(transfers, transfers.save(keys, range(BLOCKS)))
        assert (again.committed, again.duplicates) == (0, BLOCKS)
        loaded = ended(transfers, transfers.load(keys, range(BLOCKS, 2 * BLOCKS)))
        assert (loaded.ok, loaded.by_extents) == ([True] * BLOCKS, BLOCKS)
        assert loaded.sources == [Source.OWN_NVME] * BLOCKS
        assert same(engine, saved_bytes, slice(BLOCKS, 2 * BLOCKS))
        report = report_of(transfers)
        assert (report.load_backend, report.save_backend) == (BACKENDS[lends], BACKENDS[lends])
        assert (report.loaded, report.saved, report.not_loaded, report.not_saved) == (BLOCKS, BLOCKS, 0, 0)
        block = layout.block_bytes
        if lends == "queues":
            assert report.contexts >= 2 * BLOCKS
            assert (report.bytes_written, report.bytes_read) == (BLOCKS * block, BLOCKS * (block + 4096))
        assert [reason.split(" ")[0] for reason in report.unusable] == (
            ["gpu-queue", "gds"] if lends == "files" else []
        )
    with observer(cluster.agents[0]) as seen:
        stats = seen.stats()
    assert stats["loads"] == 0, "no block went through the arena"


@pytest.mark.parametrize("lends", ["queues", "files"])
def test_blocks_in_dram_take_the_arena(
    start: Start, connect: Callable[[Cluster], Session], namespace: Namespace, layout: Layout, lends: str
) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    engine = tensors(2 * BLOCKS, seed=1)
    saved_bytes = [layer[:BLOCKS].copy() for layer in engine]
    session = connect(start(lends))
    with Transfers(session, memory_of(engine, layout), save_stall=LONG) as copies:
        assert copies.extents() is None
        assert ended(copies, copies.save(keys, range(BLOCKS))).committed == BLOCKS
    with transfers_of(session, engine, layout) as transfers:
        loaded = ended(transfers, transfers.load(keys, range(BLOCKS, 2 * BLOCKS)))
        assert (loaded.ok, loaded.by_extents) == ([True] * BLOCKS, 0)
        assert loaded.sources == [Source.OWN_DRAM] * BLOCKS
        assert same(engine, saved_bytes, slice(BLOCKS, 2 * BLOCKS))


def test_an_agent_that_lends_nothing_serves_from_its_arena_and_reports_why(
    start: Start, connect: Callable[[Cluster], Session], namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    with transfers_of(connect(start("")), tensors(BLOCKS, seed=1), layout) as transfers:
        saved = ended(transfers, transfers.save(keys, range(BLOCKS)))
        assert (saved.committed, saved.by_extents) == (BLOCKS, 0)
        report = report_of(transfers)
        assert (report.save_backend, report.not_saved) == (None, BLOCKS)
        assert any("session.extents" in reason for reason in report.unusable), report.unusable


def test_damaged_blocks_are_misses(
    start: Start, connect: Callable[[Cluster], Session], namespace: Namespace, layout: Layout
) -> None:
    cluster = start("queues")
    keys = keys_of(namespace, range(BLOCKS))
    engine = tensors(2 * BLOCKS, seed=1)
    with transfers_of(connect(cluster), engine, layout) as transfers:
        assert ended(transfers, transfers.save(keys, range(BLOCKS))).by_extents == BLOCKS
        damage(cluster.agents[0].pool)
        loaded = ended(transfers, transfers.load(keys, range(BLOCKS, 2 * BLOCKS)))
        assert (loaded.ok, loaded.by_extents) == ([False] * BLOCKS, 0)
        assert report_of(transfers).not_loaded == BLOCKS


def test_a_killed_agent_costs_misses_and_the_next_one_opens_the_backend_again(
    start: Start, connect: Callable[[Cluster], Session], namespace: Namespace, layout: Layout
) -> None:
    cluster = start("queues")
    agent = cluster.agents[0]
    keys = keys_of(namespace, range(BLOCKS))
    engine = tensors(2 * BLOCKS, seed=1)
    saved_bytes = [layer[:BLOCKS].copy() for layer in engine]
    session = connect(cluster)
    with transfers_of(session, engine, layout) as transfers:
        assert ended(transfers, transfers.save(keys, range(BLOCKS))).by_extents == BLOCKS
        load = transfers.load(keys, range(BLOCKS, 2 * BLOCKS))
        agent.kill()
        interrupted = ended(transfers, load)
        for block, is_ok in enumerate(interrupted.ok):
            assert not is_ok or same(engine, [layer[block] for layer in saved_bytes], BLOCKS + block)  # type: ignore[arg-type]
        assert not any(ended(transfers, transfers.load(keys, range(BLOCKS, 2 * BLOCKS))).ok)
        agent.start()
        eventually(lambda: session.connected, LONG)
        loaded = ended(transfers, transfers.load(keys, range(BLOCKS, 2 * BLOCKS)))
        assert (loaded.ok, loaded.by_extents) == ([True] * BLOCKS, BLOCKS)
        assert same(engine, saved_bytes, slice(BLOCKS, 2 * BLOCKS))
        assert report_of(transfers).load_backend == "gpu-queue-emulated"


def test_late_writes_of_a_frozen_agent_do_not_reach_the_engine(
    start: Start, connect: Callable[[Cluster], Session], namespace: Namespace, layout: Layout
) -> None:
    cluster = start("queues")
    agent = cluster.agents[0]
    keys = keys_of(namespace, range(BLOCKS))
    engine = tensors(2 * BLOCKS, seed=1)
    session = connect(cluster)
    with transfers_of(session, engine, layout, load_stall=0.5, load_standstill=0.5) as transfers:
        assert ended(transfers, transfers.save(keys, range(BLOCKS))).by_extents == BLOCKS
        freeze(agent)
        try:
            failed = ended(transfers, transfers.load(keys, range(BLOCKS, 2 * BLOCKS)))
        finally:
            for layer in engine:
                layer[BLOCKS:] = 7
            thaw(agent)
        assert not any(failed.ok)
        with observer(agent) as seen:
            drop_dram(seen)
        assert all((layer[BLOCKS:] == 7).all() for layer in engine)
