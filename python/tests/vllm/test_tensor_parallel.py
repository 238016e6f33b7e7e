"""An engine of two ranks, each with blocks of its own, says with Reprise what it says when it computes."""

from __future__ import annotations

import os
from pathlib import Path

from cluster import Cluster
from engine import Engine, connector
from faults import drop_dram, observer
from serving import PROMPT_BLOCKS, prompt, see, see_again

PATIENCE_MS = 5000.0


def a_core_for_each_rank() -> dict[str, str]:
    """By itself vLLM gives a rank a NUMA node, and refuses two ranks where there is one node."""
    cores = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}


def test_an_engine_of_two_ranks_loads_what_it_has_computed_and_nothing_of_one_with_one_rank(
    engine: Engine, home: Path, weights: Path, cluster: Cluster
) -> None:
    tokens = prompt(700)
    see(engine, tokens)
    small = {"num_gpu_blocks_override": 64, "max_model_len": 1024}
    # Two ranks spin on all cores of a small machine: its agent may wait for one for seconds.
    patient = {f"{name}_ms": PATIENCE_MS for name in ("match_deadline", "load_stall", "load_standstill")}
    transfer = connector(cluster.agents[0].socket, **patient)
    pair = Engine(weights, home / "pair.log", transfer, a_core_for_each_rank(), tensor_parallel_size=2, **small)
    try:
        cold = see(pair, tokens, ranks=2)
        assert cold["cached"] == [0], "one rank of one has other blocks than one of two"
        assert see_again(pair, tokens)["tokens"] == cold["tokens"]
        with observer(cluster.agents[0]) as agent:
            drop_dram(agent)
            from_nvme = agent.stats()["hit_blocks_own_nvme"]
            assert see_again(pair, tokens)["tokens"] == cold["tokens"]
            assert agent.stats()["hit_blocks_own_nvme"] >= from_nvme + 2 * PROMPT_BLOCKS, "of both ranks"
    finally:
        pair.stop()
