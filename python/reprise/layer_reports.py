"""Measures layers of an engine's steps and reports them to the agent, which compares them with its slack profile.

```text
step k          report k ─▶ first layer: mark ─▶ … ─▶ middle layer: mark
a later step m  report m, with the mean time of the layers between the marks of k
```

A report carries the time of the step that was reported before it. So a step is reported only when the answer to the
last report and its time are available; the others pass unreported. Nothing here waits, neither for the agent nor for a
GPU. The marks are in the first half of the model, because a draft model may follow the second half. Steps that replay a
captured graph of the whole model call nothing here, so they are neither measured nor reported.

Cost of a step: one message of some tens of bytes, at most every :data:`REPORT_INTERVAL_S`. While the agent has no
prediction for a phase, one in :data:`UNKNOWN_PAUSE_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from reprise import LayerGuidance, PendingReport, Session

REPORT_INTERVAL_S = 0.01
"""Minimum seconds between two reports. A few hundred reports suffice for the quantiles of a profile's error."""

UNKNOWN_PAUSE_S = 10.0
"""Seconds without reports of a phase after the agent had no prediction for it, and after no agent answered."""

MODEL_BYTES_MAX = 253
"""Maximum bytes of a model's name in a report (docs/PROTOCOL.md, part 1)."""

MICROS_MAX = 10_000_000
"""Maximum time in a report; a longer one is not reported, because the process was suspended meanwhile."""

TOKENS_MAX = 2**32 - 1

Phase: TypeAlias = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Computation:
    """Computation of a step: the key of the tables of a slack profile."""

    phase: Phase
    """"decode" if every request computes one token, else "prefill"."""
    input_tokens: int
    """Tokens that the step computes."""
    prefix_tokens: int
    """Tokens before them, of all requests."""


class Clock(Protocol):
    """Clock of the processor that computes layers."""

    def mark(self) -> Any:
        """Returns a mark at the current point of the computation; None if that is impossible now."""

    def seconds(self, first: Any, last: Any) -> float | None:
        """Returns the time between two marks; None while the computation has not passed the last one."""


class HostClock:
    """Clock of a computation on this thread: a CPU engine."""

    def mark(self) -> float:
        """Returns the current time."""
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float | None:
        """Returns the time between two marks."""
        return last - first


class GpuClock:
    """Clock of a computation on a GPU: CUDA events, which are read when the GPU has passed them."""

    def __init__(self, cuda: Any) -> None:
        """Creates the clock; ``cuda`` is ``torch.cuda``."""
        self._cuda = cuda

    def mark(self) -> Any:
        """Records an event on the current stream; returns None during the capture of a graph."""
        if self._cuda.is_current_stream_capturing():
            return None
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float | None:
        """Returns the time between two events; None while the GPU has not passed the last one."""
        return first.elapsed_time(last) / 1e3 if last.query() else None


@dataclass
class _Sample:
    """Marks of the step that was reported last."""

    first: Any
    last: Any = None


@dataclass
class LayerReports:
    """Reports of one engine process. Not thread-safe: all calls are from the thread that runs the model."""

    session: Session
    model: str
    """Name of the model, as in the subject of its profile."""
    layer_names: Sequence[str]
    """Names of the layers in the order of their computation."""
    clock: Clock = field(default_factory=HostClock)
    now: Callable[[], float] = time.monotonic
    _indices: dict[str, int] = field(init=False)
    _middle: int = field(init=False)
    """Index of the layer with the last mark; 0: too few layers, nothing is measured or reported."""
    _sample: _Sample | None = None
    _is_measuring: bool = False
    """Whether the current step is the one reported last."""
    _pending: PendingReport | None = None
    """Last report, whose answer was not read."""
    _phase: Phase | None = None
    """Phase in that report; None: the engine computes nothing."""
    _next_at: float = 0.0
    _paused_until: dict[Phase, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._indices = {name: index for index, name in enumerate(self.layer_names)}
        has_valid_name = 0 < len(self.model.encode()) <= MODEL_BYTES_MAX
        self._middle = len(self._indices) // 2 if has_valid_name else 0

    def begin_layer(self, name: str, computation: Computation | None) -> None:
        """Marks the beginning of a layer; the first layer begins a step.

        Args:
            name: name of the layer; layers without KV are ignored.
            computation: computation of the step; None: unknown, the step is not reported.
        """
        index = self._indices.get(name)
        if index == 0 and self._middle:
            if self._is_measuring:
                # The step runs its model in several parts, whose layers alternate.
                self._discard()
            elif computation is not None:
                self._begin_step(computation)
        elif self._is_measuring and index == self._middle and self._sample is not None:
            self._is_measuring = False
            self._sample.last = self.clock.mark()
            if self._sample.last is None:
                self._discard()

    def end_step(self, *, is_idle: bool = False) -> None:
        """Ends a step.

        Args:
            is_idle: whether the step computed nothing.
        """
        if self._is_measuring:
            # The layers did not all call: a captured graph, or an error.
            self._discard()
        if is_idle and self._phase is not None and self._is_due():
            self._report(None)

    def _begin_step(self, computation: Computation) -> None:
        if (
            self._is_due()
            and self.now() >= self._paused_until.get(computation.phase, 0.0)
            and self._report(computation)
        ):
            mark = self.clock.mark()
            self._sample = None if mark is None else _Sample(mark)
            self._is_measuring = self._sample is not None

    def _is_due(self) -> bool:
        """Returns whether a report may be sent now; reads the answer to the last one."""
        if self.now() < self._next_at:
            return False
        if self._pending is None:
            return True
        guidance = self._pending.poll()
        if guidance is None:
            return False
        self._pending = None
        if self._phase is not None and not _predicts(guidance):
            self._paused_until[self._phase] = self.now() + UNKNOWN_PAUSE_S
            self._sample = None
        return True

    def _report(self, computation: Computation | None) -> bool:
        """Sends a report with the last sample; returns False if that is not complete or no agent answers."""
        micros = None
        if self._sample is not None:
            seconds = self.clock.seconds(self._sample.first, self._sample.last)
            if seconds is None:
                return False
            mean = round(seconds / self._middle * 1e6)
            micros = mean if 0 < mean <= MICROS_MAX else None
            self._sample = None
        if computation is None:
            self._phase = None
            self._pending = self.session.start_layer_report(self.model, None, previous_micros=micros)
        else:
            self._phase = computation.phase
            tokens = (min(computation.input_tokens, TOKENS_MAX), min(computation.prefix_tokens, TOKENS_MAX))
            self._pending = self.session.start_layer_report(self.model, computation.phase, *tokens, micros)
        self._next_at = self.now() + (UNKNOWN_PAUSE_S if self._pending is None else REPORT_INTERVAL_S)
        return self._pending is not None

    def _discard(self) -> None:
        self._sample = None
        self._is_measuring = False


def _predicts(guidance: LayerGuidance) -> bool:
    return guidance.layer_micros > 0
