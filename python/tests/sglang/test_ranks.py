"""Ranks that share pages use one key generation through updates and clears, or find nothing. Each has a process of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from rank_process import make_folders

RANKS = 3
LONG_S = 180.0


def free_port() -> int:
    """A port on loopback that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_ranks_that_have_seen_the_same_updates_share_a_generation_and_a_rank_whose_update_failed_has_its_own(
    tmp_path: Path,
) -> None:
    make_folders(tmp_path)
    program, port = Path(__file__).with_name("rank_process.py"), free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", str(program), *map(str, (rank, RANKS, port, tmp_path))], stdout=subprocess.PIPE
        )
        for rank in range(RANKS)
    ]
    try:
        printed = [rank.communicate(timeout=LONG_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS
    writer, failed, reader = (json.loads(text.splitlines()[-1]) for text in printed)
    start, updated, cleared, updated_again, failed_once, after = writer
    assert start == ""
    assert len({updated, cleared, updated_again, failed_once, after, ""}) == 6, "each has keys of its own"
    assert reader == writer
    assert failed[:4] == writer[:4]
    assert not {failed[4], failed[5]} & set(writer), "its weights can be others from then on"
