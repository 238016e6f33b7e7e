"""A block of a tensor-parallel engine is found only if every rank has committed its part and still has it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster import MIB, Cluster
from conftest import memory_of, tensors
from faults import drop_dram, eventually
from ranks import keys_of_all, namespace_of, part_keys

import reprise
from reprise import Client, Session, Source

RANKS, BLOCKS, LONG_S = 2, 24, 60.0
FILLER_BLOCKS = 32


class Worker:
    """Process of one rank that has copied all layers but one of its parts."""

    def __init__(self, cluster: Cluster, rank: int, first: int, last: int) -> None:
        """Starts the process and waits until it copies."""
        program = Path(__file__).with_name("rank_worker.py")
        arguments = [str(cluster.agents[0].socket), *map(str, (rank, RANKS, first, last))]
        self._child = subprocess.Popen(
            [sys.executable, str(program), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        assert self._child.stdout.readline() == "copying\n"

    def commit(self) -> int:
        """Fills the last layer and waits for the end of the process; returns the number of committed parts."""
        output, _ = self._child.communicate("\n", timeout=LONG_S)
        assert self._child.returncode == 0
        return int(output)

    def kill(self) -> None:
        """Kills the process before it commits."""
        self._child.kill()
        self._child.communicate()


@pytest.fixture
def scheduler(cluster: Cluster) -> Iterator[Client]:
    """Session of an engine's scheduler, with the layout of the first rank."""
    with client_of(cluster, 0) as client:
        yield client


def client_of(cluster: Cluster, rank: int) -> Client:
    namespace = namespace_of(rank, RANKS)
    return Client(cluster.agents[0].socket, namespace, namespace.layout, timeout=LONG_S)


def found(scheduler: Client, blocks: range = range(BLOCKS), local: bool = False) -> list[int]:
    """Returns the sources of the leading blocks that all ranks have."""
    return scheduler.match(keys_of_all(RANKS, blocks), all_ranks=True, local=local)


def test_blocks_of_a_rank_that_dies_before_its_commit_are_not_found(cluster: Cluster, scheduler: Client) -> None:
    whole = BLOCKS // 2
    for rank in range(RANKS):
        assert Worker(cluster, rank, 0, whole).commit() == whole
    first, second = (Worker(cluster, rank, whole, BLOCKS) for rank in range(RANKS))
    assert len(found(scheduler)) == whole, "both ranks copy"
    assert first.commit() == BLOCKS - whole
    assert len(found(scheduler)) == whole, "one rank has committed"
    second.kill()
    for local in (True, False):
        assert found(scheduler, local=local) == [Source.OWN_DRAM] * whole
    assert len(scheduler.match(part_keys(0, RANKS, range(BLOCKS)))) == BLOCKS, "the parts of the first rank remain"
    # The agent starts again with the parts of the first rank on its disk.
    drop_dram(scheduler)
    scheduler.close()
    cluster.agents[0].restart()
    with client_of(cluster, 0) as again:
        assert found(again) == [Source.OWN_NVME] * whole
        # A restarted engine computes the missing blocks and saves them on all ranks.
        duplicates = Worker(cluster, 0, whole, BLOCKS)
        assert duplicates.commit() == 0
        assert Worker(cluster, 1, whole, BLOCKS).commit() == BLOCKS - whole
        assert len(found(again)) == BLOCKS


def test_blocks_with_an_evicted_part_are_not_found(built: None, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster", arena=16 * MIB, pool=72 * MIB)
    with ExitStack() as stack:
        stack.callback(cluster.stop)
        clients = [stack.enter_context(client_of(cluster, rank)) for rank in range(RANKS)]
        scheduler = clients[0]
        for rank, client in enumerate(clients):
            memory = memory_of(tensors(BLOCKS, seed=rank), namespace_of(rank, RANKS).layout)
            saved = client.save(part_keys(rank, RANKS, range(BLOCKS)), memory, range(BLOCKS))
            assert saved.committed == BLOCKS
        eventually(lambda: scheduler.stats()["unsaved_blocks"] == 0, within=LONG_S)
        assert len(found(scheduler, range(4))) == 4
        # Other blocks displace the oldest parts, which are those of the first rank.
        memory = memory_of(tensors(FILLER_BLOCKS, seed=9), namespace_of(0, RANKS).layout)
        at = 1000
        while scheduler.stats()["nvme_evictions"] == 0:
            scheduler.save(part_keys(0, RANKS, range(at, at + FILLER_BLOCKS)), memory, range(FILLER_BLOCKS))
            at += FILLER_BLOCKS
            drop_dram(scheduler)
        own = [len(client.match(part_keys(rank, RANKS, range(BLOCKS)))) for rank, client in enumerate(clients)]
        assert min(own) < max(own), f"no part was evicted alone: {own}"
        assert len(found(scheduler)) == min(own)


def test_keys_that_are_not_those_of_all_ranks_are_rejected(cluster: Cluster, scheduler: Client) -> None:
    with pytest.raises(reprise.BadRequest, match="3 keys of 2 ranks"):
        scheduler.match(part_keys(0, RANKS, range(3)), all_ranks=True)
    namespace = namespace_of(0, RANKS)
    with Session(cluster.agents[0].socket, namespace, namespace.layout, timeout=LONG_S) as session:
        assert session.wait_connected(LONG_S)
        pending = session.start_match(keys_of_all(RANKS, range(2)), all_ranks=True)
        assert pending is not None and pending.poll(LONG_S) == []
        with pytest.raises(reprise.BadRequest, match="3 keys of 2 ranks"):
            session.start_match(part_keys(0, RANKS, range(3)), all_ranks=True)
