"""A repeated error is logged once, then as a count per interval, then as ended."""

from __future__ import annotations

import logging

import pytest

from reprise.repeated_log import INTERVAL_S, KINDS_MAX, RepeatedLog


class Clock:
    """Clock controlled by the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    taken = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return taken


def test_error_is_logged_once_and_then_counted_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="reprise")
    clock = Clock()
    log = RepeatedLog("blocks were not saved", clock)
    for number in range(100):
        log.note(f"no room for {number} blocks")
        log.note(None)
    assert lines(caplog) == [("WARNING", "blocks were not saved: no room for 0 blocks")]
    clock.now += INTERVAL_S
    log.note(None)
    repeated = "blocks were not saved: no room for 99 blocks (repeated 99 times within 60 s)"
    assert lines(caplog) == [("WARNING", repeated)]
    clock.now += INTERVAL_S
    log.note(None)
    assert lines(caplog) == [
        ("INFO", "blocks were not saved: no longer occurs (100 times in total): no room for 99 blocks")
    ]
    log.note("no room for 1 blocks")
    assert [level for level, _ in lines(caplog)] == ["WARNING"]


def test_kinds_of_errors_have_separate_lines_up_to_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    log = RepeatedLog("blocks were not saved", Clock())
    for number in range(4 * KINDS_MAX):
        log.note("error " + "x" * number)
    assert len(lines(caplog)) == KINDS_MAX + 1


def test_end_of_a_single_error_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="reprise")
    clock = Clock()
    log = RepeatedLog("blocks were not saved", clock)
    log.note("no agent")
    assert len(lines(caplog)) == 1
    clock.now += INTERVAL_S
    log.note(None)
    assert lines(caplog) == []
