"""An error of transfers is told once for as long as it is the same."""

from __future__ import annotations

import pytest

from reprise.told import TEXTS_MAX, Told


def test_an_error_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    told = Told("blocks were not saved")
    for error in ("no room", None, "no room", "no agent", "no room"):
        told.note(error)
    said = [(record.levelname, record.name, record.getMessage()) for record in caplog.records]
    assert said == [
        ("WARNING", "reprise", "blocks were not saved: no room (told once)"),
        ("WARNING", "reprise", "blocks were not saved: no agent (told once)"),
    ]


def test_errors_that_are_all_different_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    told = Told("blocks were not saved")
    for number in range(2 * TEXTS_MAX):
        told.note(f"error {number}")
    assert len(caplog.records) == TEXTS_MAX
