"""Reports of computed layers: measurement, time of the reports, and the prediction errors of a real agent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from api_server import ApiServer, agent_of, write_profile
from cluster import Cluster

from reprise import Layout, Namespace, Session
from reprise.layer_reports import REPORT_INTERVAL_S, UNKNOWN_PAUSE_S, Computation, GpuClock, HostClock, LayerReports

MODEL, LAYERS, LONG_S = "llama", [f"layer.{index}" for index in range(8)], 60.0
DECODE = Computation("decode", input_tokens=7, prefix_tokens=900)
PREFILL = Computation("prefill", input_tokens=512, prefix_tokens=0)
PREDICTED_MICROS = 100


@dataclass
class Time:
    """Time that the test advances, as an engine's clock and as the clock between steps."""

    at: float = 0.0
    passed: float | None = None
    """Time that the computation has reached; None: it does not lag behind."""

    def mark(self) -> float:
        return self.at

    def seconds(self, first: float, last: float) -> float | None:
        return last - first if self.passed is None or last <= self.passed else None

    def now(self) -> float:
        return self.at


@dataclass
class FakeSession:
    """Session that records reports."""

    layer_micros: int = PREDICTED_MICROS
    answers: bool = True
    reports: list[tuple[Any, ...]] = field(default_factory=list)
    is_connected: bool = True

    def start_layer_report(
        self, model: str, phase: Any, input_tokens: int = 0, prefix_tokens: int = 0, previous_micros: int | None = None
    ) -> Any:
        if not self.is_connected:
            return None
        self.reports.append((model, phase, input_tokens, prefix_tokens, previous_micros))
        guidance = SimpleNamespace(layer_micros=self.layer_micros)
        return SimpleNamespace(poll=lambda: guidance if self.answers else None)

    @property
    def micros(self) -> list[int | None]:
        """Reported times."""
        return [report[4] for report in self.reports]


def reporting(session: Any) -> tuple[LayerReports, Time]:
    """Returns reports with a clock of the test."""
    clock = Time()
    return LayerReports(session, MODEL, LAYERS, clock, clock.now), clock


def step(reports: LayerReports, clock: Time, layer_s: float, of: Computation | None = DECODE) -> None:
    """Runs a step whose layers take this time, and the time between two reports."""
    for name in LAYERS:
        reports.begin_layer(name, of)
        clock.at += layer_s
    reports.end_step()
    clock.at += REPORT_INTERVAL_S


def test_report_has_the_mean_time_of_the_layers_of_the_step_reported_before() -> None:
    session = FakeSession()
    reports, clock = reporting(session)
    for layer_s, of in ((110e-6, DECODE), (250e-6, PREFILL), (1e-3, DECODE)):
        step(reports, clock, layer_s, of)
    assert session.reports == [
        (MODEL, "decode", 7, 900, None),
        (MODEL, "prefill", 512, 0, 110),
        (MODEL, "decode", 7, 900, 250),
    ]
    reports.end_step(is_idle=True)
    reports.end_step(is_idle=True)
    assert session.reports[3:] == [(MODEL, None, 0, 0, 1000)], "the engine is reported as idle once"


def test_steps_between_two_reports_are_not_measured() -> None:
    session = FakeSession()
    reports, clock = reporting(session)
    for layer_s in (100e-6, 500e-6):
        step(reports, clock, layer_s)
        clock.at -= REPORT_INTERVAL_S
    assert session.micros == [None]
    clock.at += REPORT_INTERVAL_S
    step(reports, clock, 900e-6)
    assert session.micros == [None, 100]


def test_unanswered_report_and_unfinished_computation_delay_the_next_report() -> None:
    session = FakeSession(answers=False)
    reports, clock = reporting(session)
    clock.passed = 0.0
    for _ in range(3):
        step(reports, clock, 100e-6)
    assert session.micros == [None], "the agent has not answered"
    session.answers = True
    step(reports, clock, 100e-6)
    assert session.micros == [None], "the GPU has not reached the last mark"
    clock.passed = clock.at
    step(reports, clock, 700e-6)
    assert session.micros == [None, 100]


