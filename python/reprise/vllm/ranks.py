"""Match over the blocks of all ranks.

Each session has one layout, and each rank of a tensor-parallel group has its own layout. So the scheduler side has one
session per rank and starts all matches before it waits for any. A block is found if it is found for all ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from reprise import PendingMatch, Session


@dataclass(frozen=True)
class RanksMatch:
    """Pending matches of all ranks."""

    pending: tuple[PendingMatch, ...]

    def poll(self, seconds: float = 0.0) -> list[int] | None:
        """Waits for up to ``seconds``; returns the sources of the leading blocks that are found for all ranks.

        The sources are those of the first rank. Returns None while an answer is pending.
        """
        deadline = time.monotonic() + seconds
        polled = [match.poll(max(deadline - time.monotonic(), 0.0)) for match in self.pending]
        answers = [answer for answer in polled if answer is not None]
        if len(answers) < len(polled):
            return None
        return answers[0][: min(len(answer) for answer in answers)]


@dataclass(frozen=True)
class RankSessions:
    """Sessions of all ranks, with the interface of one session."""

    sessions: tuple[Session, ...]

    @property
    def connected(self) -> bool:
        """Whether all sessions are connected."""
        return all(session.connected for session in self.sessions)

    @property
    def suspected(self) -> bool:
        """Whether the agent of any session is suspected to hang."""
        return any(session.suspected for session in self.sessions)

    def start_match(self, keys: bytes) -> RanksMatch | None:
        """Starts a match; returns None unless the sessions of all ranks have an agent that answers.

        Args:
            keys: packed keys, first those of rank 0, then those of rank 1, and so on.
        """
        size = len(keys) // len(self.sessions)
        parts = [keys[at : at + size] for at in range(0, len(keys), size)] if size else [b""] * len(self.sessions)
        started = [session.start_match(part) for session, part in zip(self.sessions, parts, strict=True)]
        pending = tuple(match for match in started if match is not None)
        return RanksMatch(pending) if len(pending) == len(started) else None

    def suspect(self) -> None:
        """Marks the agent as hanging in all sessions."""
        for session in self.sessions:
            session.suspect()

    def close(self) -> None:
        """Ends all sessions."""
        for session in self.sessions:
            session.close()
