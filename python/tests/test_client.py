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
from reprise import Client, Layout, Namespace, Source
from reprise.aio import AsyncClient

BLOCKS = 24


def connect(cluster: Cluster, namespace: Namespace, layout: Layout) -> Client:
    """A session with the first agent."""
    return Client(cluster.agents[0].socket, namespace, layout, timeout=30.0)


def save_durably(client: Client, keys: bytes, layers: list[np.ndarray], layout: Layout) -> None:
    """Saves the blocks of a memory in order, to the disk."""
    saved = client.save(keys, memory_of(layers, layout), range(len(layers[0])))
    assert saved.unsaved == 0
    for ticket in saved.tickets:
        assert client.wait_durable(ticket).lost_keys == []


def test_what_was_saved_is_matched_and_loaded_byte_by_byte(
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


def test_a_request_that_is_larger_than_the_arena_is_saved_and_loaded_all_the_same(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    """25 MiB through 16."""
    count = 400
    keys = keys_of(namespace, range(count))
    engine, other = tensors(count, seed=1), tensors(count)
    with connect(cluster, namespace, layout) as client:
        assert client.save(keys, memory_of(engine, layout), range(count), room_wait=30.0).committed == count
        loaded = client.load(keys, memory_of(other, layout), range(count), deadline=30.0)
    assert loaded.leading == count
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(engine, other, strict=True))


def test_another_node_loads_what_was_saved_on_this_one(
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


def test_blocks_that_nobody_has_are_missed_and_their_places_are_not_ok(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    engine = tensors(3, seed=1)
    with connect(cluster, namespace, layout) as client:
        client.save(keys_of(namespace, range(2)), memory_of(engine, layout), [0, 1])
        loaded = client.load(keys_of(namespace, range(3)), memory_of(tensors(3), layout), [2, 1, 0])
        assert loaded.statuses == ["ok", "ok", "miss"]
        assert loaded.ok == [True, True, False]
        assert (loaded.leading, loaded.sources[2]) == (2, None)


def test_a_prefetch_brings_blocks_from_the_disk_into_memory(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    with connect(cluster, namespace, layout) as client:
        save_durably(client, keys, tensors(BLOCKS, seed=1), layout)
        assert client.trim() == BLOCKS
        assert client.prefetch(keys) == BLOCKS
        assert client.match(keys) == [Source.OWN_DRAM] * BLOCKS


def test_keys_may_be_a_sequence_and_what_is_no_key_is_refused(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    packed = keys_of(namespace, range(3))
    one_by_one = [packed[at : at + 16] for at in range(0, len(packed), 16)]
    memory = memory_of(tensors(3, seed=1), layout)
    with connect(cluster, namespace, layout) as client:
        assert client.save(one_by_one, memory, [0, 1, 2]).committed == 3
        assert client.match(bytearray(packed)) == client.match(tuple(one_by_one))
        with pytest.raises(ValueError, match="17 bytes are no packed keys"):
            client.match(b"x" * 17)
        with pytest.raises(ValueError, match="a key has 16 bytes, this one has 3"):
            client.match([b"abc"])
        with pytest.raises(TypeError, match="a key is 16 bytes"):
            client.match([1])
        with pytest.raises(ValueError, match="3 keys, but 2 blocks"):
            client.save(packed, memory, [0, 1])
        with pytest.raises(reprise.BadRequest, match="no block 3 in a memory of 3"):
            client.load(packed, memory, [0, 1, 3])
        with pytest.raises(ValueError, match="deadline is -1 seconds"):
            client.load(packed, memory, [0, 1, 2], deadline=-1)
        with pytest.raises(ValueError, match="a key has 16 bytes, this one has 5"):
            client.save(packed, memory, [0, 1, 2], parent=b"short")
        assert client.save(packed[16:], memory, [1, 2], parent=packed[:16]).duplicates == 2
        with pytest.raises(ValueError, match=r"priority is .urgent."):
            client.save(packed, memory, [0, 1, 2], priority="urgent")


def test_without_an_agent_it_says_where_it_looked(tmp_path: Path, namespace: Namespace, layout: Layout) -> None:
    with pytest.raises(reprise.AgentAbsent, match=r"no agent at .*nobody\.sock.*start reprise-agent"):
        Client(tmp_path / "nobody.sock", namespace, layout)
    assert issubclass(reprise.AgentAbsent, reprise.RepriseError)


def test_a_layout_that_is_not_the_namespaces_is_refused(namespace: Namespace, tmp_path: Path) -> None:
    other = Layout(layers=1, kv_heads=1, head_dim=64, dtype="fp32", tokens_per_block=16)
    with pytest.raises(ValueError, match="the namespace's layout is"):
        Client(tmp_path / "nobody.sock", namespace, other)


def test_an_agent_that_is_killed_ends_calls_with_an_error(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
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


def test_an_agent_that_does_not_answer_in_time_costs_the_call_and_not_the_session(
    cluster: Cluster, namespace: Namespace, layout: Layout
) -> None:
    keys = keys_of(namespace, range(BLOCKS))
    with Client(cluster.agents[0].socket, namespace, layout, timeout=0.5) as client:
        freeze(cluster.agents[0])
        with pytest.raises(reprise.Timeout, match="'match' had no answer"):
            client.match(keys)
        thaw(cluster.agents[0])
        eventually(lambda: answers(client, keys))
        assert client.connected


def answers(client: Client, keys: bytes) -> bool:
    """Whether an agent that could not answer does again."""
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


def test_damage_on_the_disk_is_a_failed_block_and_never_wrong_bytes(
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
    """A stopped agent keeps a call waiting; the GIL is free meanwhile."""
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


def test_asyncio_does_the_same_and_many_at_a_time(cluster: Cluster, namespace: Namespace, layout: Layout) -> None:
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


def test_asyncio_without_an_agent_says_so(tmp_path: Path, namespace: Namespace, layout: Layout) -> None:
    with pytest.raises(reprise.AgentAbsent):
        asyncio.run(AsyncClient.connect(tmp_path / "nobody.sock", namespace, layout))
