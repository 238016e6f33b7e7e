"""Measured steps of SGLang's scheduler, which a storage does not see.

The storage runs in the process of the scheduler. Its method ``run_batch`` is wrapped in its class when the first storage is
created. The time between two calls is that of a step, except after a pause of the scheduler. In a version of SGLang
without this method or its fields, nothing is measured, and all found pages are loaded.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any
from weakref import WeakSet

from reprise.recompute import NO_PREFILL, LoadChooser, Prefill

logger = logging.getLogger("reprise")

SCHEDULER = ("sglang.srt.managers.scheduler", "Scheduler")
"""Class that runs the batches. Its module is not imported here, because that needs SGLang's compiled kernels; in an engine,
SGLang has imported it."""

_choosers: WeakSet[LoadChooser] = WeakSet()
"""Decisions that use the measurements."""

_wrapped: type | None = None
"""Class whose method is wrapped."""


def measure(chooser: LoadChooser) -> None:
    """Passes the steps of this process' scheduler to decisions."""
    global _wrapped
    _choosers.add(chooser)
    scheduler = getattr(sys.modules.get(SCHEDULER[0]), SCHEDULER[1], None)
    if scheduler is _wrapped and scheduler is not None:
        return
    original = getattr(scheduler, "run_batch", None)
    if not isinstance(scheduler, type) or not callable(original):
        logger.info("steps of SGLang's scheduler cannot be measured here: all found pages are loaded")
        return

    @functools.wraps(original)
    def wrapped(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        _note(self, batch)
        return original(self, batch, *args, **kwargs)

    scheduler.run_batch = wrapped  # type: ignore[attr-defined]
    _wrapped = scheduler


def _note(scheduler: Any, batch: Any) -> None:
    """Measures the step that a batch begins."""
    if not _choosers:
        return
    try:
        has_paused, delay = bool(scheduler._sched_idled), int(bool(scheduler.enable_overlap))
        is_prefill = batch.forward_mode.is_extend()
        prefill = Prefill.of(zip(batch.extend_lens, batch.prefix_lens, strict=True)) if is_prefill else NO_PREFILL
    except Exception as error:
        # Any exception: SGLang's step must not fail because of a measurement. Old ones would become wrong.
        for chooser in list(_choosers):
            chooser.forget_steps()
        _choosers.clear()
        logger.warning("steps of SGLang's scheduler cannot be measured: all found pages are loaded: %s", error)
        return
    for chooser in list(_choosers):
        if has_paused:
            chooser.pause()
        chooser.delay = delay
        chooser.step(prefill)
