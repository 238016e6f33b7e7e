"""Tests that ranks that share pages use one key generation after updates and clears, or find nothing."""

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
    """Returns a free port on loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_ranks_with_the_same_updates_share_a_generation_and_a_rank_with_a_failed_update_has_its_own(
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
        outputs = [rank.communicate(timeout=LONG_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS
    writer, failed, reader = (json.loads(text.splitlines()[-1]) for text in outputs)
    start, updated, cleared, updated_again, failed_once, after = writer
    assert start == ""
    assert len({updated, cleared, updated_again, failed_once, after, ""}) == 6, "every step changes the generation"
    assert reader == writer
    assert failed[:4] == writer[:4]
    assert not {failed[4], failed[5]} & set(writer), "its weights may differ from then on"
