"""The blocking client and the asynchronous one, against real processes."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cluster import MIB, Cluster
from conftest import keys_of, memory_of, tensors
from faults import eventually, freeze, thaw

import reprise
from reprise import BlocksReport, Client, Layout, Namespace, PendingBlocks, Session, Source
from reprise.aio import AsyncClient

BLOCKS = 24


def connect(cluster: Cluster, namespace: Namespace, layout: Layout) -> Client:
    """Opens a session with the first agent."""
    return Client(cluster.agents[0].socket, namespace, layout, timeout=30.0)


def save_durably(client: Client, keys: bytes, layers: list[np.ndarray], layout: Layout) -> None:
    """Saves the blocks of a memory in order and waits until they are durable."""
    saved = client.save(keys, memory_of(layers, layout), range(len(layers[0])))
    assert saved.unsaved == 0
    for ticket in saved.tickets:
        assert client.wait_durable(ticket).lost_keys == []


def test_saved_blocks_are_matched_and_loaded_with_equal_bytes(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    engine = tensors(BLOCKS, seed=1)
    with connect(cluster, namespace, layout) as client:
        assert (client.node, client.connected) == ("node-0", True)
        assert client.match(keys) == []
        saved = client.save(keys, memory_of(engine, layout), range(BLOCKS))
        assert (saved.committed, saved.duplicates, saved.unsaved) == (BLOCKS, 0, 0)
        assert sum(client.wait_durable(ticket).durable for ticket in saved.tickets) == BLOCKS
        assert client.match(keys) == [Source.OWN_DRAM] * BLOCKS
        again = client.save(keys, memory_of(engine, layout), range(BLOCKS))
        assert again.statuses == ["duplicate"] * BLOCKS
    places = np.random.default_rng(2).permutation(BLOCKS)
    other = tensors(BLOCKS)
    with connect(cluster, namespace, layout) as client:
        assert client.trim() == BLOCKS
        assert client.match(keys) == [Source.OWN_NVME] * BLOCKS
        loaded = client.load(keys, memory_of(other, layout), places)
        assert (loaded.leading, loaded.statuses) == (BLOCKS, ["ok"] * BLOCKS)
        assert loaded.sources == [Source.OWN_NVME] * BLOCKS
        assert client.stats()["nvme_blocks"] == BLOCKS
    for ours, theirs in zip(engine, other, strict=True):
        assert np.array_equal(ours, theirs[places])


def test_saves_and_loads_a_request_larger_than_the_arena(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    """The request has 25 MiB, the arena 16."""
    count = 400
    keys = keys_of(namespace, range(count))
    engine, other = tensors(count, seed=1), tensors(count)
    with connect(cluster, namespace, layout) as client:
        assert client.save(keys, memory_of(engine, layout), range(count), room_wait=30.0).committed == count
        loaded = client.load(keys, memory_of(other, layout), range(count), deadline=30.0)
    assert loaded.leading == count
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(engine, other, strict=True))


def test_another_node_loads_blocks_saved_on_this_node(
    built: None, tmp_path: Path, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    engine, other = tensors(BLOCKS, seed=1), tensors(BLOCKS)
    cluster = Cluster(tmp_path / "cluster", agents=2, arena=16 * MIB, pool=128 * MIB)
    try:
        with connect(cluster, namespace, layout) as saver:
            save_durably(saver, keys, engine, layout)
        with Client(cluster.agents[1].socket, namespace, layout, timeout=30.0) as loader:
            give_up = time.monotonic() + 30.0
            while len(loader.match(keys)) < BLOCKS:
                assert time.monotonic() < give_up
            assert loader.match(keys, local=True) == []
            assert loader.load(keys, memory_of(other, layout), range(BLOCKS), local=True).statuses == ["miss"] * BLOCKS
            loaded = loader.load(keys, memory_of(other, layout), range(BLOCKS))
    finally:
        cluster.stop()
    assert set(loaded.sources) <= {Source.PEER_DRAM, Source.PEER_NVME}
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(engine, other, strict=True))


def test_blocks_that_no_node_has_are_misses_and_not_ok(cluster: Cluster, namespace: Namespace, layout: Layout) -> None:
    engine = tensors(3, seed=1)
    with connect(cluster, namespace, layout) as client:
        client.save(keys_of(namespace, range(2)), memory_of(engine, layout), [0, 1])
        loaded = client.load(keys_of(namespace, range(3)), memory_of(tensors(3), layout), [2, 1, 0])
        assert loaded.statuses == ["ok", "ok", "miss"]
        assert loaded.ok == [True, True, False]
        assert (loaded.leading, loaded.sources[2]) == (2, None)


def test_prefetch_loads_blocks_from_the_disk_into_dram(cluster: Cluster, namespace: Namespace, layout: Layout) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    with connect(cluster, namespace, layout) as client:
        save_durably(client, keys, tensors(BLOCKS, seed=1), layout)
        assert client.trim() == BLOCKS
        assert client.prefetch(keys) == BLOCKS
        assert client.match(keys) == [Source.OWN_DRAM] * BLOCKS


def test_pins_keep_blocks_until_they_end(cluster: Cluster, namespace: Namespace, layout: Layout) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    with connect(cluster, namespace, layout) as client:
        save_durably(client, keys, tensors(BLOCKS, seed=1), layout)
        pinned = client.pin(keys, 60.0)
        assert (pinned.affected, pinned.refused, pinned.pinned_blocks) == (BLOCKS, 0, BLOCKS)
        assert client.trim() == 0
        kept = client.demote(keys)
        assert (kept.found, kept.affected, kept.pinned) == (BLOCKS, 0, BLOCKS)
        assert client.unpin(keys).affected == BLOCKS
        assert client.pin(keys, 0.05).affected == BLOCKS
        eventually(lambda: client.stats()["retention_pinned_blocks"] == 0)
        with pytest.raises(reprise.BadRequest, match="ttl_max"):
            client.pin(keys, 1e6)


def test_a_session_starts_commands_on_blocks_without_waiting(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(BLOCKS))

    def answer(pending: PendingBlocks | None) -> BlocksReport:
        assert pending is not None
        answers: list[BlocksReport] = []

        def is_answered() -> bool:
            if report := pending.poll():
                answers.append(report)
            return bool(answers)

        eventually(is_answered)
        return answers[0]

    with connect(cluster, namespace, layout) as client:
        save_durably(client, keys, tensors(BLOCKS, seed=1), layout)
    with Session(str(cluster.agents[0].socket), namespace, layout) as session:
        assert session.wait_connected(10.0)
        pinned = answer(session.start_command("pin", keys, ttl=60.0))
        assert (pinned.affected, pinned.pinned_blocks) == (BLOCKS, BLOCKS)
        assert answer(session.start_command("demote", keys)).pinned == BLOCKS
        assert answer(session.start_command("unpin", keys)).affected == BLOCKS
        assert answer(session.start_command("demote", keys)).affected == BLOCKS
        with pytest.raises(reprise.BadRequest, match="ttl_max"):
            answer(session.start_command("pin", keys, ttl=1e6))
        for action, ttl in (("pin", None), ("demote", 1.0), ("steal", None)):
            with pytest.raises(ValueError, match="invalid action"):
                session.start_command(action, keys, ttl=ttl)  # type: ignore[arg-type]
        cluster.agents[0].kill()
        eventually(lambda: not session.connected)
        assert session.start_command("demote", keys) is None


def test_blocks_are_demoted_read_ahead_and_deleted_on_request(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    with connect(cluster, namespace, layout) as client:
        save_durably(client, keys, tensors(BLOCKS, seed=1), layout)
        assert client.demote(keys).affected == BLOCKS
        assert client.match(keys) == [Source.OWN_NVME] * BLOCKS
        begun = client.start_prefetch(keys)
        assert (begun.affected, begun.absent) == (BLOCKS, 0)
        eventually(lambda: client.match(keys) == [Source.OWN_DRAM] * BLOCKS)
        assert client.delete(keys).affected == BLOCKS
        assert client.match(keys) == []
        assert client.delete(keys).absent == BLOCKS


def test_accepts_packed_keys_and_sequences_and_rejects_invalid_keys(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    packed = keys_of(namespace, range(3))
    one_by_one = [packed[at : at + 16] for at in range(0, len(packed), 16)]
    memory = memory_of(tensors(3, seed=1), layout)
    with connect(cluster, namespace, layout) as client:
        assert client.save(one_by_one, memory, [0, 1, 2]).committed == 3
        assert client.match(bytearray(packed)) == client.match(tuple(one_by_one))
        with pytest.raises(ValueError, match="invalid packed keys of 17 bytes"):
            client.match(b"x" * 17)
        with pytest.raises(ValueError, match="invalid key of 3 bytes: expected 16"):
            client.match([b"abc"])
        with pytest.raises(TypeError, match="invalid key 1: expected 16 bytes"):
            client.match([1])
        with pytest.raises(ValueError, match="3 keys but 2 blocks"):
            client.save(packed, memory, [0, 1])
        with pytest.raises(reprise.BadRequest, match="invalid block 3: the memory has 3 blocks"):
            client.load(packed, memory, [0, 1, 3])
        with pytest.raises(ValueError, match="invalid deadline of -1 seconds"):
            client.load(packed, memory, [0, 1, 2], deadline=-1)
        with pytest.raises(ValueError, match="invalid key of 5 bytes: expected 16"):
            client.save(packed, memory, [0, 1, 2], parent=b"short")
        assert client.save(packed[16:], memory, [1, 2], parent=packed[:16]).duplicates == 2
        with pytest.raises(ValueError, match=r"invalid priority .urgent."):
            client.save(packed, memory, [0, 1, 2], priority="urgent")


def test_error_without_an_agent_names_the_socket(tmp_path: Path, namespace: Namespace, layout: Layout) -> None:
    with pytest.raises(reprise.AgentAbsent, match=r"no agent at .*missing\.sock.*start reprise-agent"):
        Client(tmp_path / "missing.sock", namespace, layout)
    assert issubclass(reprise.AgentAbsent, reprise.RepriseError)


def test_rejects_a_layout_that_differs_from_the_namespaces(namespace: Namespace, tmp_path: Path) -> None:
    other = Layout(layers=1, kv_heads=1, head_dim=64, dtype="fp32", tokens_per_block=16)
    with pytest.raises(ValueError, match=r"the namespace's layout .* differs from"):
        Client(tmp_path / "missing.sock", namespace, other)


def test_calls_fail_when_the_agent_is_killed(cluster: Cluster, namespace: Namespace, layout: Layout) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    memory = memory_of(tensors(BLOCKS, seed=1), layout)
    with connect(cluster, namespace, layout) as client:
        client.save(keys, memory, range(BLOCKS))
        cluster.agents[0].kill()
        with pytest.raises(reprise.AgentLost):
            client.load(keys, memory, range(BLOCKS))
        assert not client.connected
        with pytest.raises(reprise.AgentLost):
            client.match(keys)


def test_timeout_of_a_call_does_not_end_the_session(cluster: Cluster, namespace: Namespace, layout: Layout) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    with Client(cluster.agents[0].socket, namespace, layout, timeout=0.5) as client:
        freeze(cluster.agents[0])
        with pytest.raises(reprise.Timeout, match="no answer to 'match'"):
            client.match(keys)
        thaw(cluster.agents[0])
        eventually(lambda: answers(client, keys))
        assert client.connected


def answers(client: Client, keys: bytes) -> bool:
    """Returns whether the agent answers again."""
    try:
        return client.match(keys) == []
    except reprise.Timeout:
        return False


def test_each_kind_of_error_has_its_exception() -> None:
    root = Path(__file__).parents[2]
    kinds = re.findall(r'ClientError::\w+[^=]*=> "(\w+)"', (root / "node-agent/client/src/error.rs").read_text())
    raised = dict(re.findall(r"ClientError::(\w+)[^=]*=> (\w+)::new_err", (root / "python/src/error.rs").read_text()))
    assert len(kinds) > 10
    assert raised == {kind: kind for kind in kinds}
    classes = {getattr(reprise, kind) for kind in kinds}
    assert len(classes) == len(kinds)
    assert all(issubclass(kind, reprise.RepriseError) for kind in classes)


def test_damaged_block_on_disk_fails_and_never_returns_wrong_bytes(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    engine = tensors(BLOCKS, seed=1)
    with connect(cluster, namespace, layout) as client:
        save_durably(client, keys, engine, layout)
        assert client.trim() == BLOCKS
        damaged = engine[2][5].tobytes()[:4096]
        pool = cluster.agents[0].pool
        at = pool.read_bytes().index(damaged)
        with pool.open("r+b") as file:
            file.seek(at)
            file.write(b"\xff" * 4096)
        other = tensors(BLOCKS)
        loaded = client.load(keys, memory_of(other, layout), range(BLOCKS))
    assert not loaded.ok[5]
    assert sum(loaded.ok) >= BLOCKS - 1
    for block, is_ok in enumerate(loaded.ok):
        if is_ok:
            assert all(np.array_equal(ours[block], theirs[block]) for ours, theirs in zip(engine, other, strict=True))


def test_other_threads_run_while_a_call_waits(cluster: Cluster, namespace: Namespace, layout: Layout) -> None:
    """A frozen agent blocks the call, which must not hold the GIL."""
    with connect(cluster, namespace, layout) as client:
        freeze(cluster.agents[0])
        memory = memory_of(tensors(1), layout)
        waiting = threading.Thread(target=lambda: client.load(keys_of(namespace, range(1)), memory, [0]))
        waiting.start()
        counted = sum(1 for _ in range(1000) if time.monotonic())
        still_waiting = waiting.is_alive()
        thaw(cluster.agents[0])
        waiting.join()
    assert (counted, still_waiting) == (1000, True)


def test_asyncio_client_runs_many_calls_concurrently(cluster: Cluster, namespace: Namespace, layout: Layout) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    engine, other = tensors(BLOCKS, seed=1), tensors(BLOCKS)

    async def talk() -> None:
        async with await AsyncClient.connect(cluster.agents[0].socket, namespace, layout) as client:
            saved = await client.save(keys, memory_of(engine, layout), range(BLOCKS))
            assert (await client.wait_durable(saved.tickets[0])).lost_keys == []
            matched = await asyncio.gather(*(client.match(keys) for _ in range(40)))
            assert all(len(sources) == BLOCKS for sources in matched)
            assert await client.trim() == BLOCKS
            assert await client.prefetch(keys) == BLOCKS
            assert (await client.load(keys, memory_of(other, layout), range(BLOCKS))).leading == BLOCKS
            assert await client.stats()
        with pytest.raises(reprise.AgentLost):
            client.blocking.match(keys)

    asyncio.run(talk())
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(engine, other, strict=True))


def test_asyncio_connect_fails_without_an_agent(tmp_path: Path, namespace: Namespace, layout: Layout) -> None:
    with pytest.raises(reprise.AgentAbsent):
        asyncio.run(AsyncClient.connect(tmp_path / "missing.sock", namespace, layout))
