"""Tests that an engine with two ranks gives the same answer when it loads its blocks."""

from __future__ import annotations

import os
from pathlib import Path

from cluster import Cluster
from engine import Engine, connector
from engine_checks import PROMPT_BLOCKS, prompt, serve_and_save, serve_from_reprise
from faults import drop_dram, observer

PATIENCE_MS = 5000.0


def core_per_rank() -> dict[str, str]:
    """Returns the setting for one core per rank; by default, vLLM needs one NUMA node per rank."""
    cores = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}


def test_an_engine_with_two_ranks_loads_its_blocks_and_not_those_of_one_rank(
    engine: Engine, home: Path, weights: Path, cluster: Cluster
) -> None:
    tokens = prompt(700)
    serve_and_save(engine, tokens)
    small = {"num_gpu_blocks_override": 64, "max_model_len": 1024}
    # Two ranks use all cores of a small machine, so its agent may wait for seconds.
    patient = {f"{name}_ms": PATIENCE_MS for name in ("match_deadline", "load_stall", "load_standstill")}
    transfer = connector(cluster.agents[0].socket, **patient)
    pair = Engine(weights, home / "pair.log", transfer, core_per_rank(), tensor_parallel_size=2, **small)
    try:
        cold = serve_and_save(pair, tokens, ranks=2)
        assert cold["cached"] == [0], "blocks of one rank differ from those of two"
        assert serve_from_reprise(pair, tokens)["tokens"] == cold["tokens"]
        with observer(cluster.agents[0]) as agent:
            drop_dram(agent)
            from_nvme = agent.stats()["hit_blocks_own_nvme"]
            assert serve_from_reprise(pair, tokens)["tokens"] == cold["tokens"]
            assert agent.stats()["hit_blocks_own_nvme"] >= from_nvme + 2 * PROMPT_BLOCKS, "blocks of both ranks"
    finally:
        pair.stop()
