"""Imported by every Python process of an engine under test, before anything else: waits in vLLM's message queues sleep.

vLLM waits there by calling ``sched_yield`` in a loop. On Linux 6.18 without kernel preemption, two ranks that do so on two cores were
seen to keep every other process of the machine from running for up to five seconds, and nothing of that is Reprise's to show.
"""

from __future__ import annotations

import os
import time

NAP_S = 2e-5


def nap() -> None:
    """In place of ``os.sched_yield``."""
    time.sleep(NAP_S)


os.sched_yield = nap
