"""Log of the backend that moves an engine's blocks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from reprise import Transfers


@dataclass
class ExtentLog:
    """Logs the backend of some transfers when it is first known, and when it changes."""

    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("reprise"))
    _logged: tuple[str | None, str | None, list[str]] | None = None

    def note(self, transfers: Transfers) -> None:
        """Logs the backend, unless it was logged already; call it when a transfer has ended."""
        report = transfers.extents()
        if report is None:
            return
        found = (report.load_backend, report.save_backend, report.unusable)
        if found == (None, None, []):
            return
        if found == self._logged:
            return
        self._logged = found
        reasons = "; ".join(report.unusable)
        if report.load_backend is None and report.save_backend is None:
            self.logger.info("blocks take the agent's arena, because no backend reaches its devices: %s", reasons)
        else:
            loads, saves = (name or "arena" for name in (report.load_backend, report.save_backend))
            why = f" ({reasons})" if reasons else ""
            self.logger.info("backend of loads: %s, of saves: %s%s", loads, saves, why)
