"""Times what vLLM's scheduler waits for Reprise in a step, against a real agent.

Arguments: the agent's socket, blocks of a request, steps. Prints a line of JSON: by call, percentiles in milliseconds. Steps are of two
kinds, in turn, each with one new request of so many blocks:

    load    all of them are in Reprise: match, make room, say from where they come, plan the load; the end of the load before
    save    none of them is: match, plan the save of what the step computes; the end of the save before, which frees its blocks

``load.step`` and ``save.step`` are the sums of a step's calls. Keys, the question to the agent and its answer are part of the match; a
step in which the answer has not come is a step as well. Another request computes in every step, so that waiting has a price. Blocks are
references in vLLM's own pool; nothing is copied.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.core.block_pool import BlockPool

from reprise import Client, KvMemory, Layout, Namespace, Session, block_keys
from reprise.vllm import RepriseConnector
from reprise.vllm.geometry import Geometry
from reprise.vllm.metadata import RepriseWorkerMetadata
from reprise.vllm.options import Options
from reprise.vllm.scheduler import PINNED_SHARE, SchedulerSide

LAYERS = 2
BLOCK_TOKENS = 16
HEAD_DIM = 64
CONNECTED_WITHIN_S = 10.0
OTHER = "other"
"""The request that is computed in every step; Reprise has nothing of it."""
REQUESTS_PINNED = 2
"""How many requests' saves may be under way: that of this step and that of the one before."""


def main() -> None:
    """Saves the blocks, then plays steps."""
    socket, blocks, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    layout = Layout(layers=LAYERS, parts=1, kv_heads=1, head_dim=HEAD_DIM, dtype="bf16", tokens_per_block=BLOCK_TOKENS)
    namespace = Namespace(
        model="scheduler-call",
        revision=os.urandom(8).hex(),
        layout=layout,
        hash_algorithm="none",
        hash_seed="",
        engine_format="bench",
    )
    there = [os.urandom(32) for _ in range(blocks)]
    memory = KvMemory([np.zeros((blocks, 1, BLOCK_TOKENS, HEAD_DIM), np.uint16) for _ in range(LAYERS)], layout)
    with Client(socket, namespace, layout) as client:
        client.save(block_keys(namespace, there), memory, range(blocks))
    session = Session(socket, namespace, layout)
    if not session.wait_connected(CONNECTED_WITHIN_S):
        raise TimeoutError(f"no agent at {socket}: {session.last_error}")
    geometry = Geometry(layer_names=("0", "1"), block_tokens=BLOCK_TOKENS, rank=0, namespaces=(namespace,))
    side = SchedulerSide(
        geometry=geometry, options=Options(socket=socket), session=session, may_load=True, may_save=True, ranks=1
    )
    side.pool = BlockPool(
        num_gpu_blocks=REQUESTS_PINNED * PINNED_SHARE * blocks + 1, enable_caching=True, hash_block_size=BLOCK_TOKENS
    )
    bench = Bench(Connector(side), side.pool, blocks)
    # As vLLM's engine core does when it has started.
    freeze_gc_heap()
    for step in range(steps):
        if step % 2 == 0:
            bench.load(f"load-{step}", there)
        else:
            bench.save(f"save-{step}", [os.urandom(32) for _ in range(blocks)])
    session.close()
    print(json.dumps({name: percentiles(times) for name, times in bench.times.items()}))


class Connector(RepriseConnector):
    """The connector in the scheduler's process, without an engine's configuration."""

    def __init__(self, side: SchedulerSide) -> None:
        self._scheduler, self._worker = side, None


