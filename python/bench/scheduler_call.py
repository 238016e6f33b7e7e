"""Times the call that vLLM's scheduler makes for each request, against an agent that has all its blocks.

Arguments: the agent's socket, blocks of a request, calls. Prints a line of JSON with percentiles in milliseconds. Keys, the
question to the agent and its answer are part of the call; every request is new.
"""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from reprise import Client, KvMemory, Layout, Namespace, Session, block_keys
from reprise.vllm.geometry import Geometry
from reprise.vllm.options import Options
from reprise.vllm.scheduler import SchedulerSide

LAYERS = 2
BLOCK_TOKENS = 16
HEAD_DIM = 64
CONNECTED_WITHIN_S = 10.0


def main() -> None:
    """Saves the blocks, then asks for them."""
    socket, blocks, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    layout = Layout(layers=LAYERS, parts=1, kv_heads=1, head_dim=HEAD_DIM, dtype="bf16", tokens_per_block=BLOCK_TOKENS)
    namespace = Namespace(
        model="scheduler-call",
        revision=os.urandom(8).hex(),
        layout=layout,
        hash_algorithm="none",
        hash_seed="",
        engine_format="bench",
    )
    hashes = [os.urandom(32) for _ in range(blocks)]
    memory = KvMemory([np.zeros((blocks, 1, BLOCK_TOKENS, HEAD_DIM), np.uint16) for _ in range(LAYERS)], layout)
    with Client(socket, namespace, layout) as client:
        client.save(block_keys(namespace, hashes), memory, range(blocks))
    session = Session(socket, namespace, layout)
    give_up = time.monotonic() + CONNECTED_WITHIN_S
    while not session.connected:
        if time.monotonic() > give_up:
            raise TimeoutError(f"no agent at {socket}: {session.last_error}")
        time.sleep(0.001)
    geometry = Geometry(layer_names=("0", "1"), block_tokens=BLOCK_TOKENS, rank=0, namespaces=(namespace,))
    side = SchedulerSide(
        geometry=geometry, options=Options(socket=socket), session=session, may_load=True, may_save=False, ranks=1
    )
    milliseconds = sorted(took for call in range(calls) for took in answered(side, call, hashes))
    session.close()
    print(json.dumps({"p50_ms": percentile(milliseconds, 0.5), "p99_ms": percentile(milliseconds, 0.99)}))


def answered(side: SchedulerSide, call: int, hashes: list[bytes]) -> list[float]:
    """Asks about a new request until there is an answer, a call in each step of the scheduler; the times of the calls."""
    request: Any = SimpleNamespace(request_id=str(call), block_hashes=hashes, lora_request=None)
    times = []
    while True:
        started = time.perf_counter()
        tokens, _ = side.matched_tokens(request, 0)
        times.append((time.perf_counter() - started) * 1e3)
        done = tokens is not None
        step(side, [request.request_id] if done else [])
        if done:
            if tokens != len(hashes) * BLOCK_TOKENS:
                raise RuntimeError(f"{tokens} tokens were found of {len(hashes) * BLOCK_TOKENS}")
            return times


def step(side: SchedulerSide, finished: list[str]) -> None:
    """A step of the scheduler in which nothing is computed."""
    nothing = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    output: Any = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=nothing, finished_req_ids=finished)
    side.step(output)


def percentile(ordered: list[float], share: float) -> float:
    """Of sorted values."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


if __name__ == "__main__":
    main()
