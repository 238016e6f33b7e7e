"""One question about the blocks of all ranks.

A session is of one layout, and an agent tells it of blocks of that layout only; each rank of a tensor-parallel group has a layout of its
own. So the scheduler's side has a session for each, asks all of them before it waits for any, and a block counts when all have it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from reprise import PendingMatch, Session


@dataclass(frozen=True)
class RanksMatch:
    """A match under way, by rank."""

    pending: tuple[PendingMatch, ...]

    def poll(self, seconds: float = 0.0) -> list[int] | None:
        """Sources of the leading blocks that all ranks have, those of the first rank's; None: not all have answered in so many
        seconds."""
        give_up = time.monotonic() + seconds
        answers = [match.poll(max(give_up - time.monotonic(), 0.0)) for match in self.pending]
        told = [answer for answer in answers if answer is not None]
        if len(told) < len(answers):
            return None
        return told[0][: min(len(answer) for answer in told)]


@dataclass(frozen=True)
class RankSessions:
    """Sessions of all ranks, used as one."""

    sessions: tuple[Session, ...]

    @property
    def connected(self) -> bool:
        """Whether all are."""
        return all(session.connected for session in self.sessions)

    @property
    def suspected(self) -> bool:
        """Whether the agent owes an answer to any."""
        return any(session.suspected for session in self.sessions)

    def start_match(self, keys: bytes) -> RanksMatch | None:
        """Asks what there is; None: not every rank has somebody to ask.

        Args:
            keys: packed, those of the first rank's blocks, then those of the second's …
        """
        size = len(keys) // len(self.sessions)
        parts = [keys[at : at + size] for at in range(0, len(keys), size)] if size else [b""] * len(self.sessions)
        asked = [session.start_match(part) for session, part in zip(self.sessions, parts, strict=True)]
        pending = tuple(match for match in asked if match is not None)
        return RanksMatch(pending) if len(pending) == len(asked) else None

    def suspect(self) -> None:
        """An answer did not come."""
        for session in self.sessions:
            session.suspect()

    def close(self) -> None:
        """Ends all."""
        for session in self.sessions:
            session.close()