@dataclass
class Bench:
    """Steps of a scheduler that has one request at a time, and the times of its calls in milliseconds."""

    connector: Connector
    pool: BlockPool
    blocks: int
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _spent: float = 0.0
    _ended: dict[str, RepriseWorkerMetadata] = field(default_factory=dict)
    """What workers say of the request before of each kind."""

    def load(self, name: str, hashes: list[bytes]) -> None:
        """A request whose blocks are all there."""
        request = self._asked("load", name, hashes, self.blocks)
        room = self.pool.get_new_blocks(self.blocks)
        with self._step("load"):
            ids = [block.block_id for block in room]
            place: Any = SimpleNamespace(get_block_ids=lambda: (ids,))
            connector, tokens = self.connector, self._tokens
            self._timed(
                "load.update_state_after_alloc", lambda: connector.update_state_after_alloc(request, place, tokens)
            )
            self._timed(
                "load.get_external_cache_hit_sources", lambda: connector.get_external_cache_hit_sources(request, tokens)
            )
            (plan,) = self._timed("load.build_connector_meta", lambda: connector.build_connector_meta(others())).loads
            ended = Counter({plan.request_id: 1})
            self._said("load", RepriseWorkerMetadata(whole_loads=ended, ended_loads=ended))
        self._over(request, room)

    def save(self, name: str, hashes: list[bytes]) -> None:
        """A request whose blocks are all computed, in one step."""
        request = self._asked("save", name, hashes, 0)
        room = self.pool.get_new_blocks(self.blocks)
        with self._step("save"):
            computed = computing(name, self._tokens, [block.block_id for block in room])
            metadata = self._timed("save.build_connector_meta", lambda: self.connector.build_connector_meta(computed))
            (plan,) = metadata.saves
            self._said("save", RepriseWorkerMetadata(ended_saves=Counter({plan.save_id: 1})))
        self._over(request, room)

    @property
    def _tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS

    def _asked(self, kind: str, name: str, hashes: list[bytes], found: int) -> Any:
        """A new request that was matched, a call in each step until there is an answer, the last of which is not over."""
        request: Any = SimpleNamespace(
            request_id=name,
            block_hashes=hashes,
            lora_request=None,
            num_tokens=self._tokens,
            num_prompt_tokens=self._tokens,
            skip_reading_prefix_cache=False,
        )
        self._spent = 0.0
        self._timed(f"{kind}.on_new_request", lambda: self.connector.on_new_request(request))
        while True:
            tokens, _ = self._timed(
                f"{kind}.get_num_new_matched_tokens", lambda: self.connector.get_num_new_matched_tokens(request, 0)
            )
            if tokens is not None:
                break
            with self._step(kind):
                self._timed(f"{kind}.build_connector_meta", lambda: self.connector.build_connector_meta(others()))
            self._spent = 0.0
        if tokens != found * BLOCK_TOKENS:
            raise RuntimeError(f"{tokens} tokens were found of {found * BLOCK_TOKENS}")
        return request

    def _said(self, kind: str, said: RepriseWorkerMetadata) -> None:
        """The workers end what the step before has begun; what this one has begun is ended by the next."""
        before = self._ended.get(kind)
        self._ended[kind] = said
        if before is not None:
            output: Any = SimpleNamespace(kv_connector_worker_meta=before)
            self._timed(f"{kind}.update_connector_output", lambda: self.connector.update_connector_output(output))

    def _over(self, request: Any, room: list[Any]) -> None:
        """The request is over; blocks that are being saved stay. Not timed: vLLM's part is most of it."""
        self.pool.free_blocks(room)
        self.connector.build_connector_meta(others([request.request_id]))

    @contextmanager
    def _step(self, kind: str) -> Iterator[None]:
        """A step: the sum of its calls."""
        yield
        self.times[f"{kind}.step"].append(self._spent)

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        took = (time.perf_counter() - started) * 1e3
        self.times[name].append(took)
        self._spent += took
        return result


def others(finished: list[str] | None = None) -> Any:
    """A step of the scheduler in which only another request computes, which is in all steps: it waits as long as the scheduler does."""
    running = SimpleNamespace(req_ids=[OTHER], num_computed_tokens=[0])
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=running,
        num_scheduled_tokens={OTHER: 1},
        finished_req_ids=finished or [],
    )


def computing(name: str, tokens: int, ids: list[int]) -> Any:
    """A step of the scheduler that computes a new request from its beginning to its end."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[OTHER], num_computed_tokens=[0]),
        num_scheduled_tokens={name: tokens, OTHER: 1},
        finished_req_ids=[],
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (ids,)),
    )


def percentiles(times: list[float]) -> dict[str, float]:
    """The middle and the slowest hundredth."""
    ordered = sorted(times)
    return {"p50_ms": percentile(ordered, 0.5), "p99_ms": percentile(ordered, 0.99)}


def percentile(ordered: list[float], share: float) -> float:
    """Of sorted values."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


if __name__ == "__main__":
    main()
