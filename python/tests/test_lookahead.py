"""Hints of what an engine runs next, against a real agent with its blocks on NVMe."""

from __future__ import annotations

import pytest
from cluster import Cluster
from conftest import keys_of, memory_of, tensors
from faults import eventually

from reprise import BadRequest, Client, Layout, LookaheadReport, Namespace, Session, Source

BLOCKS = 16


def answer(
    session: Session,
    requests: list[tuple[int, int, float, bytes]],
    iteration: float = 0.02,
    begun: list[tuple[int, bool, int, bytes]] | None = None,
) -> LookaheadReport:
    """Sends a hint and waits for its answer."""
    pending = session.start_lookahead(iteration, requests, begun=begun)
    assert pending is not None
    reports: list[LookaheadReport] = []

    def is_answered() -> bool:
        report = pending.poll()
        reports.extend([report] if report is not None else [])
        return report is not None

    eventually(is_answered)
    return reports[0]


def test_blocks_of_a_hinted_request_are_in_dram_before_its_load(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    keys, engine = keys_of(namespace, range(BLOCKS)), tensors(BLOCKS, seed=1)
    with (
        Client(cluster.agents[0].socket, namespace, layout, timeout=30.0) as client,
        Session(cluster.agents[0].socket, namespace, layout) as session,
    ):
        saved = client.save(keys, memory_of(engine, layout), range(BLOCKS))
        assert sum(client.wait_durable(ticket).durable for ticket in saved.tickets) == BLOCKS
        assert client.trim() == BLOCKS
        assert client.match(keys) == [Source.OWN_NVME] * BLOCKS
        assert session.wait_connected(30.0)

        def is_ready() -> bool:
            return answer(session, [(7, 2, 1.0, keys)]).ready == [7]

        eventually(is_ready)
        assert client.match(keys) == [Source.OWN_DRAM] * BLOCKS
        stats = session.stats()
        assert (stats["prefetch_blocks"], stats["prefetch_failed_blocks"]) == (BLOCKS, 0)


def test_impossible_hints_are_rejected_or_ignored_and_counted(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    with Session(cluster.agents[0].socket, namespace, layout) as session:
        assert session.wait_connected(30.0)
        with pytest.raises(ValueError, match="expected 0 to 1"):
            session.start_lookahead(0.02, [(1, 1, 1.5, b"")])
        keys = keys_of(namespace, range(1))
        assert answer(session, [(1, 1, 1.0, keys)], iteration=0.0).ignored == 1
        many = [(number, 1, 1.0, keys) for number in range(1025)]
        with pytest.raises(BadRequest, match=r"1,?024"):
            answer(session, many)
        assert session.stats()["prefetch_ignored_times"] == 1


def test_blocks_of_requests_that_have_begun_have_the_class_of_their_state(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    keys, engine = keys_of(namespace, range(BLOCKS)), tensors(BLOCKS, seed=2)
    with (
        Client(cluster.agents[0].socket, namespace, layout, timeout=30.0) as client,
        Session(cluster.agents[0].socket, namespace, layout) as session,
    ):
        client.save(keys, memory_of(engine, layout), range(BLOCKS))
        assert session.wait_connected(30.0)

        def changes() -> int:
            return session.stats()["begun_class_changes"]

        before = changes()
        assert answer(session, [], begun=[(1, False, 0, keys)]).ignored == 0
        assert (changes() - before, session.stats()["begun_blocks"]) == (BLOCKS, BLOCKS)
        assert answer(session, [], begun=[(1, True, BLOCKS, b"")]).ignored == 0
        assert changes() - before == 2 * BLOCKS
        assert answer(session, [], begun=[(2, False, 0, b"")]).ignored == 1, "unknown, and without keys"
        assert (changes() - before, session.stats()["begun_blocks"]) == (3 * BLOCKS, 0)
