"""Lets waits in vLLM's message queues sleep; imported first by every Python process of an engine under test.

vLLM waits by calling ``sched_yield`` in a loop. On Linux 6.18 without kernel preemption, two such ranks on two cores
blocked every other process of the machine for up to five seconds, independently of Reprise.
"""

from __future__ import annotations

import os
import time

NAP_S = 2e-5


def nap() -> None:
    """Replaces ``os.sched_yield``."""
    time.sleep(NAP_S)


os.sched_yield = nap