def test_phase_without_a_prediction_is_reported_rarely() -> None:
    session = FakeSession(layer_micros=0)
    reports, clock = reporting(session)
    for _ in range(100):
        step(reports, clock, 100e-6)
    assert session.micros == [None], "its time belongs to no prediction"
    session.layer_micros = PREDICTED_MICROS
    step(reports, clock, 100e-6, PREFILL)
    step(reports, clock, 100e-6, PREFILL)
    assert [report[1] for report in session.reports] == ["decode", "prefill", "prefill"]
    clock.at += UNKNOWN_PAUSE_S
    step(reports, clock, 100e-6)
    step(reports, clock, 200e-6)
    assert session.micros[-1] == 100


def test_without_an_agent_nothing_is_measured() -> None:
    session = FakeSession(is_connected=False)
    reports, clock = reporting(session)
    step(reports, clock, 100e-6)
    session.is_connected = True
    step(reports, clock, 100e-6)
    assert session.reports == []
    clock.at += UNKNOWN_PAUSE_S
    step(reports, clock, 100e-6)
    assert session.micros == [None]


@pytest.mark.parametrize("calls", [LAYERS[:3], [LAYERS[0], LAYERS[0], *LAYERS[1:]], LAYERS[1:]])
def test_step_whose_layers_are_not_computed_one_after_the_other_is_not_measured(calls: list[str]) -> None:
    session = FakeSession()
    reports, clock = reporting(session)
    for name in calls:
        reports.begin_layer(name, DECODE)
        clock.at += 100e-6
    reports.end_step()
    clock.at += REPORT_INTERVAL_S
    session.reports.clear()
    step(reports, clock, 200e-6)
    step(reports, clock, 300e-6)
    assert session.micros == [None, 200]


@pytest.mark.parametrize(("model", "layers"), [("", LAYERS), ("m" * 254, LAYERS), (MODEL, LAYERS[:1])])
def test_engine_that_cannot_be_reported_sends_nothing(model: str, layers: list[str]) -> None:
    session = FakeSession()
    reports = LayerReports(session, model, layers)  # type: ignore[arg-type]
    for _ in range(2):
        for name in layers:
            reports.begin_layer(name, DECODE)
        reports.end_step()
    assert session.reports == []


@dataclass
class FakeCuda:
    """``torch.cuda`` of a GPU that is behind the host: the test sets the passed time."""

    at_ms: float = 0.0
    passed_ms: float = 0.0
    captures: bool = False
    waits: int = 0

    def is_current_stream_capturing(self) -> bool:
        return self.captures

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing and not self.captures
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.at_ms)
        event.query = lambda: event.at <= self.passed_ms
        event.elapsed_time = lambda last: last.at - event.at
        return event


def test_layers_on_a_gpu_are_measured_by_events_without_waiting_for_them() -> None:
    session, cuda, now = FakeSession(), FakeCuda(), Time()
    reports = LayerReports(session, MODEL, LAYERS, GpuClock(cuda), now.now)  # type: ignore[arg-type]

    def run() -> None:
        for name in LAYERS:
            reports.begin_layer(name, DECODE)
            cuda.at_ms += 0.25
        reports.end_step()
        now.at += REPORT_INTERVAL_S

    run()
    run()
    assert session.micros == [None], "the GPU has not passed the events"
    cuda.passed_ms = cuda.at_ms
    run()
    assert session.micros == [None, 250]
    cuda.passed_ms, cuda.captures = cuda.at_ms, True
    run()
    cuda.captures = False
    run()
    run()
    assert session.micros == [None, 250, 250, None], "events are not recorded into a graph"


def profile(model: str = MODEL) -> dict[str, Any]:
    """Returns a profile that predicts layers of decode only."""
    window = {"phase": "Decode", "minInputTokens": 0, "maxInputTokens": 512, "minPrefixTokens": 0}
    window |= {"maxPrefixTokens": 65536, "layerMicros": PREDICTED_MICROS, "slackMicros": 50, "freeSms": 4}
    kernels = [{"iocbs": 1, "micros": 30, "sms": 2}]
    return {
        "subject": {"model": model, "gpuProduct": "none", "tensorParallel": 1, "engineVersion": "vllm 0.32"},
        "usablePercent": 100,
        "fallback": "ThrottleWrites",
        "maxErrorPercent": 30,
        "measurement": {
            "stepTokens": 32,
            "iocbBytes": 1 << 20,
            "windows": [window],
            "reads": kernels,
            "writes": kernels,
        },
    }


