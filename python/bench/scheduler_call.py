"""Measures how long vLLM's scheduler waits for Reprise in a step, with a real agent.

Arguments: the agent's socket, blocks per request, steps. Prints a line of JSON with percentiles in milliseconds for
each call. There are two kinds of steps, in turn, each with one new request:

    load    all blocks are in Reprise: match, allocation, sources, plan of the load; the end of the previous load
    save    no block is in Reprise: match, plan of the save; the end of the previous save, which frees its blocks

``load.step`` and ``save.step`` are the sums of a step's calls. The match includes keys, the query to the agent and its
answer; a step without the answer counts as a step too. Another request computes in every step, so waits are limited as
for a busy engine. Blocks are references in vLLM's own pool; nothing is copied.
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
"""Request that computes in every step; Reprise has none of its blocks."""
REQUESTS_PINNED = 2
"""Requests with concurrent saves: those of this step and of the previous one."""


def main() -> None:
    """Saves the blocks and runs the steps."""
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
    saved = [os.urandom(32) for _ in range(blocks)]
    memory = KvMemory([np.zeros((blocks, 1, BLOCK_TOKENS, HEAD_DIM), np.uint16) for _ in range(LAYERS)], layout)
    with Client(socket, namespace, layout) as client:
        client.save(block_keys(namespace, saved), memory, range(blocks))
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
    # As vLLM's engine core does after its start.
    freeze_gc_heap()
    for step in range(steps):
        if step % 2 == 0:
            bench.load(f"load-{step}", saved)
        else:
            bench.save(f"save-{step}", [os.urandom(32) for _ in range(blocks)])
    session.close()
    print(json.dumps({name: percentiles(times) for name, times in bench.times.items()}))


class Connector(RepriseConnector):
    """Connector of the scheduler's process, without an engine's configuration."""

    def __init__(self, side: SchedulerSide) -> None:
        self._scheduler, self._worker = side, None


@dataclass
class Bench:
    """Steps of a scheduler with one request at a time, and the times of its calls in milliseconds."""

    connector: Connector
    pool: BlockPool
    blocks: int
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _spent: float = 0.0
    _ended: dict[str, RepriseWorkerMetadata] = field(default_factory=dict)
    """Workers' output for the previous request of each kind."""

    def load(self, name: str, hashes: list[bytes]) -> None:
        """Runs a request whose blocks are all saved."""
        request = self._matched("load", name, hashes, self.blocks)
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
            self._report("load", RepriseWorkerMetadata(whole_loads=ended, ended_loads=ended))
        self._finish(request, room)

    def save(self, name: str, hashes: list[bytes]) -> None:
        """Runs a request whose blocks are all computed, in one step."""
        request = self._matched("save", name, hashes, 0)
        room = self.pool.get_new_blocks(self.blocks)
        with self._step("save"):
            computed = computing(name, self._tokens, [block.block_id for block in room])
            metadata = self._timed("save.build_connector_meta", lambda: self.connector.build_connector_meta(computed))
            (plan,) = metadata.saves
            self._report("save", RepriseWorkerMetadata(ended_saves=Counter({plan.save_id: 1})))
        self._finish(request, room)

    @property
    def _tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS

    def _matched(self, kind: str, name: str, hashes: list[bytes], found: int) -> Any:
        """Returns a new request after its match: one call per step until the answer; the last step has not ended."""
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
            raise RuntimeError(f"found {tokens} tokens instead of {found * BLOCK_TOKENS}")
        return request

    def _report(self, kind: str, output: RepriseWorkerMetadata) -> None:
        """Reports the workers' output of the previous step; that of this step is reported in the next one."""
        before = self._ended.get(kind)
        self._ended[kind] = output
        if before is not None:
            wrapped: Any = SimpleNamespace(kv_connector_worker_meta=before)
            self._timed(f"{kind}.update_connector_output", lambda: self.connector.update_connector_output(wrapped))

    def _finish(self, request: Any, room: list[Any]) -> None:
        """Ends the request; blocks in a running save stay. Not timed, because most of it is vLLM's work."""
        self.pool.free_blocks(room)
        self.connector.build_connector_meta(others([request.request_id]))

    @contextmanager
    def _step(self, kind: str) -> Iterator[None]:
        """Adds the sum of the calls of a step."""
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
    """Returns a scheduler's step with only the other request, which waits as long as the scheduler."""
    running = SimpleNamespace(req_ids=[OTHER], num_computed_tokens=[0])
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=running,
        num_scheduled_tokens={OTHER: 1},
        scheduled_spec_decode_tokens={},
        finished_req_ids=finished or [],
        preempted_req_ids=None,
    )


def computing(name: str, tokens: int, ids: list[int]) -> Any:
    """Returns a scheduler's step that computes a complete new request."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[OTHER], num_computed_tokens=[0]),
        num_scheduled_tokens={name: tokens, OTHER: 1},
        scheduled_spec_decode_tokens={},
        finished_req_ids=[],
        preempted_req_ids=None,
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (ids,)),
    )


def percentiles(times: list[float]) -> dict[str, float]:
    """Returns the 50th and the 99th percentile."""
    ordered = sorted(times)
    return {"p50_ms": percentile(ordered, 0.5), "p99_ms": percentile(ordered, 0.99)}


def percentile(ordered: list[float], share: float) -> float:
    """Returns a percentile of sorted values."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


if __name__ == "__main__":
    main()
