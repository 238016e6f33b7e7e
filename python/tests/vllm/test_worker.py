"""Tests of WorkerSide: logging of failed loads, saves in incomplete steps, and waits in idle steps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from cluster import MIB, Cluster
from faults import eventually, freeze, thaw
from test_scheduler import geometry as make_geometry

from reprise import Session
from reprise.vllm.metadata import LoadPlan, RepriseMetadata, SavePlan
from reprise.vllm.options import Options
from reprise.vllm.worker import WorkerSide

LONG_S = 60.0
SHORT_S = 0.1


def test_reason_of_failed_loads_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    geometry = make_geometry()
    session = Session(tmp_path / "missing.sock", geometry.namespace, geometry.layout)
    deadline = time.monotonic() + LONG_S
    while session.last_error is None:
        assert time.monotonic() < deadline
    worker = WorkerSide(geometry=geometry, options=Options(), session=session)
    caplog.clear()
    worker.register({name: torch.zeros(4, 2, 16, 8) for name in geometry.layer_names})
    waiting = {"a", "b", "c"}
    for request in sorted(waiting):
        worker.start_loads(RepriseMetadata(loads=[LoadPlan(request_id=request, hashes=(b"h",), blocks=(1,))]))
    while waiting:
        assert time.monotonic() < deadline
        waiting -= worker.loaded()
    worker.close()
    logged = [record.getMessage() for record in caplog.records if "loaded or saved: " in record.getMessage()]
    assert len(logged) == 1
    assert "some blocks were not loaded or saved: the session with the agent has ended" in logged[0]
    assert "no agent at" in logged[0]


def test_incomplete_step_ends_its_saves_as_partial(tmp_path: Path) -> None:
    geometry = make_geometry()
    session = Session(tmp_path / "missing.sock", geometry.namespace, geometry.layout)
    worker = WorkerSide(geometry=geometry, options=Options(), session=session)
    worker.register({name: torch.zeros(4, 2, 16, 8) for name in geometry.layer_names})
    worker.end_step(
        RepriseMetadata(saves=[SavePlan(save_id=7, hashes=(b"h",), blocks=(1,), position=0)]), is_complete=False
    )
    results = worker.take_worker_output()
    assert results is not None
    assert results.ended_saves == {7: 1}
    assert results.partial_saves == {7}
    worker.close()


def test_idle_step_waits_briefly_for_its_loads(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster", arena=16 * MIB, pool=128 * MIB)
    geometry, (agent,) = make_geometry(), cluster.agents
    plan = LoadPlan(request_id="a", hashes=(b"h",), blocks=(1,))
    workers = {}
    try:
        for name, wait_s in (("long", LONG_S), ("short", SHORT_S)):
            session = Session(agent.socket, geometry.namespace, geometry.layout)
            assert session.wait_connected(LONG_S)
            long_timeouts = {f"{name}_ms": LONG_S * 1e3 for name in ("load_stall", "load_standstill", "load_deadline")}
            options = Options(idle_wait_ms=wait_s * 1e3, **long_timeouts)
            workers[name] = WorkerSide(geometry=geometry, options=options, session=session)
            workers[name].register({name: torch.zeros(4, 2, 16, 8) for name in geometry.layer_names})
        workers["long"].start_loads(RepriseMetadata(loads=[plan]))
        assert workers["long"].loaded(is_idle=True) == {"a"}, "the wait ends with the load"
        freeze(agent)
        try:
            workers["short"].start_loads(RepriseMetadata(loads=[plan]))
            since = time.monotonic()
            assert workers["short"].loaded() == set()
            assert workers["short"].loaded(is_idle=True) == set()
            assert SHORT_S <= time.monotonic() - since < LONG_S
        finally:
            thaw(agent)
        eventually(lambda: workers["short"].loaded(is_idle=True) == {"a"})
    finally:
        for worker in workers.values():
            worker.close()
        cluster.stop()
