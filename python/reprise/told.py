"""Errors of transfers, in the log: each text once.

A transfer that ends undone costs time only, so nothing else speaks of it; why it did is said here, once for as long as it is the same.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("reprise")

TEXTS_MAX = 64
"""Different texts that are told: some have numbers in them."""


class Told:
    """What was told already."""

    def __init__(self, what: str) -> None:
        """Of what the errors are, in words."""
        self._what = what
        self._texts: set[str] = set()

    def note(self, error: str | None) -> None:
        """Tells an error, unless it was told."""
        if error is None or error in self._texts or len(self._texts) >= TEXTS_MAX:
            return
        self._texts.add(error)
        logger.warning("%s: %s (told once)", self._what, error)
