"""Classes for engines: a session that reconnects automatically, and transfers on native threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster
from conftest import LAYERS, keys_of, memory_of, tensors
from faults import freeze, thaw

import reprise
from reprise import Finished, Layout, Namespace, Session, Source, Transfers

BLOCKS = 24
LONG = 60.0
"""Seconds; longer than any call takes unless it hangs."""


@pytest.fixture
def session(cluster: Cluster, namespace: Namespace, layout: Layout) -> Iterator[Session]:
    """Opens a session with the first agent."""
    with Session(cluster.agents[0].socket, namespace, layout, timeout=LONG) as session:
        assert session.wait_connected(LONG)
        yield session


def ended(transfers: Transfers, *ids: int) -> list[Finished]:
    """Waits for transfers and returns their results in this order."""
    assert transfers.wait(ids, LONG)
    finished = {done.id: done for done in transfers.finished()}
    return [finished[number] for number in ids]


def test_transfers_save_and_load_and_are_returned_once(session: Session, namespace: Namespace, layout: Layout) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    engine = tensors(2 * BLOCKS, seed=1)
    saved_bytes = [layer[:BLOCKS].copy() for layer in engine]
    with Transfers(
        session, memory_of(engine, layout), load_stall=LONG, load_standstill=LONG, save_stall=LONG
    ) as transfers:
        assert transfers.finished() == []
        (save,) = ended(transfers, transfers.save(keys, range(BLOCKS)))
        assert (save.kind, save.committed, save.duplicates, save.unsaved) == ("save", BLOCKS, 0, 0)
        assert (save.ok, save.error) == ([], None)
        again, load = ended(
            transfers, transfers.save(keys, range(BLOCKS)), transfers.load(keys, range(BLOCKS, 2 * BLOCKS))
        )
        assert (again.duplicates, again.committed) == (BLOCKS, 0)
        assert (load.kind, load.ok) == ("load", [True] * BLOCKS)
        assert load.sources == [Source.OWN_DRAM] * BLOCKS
        assert 0 < load.seconds < LONG
        assert (transfers.finished(), transfers.unfinished) == ([], 0)
        with pytest.raises(reprise.BadRequest, match=f"invalid block {2 * BLOCKS}"):
            transfers.load(keys[:16], [2 * BLOCKS])
    for layer, expected in zip(engine, saved_bytes, strict=True):
        assert np.array_equal(layer[BLOCKS:], expected)
    with pytest.raises(reprise.AgentLost):
        transfers.load(keys[:16], [0])


def test_transfers_by_layers_overlap_a_computation(session: Session, namespace: Namespace, layout: Layout) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    engine, computed = tensors(2 * BLOCKS), tensors(BLOCKS, seed=1)
    with Transfers(
        session, memory_of(engine, layout), load_stall=LONG, load_standstill=LONG, save_stall=LONG, layer_wait=LONG
    ) as transfers:
        save = transfers.save_by_layers(keys, range(BLOCKS))
        for layer in range(LAYERS):
            engine[layer][:BLOCKS] = computed[layer]
            assert not transfers.wait([save], 0.0)
            transfers.note_filled([save], layer + 1)
        (saved,) = ended(transfers, save)
        assert (saved.kind, saved.committed, saved.error) == ("save", BLOCKS, None)
        load = transfers.load_by_layers(keys, range(BLOCKS, 2 * BLOCKS))
        for layer in range(LAYERS):
            assert transfers.wait_layer([load], layer, LONG)
            assert np.array_equal(engine[layer][BLOCKS:], computed[layer])
        (loaded,) = ended(transfers, load)
        assert (loaded.kind, loaded.ok) == ("load", [True] * BLOCKS)
        transfers.note_filled([save, load, 4711], LAYERS)
    with pytest.raises(reprise.AgentLost):
        transfers.note_filled([save], LAYERS)


def test_save_by_layers_ends_unsaved_if_a_layer_is_never_filled(
    session: Session, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(2))
    with Transfers(session, memory_of(tensors(2, seed=1), layout), save_stall=LONG, layer_wait=0.1) as transfers:
        never = transfers.save_by_layers(keys, [0, 1])
        transfers.note_filled([never], LAYERS - 1)
        unsaved, saved = ended(transfers, never, transfers.save(keys, [0, 1]))
        assert unsaved.unsaved == 2
        assert unsaved.error is not None and f"layer {LAYERS - 1} of a save was not filled" in unsaved.error
        assert saved.committed == 2


def test_pending_match_can_be_polled_later(
    cluster: Cluster, session: Session, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    with Transfers(session, memory_of(tensors(BLOCKS, seed=1), layout)) as transfers:
        ended(transfers, transfers.save(keys, range(BLOCKS)))
    freeze(cluster.agents[0])
    pending = session.start_match(keys)
    assert pending is not None
    started = time.monotonic()
    assert pending.poll(0.005) is None
    assert pending.poll() is None
    assert time.monotonic() - started < LONG / 2
    thaw(cluster.agents[0])
    assert pending.poll(LONG) == [Source.OWN_DRAM] * BLOCKS
    assert pending.poll() == [Source.OWN_DRAM] * BLOCKS
    with pytest.raises(reprise.BadRequest, match="1 to 8192"):
        session.start_match(b"0123456789abcdef" * 8193)


def test_without_an_agent_transfers_fail_at_once(tmp_path: Path, namespace: Namespace, layout: Layout) -> None:
    keys = keys_of(namespace, range(2))
    with Session(tmp_path / "missing.sock", namespace, layout) as session:
        assert session.start_match(keys) is None
        with Transfers(session, memory_of(tensors(2), layout)) as transfers:
            save, load = ended(transfers, transfers.save(keys, [0, 1]), transfers.load(keys, [0, 1]))
        assert (save.unsaved, save.statuses) == (2, ["unsaved"] * 2)
        assert (load.ok, load.statuses) == ([False] * 2, ["failed"] * 2)
        assert load.error is not None
        assert not session.wait_connected(0.2)
        assert not session.connected
        assert session.last_error is not None
        assert "no agent at" in session.last_error
        with pytest.raises(reprise.AgentLost):
            session.stats()


def test_check_raises_if_the_agent_permanently_rejects_the_blocks(
    cluster: Cluster, session: Session, namespace: Namespace, layout: Layout
) -> None:
    socket = cluster.agents[0].socket
    session.check(LONG)
    # Blocks of 24 MiB do not fit into the arena's only region of 16 MiB.
    large = Layout(layers=3, parts=1, kv_heads=64, head_dim=1024, dtype="fp32", tokens_per_block=32)
    named = Namespace(model="m", revision="1", layout=large, hash_algorithm="a", hash_seed="", engine_format="test")
    with Session(socket, named, large) as too_large:
        with pytest.raises(reprise.BadRequest, match=r"raise arena\.region_bytes"):
            too_large.check(LONG)
        assert too_large.connected
    freeze(cluster.agents[0])
    with Session(socket, namespace, layout) as silent:
        started = time.monotonic()
        silent.check(0.2)
        assert time.monotonic() - started < LONG / 2
    thaw(cluster.agents[0])
    cluster.agents[0].kill()
    with Session(socket, namespace, layout) as absent:
        absent.check(LONG)
        assert absent.last_error_kind == "AgentAbsent"


def test_session_reconnects_to_a_restarted_agent_with_its_durable_blocks(
    cluster: Cluster, session: Session, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    engine = tensors(BLOCKS, seed=1)
    expected = [layer.copy() for layer in engine]
    with Transfers(
        session, memory_of(engine, layout), load_stall=LONG, load_standstill=LONG, save_stall=LONG
    ) as transfers:
        (save,) = ended(transfers, transfers.save(keys, range(BLOCKS)))
        with reprise.Client(cluster.agents[0].socket, namespace, layout) as client:
            # Blocks are written in the order of the saves, so the count implies that all are durable.
            give_up = time.monotonic() + LONG
            while client.stats()["nvme_blocks"] < BLOCKS:
                assert time.monotonic() < give_up
        cluster.agents[0].kill()
        pending = session.start_match(keys)
        assert pending is None or pending.poll(LONG) == []
        (load,) = ended(transfers, transfers.load(keys, range(BLOCKS)))
        assert load.ok == [False] * BLOCKS
        cluster.agents[0].restart()
        assert session.wait_connected(LONG)
        assert (session.sessions, session.connected) == (2, True)
        assert save.committed == BLOCKS
        for layer in engine:
            layer.fill(0)
        (load,) = ended(transfers, transfers.load(keys, range(BLOCKS)))
    assert load.ok == [True] * BLOCKS
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(engine, expected, strict=True))


def test_hanging_agent_costs_one_stall_timeout_and_is_used_again_when_it_answers(
    cluster: Cluster, session: Session, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    memory = memory_of(tensors(BLOCKS, seed=1), layout)
    with Transfers(session, memory, load_stall=0.2, save_stall=0.2) as transfers:
        freeze(cluster.agents[0])
        (load,) = ended(transfers, transfers.load(keys, range(BLOCKS)))
        assert load.ok == [False] * BLOCKS
        assert load.error is not None
        assert "no answer" in load.error
        assert session.suspected
        assert session.start_match(keys) is None
        (save,) = ended(transfers, transfers.save(keys, range(BLOCKS)))
        assert (save.unsaved, save.error is not None and "does not answer" in save.error) == (BLOCKS, True)
        thaw(cluster.agents[0])
        assert session.wait_connected(LONG)
        assert (session.suspected, session.sessions) == (False, 1)
    with Transfers(session, memory, load_stall=LONG, load_standstill=LONG, save_stall=LONG) as transfers:
        (save,) = ended(transfers, transfers.save(keys, range(BLOCKS)))
        assert save.unsaved == 0


def test_changes_of_the_session_are_logged_once(
    cluster: Cluster, session: Session, layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "reprise")
    freeze(cluster.agents[0])
    session.suspect()
    assert [session.connected for _ in range(3)] == [True] * 3
    thaw(cluster.agents[0])
    assert session.wait_connected(LONG)
    cluster.agents[0].kill()
    give_up = time.monotonic() + LONG
    while session.connected or session.last_error is None or "no agent at" not in session.last_error:
        assert time.monotonic() < give_up
    cluster.agents[0].restart()
    assert session.wait_connected(LONG)
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert logged[0] == ("WARNING", "the agent does not answer: no requests are sent until it does")
    assert logged[1] == ("INFO", "the agent answers again")
    assert logged[-1] == ("INFO", "connected to the agent")
    lost = [words for level, words in logged[2:-1] if level == "WARNING"]
    assert "no agent at" in lost[-1]
    assert len(lost) == len(set(lost)) <= 3


def test_every_transfer_ends_without_wrong_bytes_under_agent_faults(
    cluster: Cluster, session: Session, namespace: Namespace, layout: Layout
) -> None:
    """Saves and loads continue while the agent is killed, restarted, frozen and resumed."""
    keys = keys_of(namespace, range(BLOCKS))
    memory = tensors(2 * BLOCKS, seed=1)
    expected = [layer[:BLOCKS].copy() for layer in memory]
    agent = cluster.agents[0]
    loaded_blocks = 0
    with Transfers(session, memory_of(memory, layout), load_stall=0.2, save_stall=0.2) as transfers:
        for round_number in range(16):
            save = transfers.save(keys, range(BLOCKS))
            load = transfers.load(keys, range(BLOCKS, 2 * BLOCKS))
            match round_number % 4:
                case 1:
                    agent.kill()
                case 2:
                    agent.restart()
                    assert session.wait_connected(LONG)
                case 3:
                    freeze(agent)
            _, loaded = ended(transfers, save, load)
            if round_number % 4 == 3:
                thaw(agent)
                assert session.wait_connected(LONG)
            for block, is_ok in enumerate(loaded.ok):
                loaded_blocks += is_ok
                if is_ok:
                    assert all(
                        np.array_equal(layer[BLOCKS + block], bytes_of[block])
                        for layer, bytes_of in zip(memory, expected, strict=True)
                    )
            for layer in memory:
                layer[BLOCKS:] = 0
    assert loaded_blocks > 0
    assert all(np.array_equal(layer[:BLOCKS], bytes_of) for layer, bytes_of in zip(memory, expected, strict=True))


def test_transfers_end_while_one_thread_holds_the_gil(session: Session, namespace: Namespace, layout: Layout) -> None:
    """With a long switch interval, the polling thread never releases the GIL, and transfers still end."""
    keys = keys_of(namespace, range(BLOCKS))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        with Transfers(session, memory_of(tensors(BLOCKS, seed=1), layout), save_stall=LONG) as transfers:
            transfers.save(keys, range(BLOCKS))
            give_up = time.monotonic() + LONG
            while transfers.unfinished:
                assert time.monotonic() < give_up
    finally:
        sys.setswitchinterval(interval)


def test_wait_releases_the_gil(cluster: Cluster, session: Session, namespace: Namespace, layout: Layout) -> None:
    keys = keys_of(namespace, range(1))
    with Transfers(session, memory_of(tensors(1, seed=1), layout), save_stall=LONG) as transfers:
        freeze(cluster.agents[0])
        save = transfers.save(keys, [0])
        woken = threading.Timer(0.05, lambda: thaw(cluster.agents[0]))
        woken.start()
        # The save ends only if the other thread runs while this one waits.
        assert transfers.wait([save], LONG)
        woken.join()


def test_dropping_transfers_without_close_does_not_hang(
    cluster: Cluster, session: Session, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    transfers = Transfers(session, memory_of(tensors(BLOCKS, seed=1), layout), save_stall=0.2)
    freeze(cluster.agents[0])
    for _ in range(8):
        transfers.save(keys, range(BLOCKS))
    started = time.monotonic()
    del transfers
    assert time.monotonic() - started < LONG / 2
    thaw(cluster.agents[0])


def test_transfers_beyond_a_full_queue_fail_at_once(
    cluster: Cluster, session: Session, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(1))
    with Transfers(session, memory_of(tensors(1, seed=1), layout), save_stall=LONG, queued_max=1) as transfers:
        freeze(cluster.agents[0])
        # At most one is running, if a thread has taken it in time, and one is queued.
        ids = [transfers.save(keys, [0]) for _ in range(4)]
        refused: list[Finished] = []
        give_up = time.monotonic() + LONG
        while len(refused) < 2:
            assert time.monotonic() < give_up
            refused += transfers.finished()
            time.sleep(0.01)
        for each in refused:
            assert (each.unsaved, each.error is not None and "are queued already" in each.error) == (1, True)
        thaw(cluster.agents[0])
        assert transfers.wait(ids, LONG)


def test_rejects_memory_of_another_layout(session: Session) -> None:
    other = Layout(layers=1, parts=1, kv_heads=1, head_dim=64, dtype="fp32", tokens_per_block=16)
    memory = reprise.KvMemory([np.zeros((2, 16 * 64), np.float32)], other)
    with pytest.raises(reprise.BadRequest, match="the memory's layout"):
        Transfers(session, memory)
    with pytest.raises(ValueError, match="invalid queued_max 0"):
        Transfers(session, memory, queued_max=0)
