"""KV events of an engine and of the control plane have vLLM's format and name the same blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
import zmq
from cluster import Cluster
from engine import BLOCK_TOKENS, Engine
from engine_checks import PROMPT_BLOCKS, prompt, serve_and_save
from faults import eventually, observer
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

POLL_MS = 200
TRIES = 20
FIRST_SEED = 800
"""First seed of prompts that no engine has saved: blocks of others would be loaded and cause no event."""


BATCHES: msgspec.msgpack.Decoder[KVEventBatch] = msgspec.msgpack.Decoder(type=KVEventBatch)
"""vLLM's decoder of published batches."""
END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number that ends a replay."""


@dataclass
class Subscriber:
    """Subscribes to both publishers and collects the events of blocks in Reprise."""

    socket: zmq.Socket[bytes]
    of_engine: list[BlockStored] = field(default_factory=list)
    """Events of the engine, with tokens."""
    of_nodes: set[bytes] = field(default_factory=set)
    """Keys that a node has stored."""
    left: set[bytes] = field(default_factory=set)
    """Keys that a node has removed from DRAM."""

    def listen(self) -> None:
        """Receives events until none arrives for ``POLL_MS``."""
        while self.socket.poll(POLL_MS):
            _topic, _sequence, payload = self.socket.recv_multipart()
            for event in BATCHES.decode(payload).events:
                if isinstance(event, BlockStored) and event.ownership == "reprise":
                    self.take(event)
                elif isinstance(event, BlockRemoved) and event.ownership == "reprise" and event.medium == "CPU":
                    self.left.update(key for key in event.block_hashes if isinstance(key, bytes))

    def take(self, event: BlockStored) -> None:
        """Records an event by its publisher."""
        if event.token_ids:
            self.of_engine.append(event)
        else:
            self.of_nodes.update(key for key in event.block_hashes if isinstance(key, bytes))

    def tokens_of_engine(self) -> list[int]:
        """Returns the tokens of the engine's events, in the order of their chain."""
        after = {event.parent_block_hash: event for event in self.of_engine}
        tokens: list[int] = []
        parent = None
        while (event := after.get(parent)) is not None:
            tokens += event.token_ids
            parent = event.block_hashes[-1]
        return tokens


@pytest.fixture
def subscriber(engine_events: str, cluster: Cluster) -> Iterator[Subscriber]:
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(engine_events)
    socket.connect(f"tcp://{cluster.member.ready['events']}")
    yield Subscriber(socket)
    socket.close(linger=0)
    context.term()


def replayed(endpoint: str, first: int) -> list[tuple[int, KVEventBatch]]:
    """Requests a replay from a sequence number, like a router that has missed batches."""
    batches: list[tuple[int, KVEventBatch]] = []
    context = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert socket.poll(POLL_MS * TRIES), f"no end of the replay after {len(batches)} batches"
            _empty, _topic, number, payload = socket.recv_multipart()
            if number == END:
                break
            batches.append((int.from_bytes(number, "big"), BATCHES.decode(payload)))
        socket.close(linger=0)
    context.term()
    return batches


def test_engine_publishes_saved_blocks_with_tokens_and_control_plane_with_nodes(
    other: Engine, subscriber: Subscriber, cluster: Cluster
) -> None:
    # Events before the subscription is active are lost, so several prompts may be needed.
    for seed in itertools.count(FIRST_SEED):
        assert seed < FIRST_SEED + TRIES, "the engine has published no event"
        tokens = prompt(seed)
        subscriber.of_engine.clear()
        serve_and_save(other, tokens)
        subscriber.listen()
        if subscriber.of_engine:
            break
    assert subscriber.tokens_of_engine() == tokens[: PROMPT_BLOCKS * BLOCK_TOKENS]
    assert {(event.block_size, event.medium, event.locality) for event in subscriber.of_engine} == {
        (BLOCK_TOKENS, "CPU", "LOCAL")
    }
    keys = {key for event in subscriber.of_engine for key in event.block_hashes}
    assert len(keys) == PROMPT_BLOCKS

    def all_are_held() -> bool:
        subscriber.listen()
        return keys <= subscriber.of_nodes

    eventually(all_are_held)
    assert not keys & subscriber.left
    replay = f"tcp://{cluster.member.ready['events_replay']}"
    batches = replayed(replay, 0)
    assert [number for number, _ in batches] == list(range(len(batches)))
    stored = {
        key
        for _, batch in batches
        for event in batch.events
        if isinstance(event, BlockStored) and event.ownership == "reprise"
        for key in event.block_hashes
    }
    assert keys <= stored
    assert [number for number, _ in replayed(replay, 3)][: len(batches) - 3] == list(range(3, len(batches)))
    with observer(cluster.agents[1]) as agent:

        def all_have_left() -> bool:
            # Drops the DRAM copies of blocks on NVMe.
            agent.trim()
            subscriber.listen()
            return keys <= subscriber.left

        eventually(all_have_left, within=60.0)