@pytest.fixture
def node(built: None, tmp_path: Path) -> Iterator[tuple[ApiServer, Path]]:
    """API server, and the socket of its node's agent, which has the profile."""
    digest = write_profile(tmp_path / "node", profile())
    server = ApiServer("profiled", {"profiles": [{"name": "llama-cpu", "digest": digest}]})
    agent = None
    try:
        agent = agent_of(tmp_path / "node", server)
        server.wait_status(lambda status: status.get("applied", {}).get("profiles"))
        yield server, agent.socket
    finally:
        if agent is not None:
            agent.kill()
        server.stop()


def answered(session: Session, *report: Any, **options: Any) -> Any:
    """Sends a report and returns the agent's answer."""
    pending = session.start_layer_report(*report, **options)
    assert pending is not None
    deadline = time.monotonic() + LONG_S
    while (guidance := pending.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert pending.poll() is not None, "a repeated poll returns the same answer"
    return guidance


def errors(status: dict[str, Any]) -> tuple[int | None, int | None]:
    """Returns median and 99th percentile of the prediction error that a node reports."""
    (reported,) = status["applied"]["profiles"]
    return reported.get("predictionErrorP50Percent"), reported.get("predictionErrorP99Percent")


def test_agent_compares_reported_layers_with_its_profile(
    node: tuple[ApiServer, Path], namespace: Namespace, layout: Layout
) -> None:
    server, socket = node
    with Session(socket, namespace, layout, timeout=LONG_S) as session:
        assert session.wait_connected(LONG_S)
        guidance = answered(session, MODEL, "decode", 7, 900)
        found = (guidance.layer_micros, guidance.slack_micros, guidance.io_sms)
        assert found == (PREDICTED_MICROS, 50, 4)
        assert (guidance.read_iocbs, guidance.write_iocbs) == (1, 1)
        assert answered(session, "another model", "decode", 7, 900).layer_micros == 0
        assert answered(session, MODEL, "prefill", 7, 900).layer_micros == 0

        reports, clock = reporting(session)
        sent = 0

        def run(layer_s: float, steps: int) -> None:
            nonlocal sent
            for _ in range(steps):
                step(reports, clock, layer_s)
                sent += 1
                # The next step needs the answer; an engine's steps are longer than that.
                deadline = time.monotonic() + LONG_S
                while reports._pending is not None and reports._pending.poll() is None:
                    assert time.monotonic() < deadline
                    time.sleep(0.0005)

        run(110e-6, 120)
        reported = server.wait_status(lambda status: errors(status) != (None, None))
        assert errors(reported) == (10, 10)
        run(145e-6, 120)
        # Above the profile's maxErrorPercent, where the operator sets the condition Drifted.
        drifted = server.wait_status(lambda status: errors(status)[1] != 10)
        assert errors(drifted)[1] == 45


def test_layers_are_measured_by_the_hosts_clock(cluster: Cluster, namespace: Namespace, layout: Layout) -> None:
    fake = FakeSession()
    reports = LayerReports(fake, MODEL, LAYERS)  # type: ignore[arg-type]
    assert isinstance(reports.clock, HostClock)
    for _ in range(2):
        for name in LAYERS:
            reports.begin_layer(name, DECODE)
            time.sleep(0.003)
        reports.end_step()
    first, measured = fake.micros
    assert first is None and measured is not None and measured >= 3000
    # An agent without a profile: one report, then a pause.
    with Session(cluster.agents[0].socket, namespace, layout, timeout=LONG_S) as session:
        assert session.wait_connected(LONG_S)
        assert answered(session, MODEL, "decode", 7, 900).layer_micros == 0


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (("", "decode"), "invalid model of 0 bytes"),
        (("m" * 254, "decode"), "invalid model of 254 bytes"),
        ((MODEL, "training"), "expected 'prefill', 'decode' or None"),
        ((MODEL, "decode", 1, 1, 10_000_001), "invalid previous_micros"),
        ((MODEL, "decode", 1, 1, 0), "invalid previous_micros"),
    ],
)
def test_invalid_report_is_an_error(
    tmp_path: Path, namespace: Namespace, layout: Layout, report: tuple[Any, ...], words: str
) -> None:
    with Session(tmp_path / "missing.sock", namespace, layout) as session:
        with pytest.raises(ValueError, match=words):
            session.start_layer_report(*report)
        assert session.start_layer_report(MODEL, None) is None
