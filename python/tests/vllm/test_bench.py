"""Scripts of `reprise-bench vllm`: the engine's process, and the scheduler's calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cluster import Cluster
from engine import ENVIRONMENT

BENCH = Path(__file__).parents[2] / "bench"
TOKENS = 258
CACHED = 256


def test_engine_script_answers_line_by_line_and_clears_its_cache_between_prompts(tmp_path: Path) -> None:
    settings = {
        "model": str(tmp_path / "model"),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": 128,
        "max_model_len": 1024,
    }
    lines = [
        {"model": {"layers": 1, "heads": 1, "head_dim": 32}, "settings": settings},
        {"do": "measure", "seeds": [1, 2, 1], "tokens": TOKENS},
        {"do": "own_cache", "seeds": [1, 2], "tokens": TOKENS},
        {"do": "settle", "seeds": [1], "tokens": TOKENS, "cached": CACHED, "within": 0.0},
        {"do": "stop"},
    ]
    with (tmp_path / "engine.log").open("w") as log:
        ended = subprocess.run(
            [sys.executable, "-P", str(BENCH / "vllm_engine.py")],
            input="".join(json.dumps(line) + "\n" for line in lines),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            check=False,
            env={**os.environ, **ENVIRONMENT},
        )
    assert ended.returncode == 0, (tmp_path / "engine.log").read_text()[-4000:]
    ready, measured, own, settled, stopped = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ready["ready"] > 0
    first, second, again = measured["answers"]
    assert [answer["cached"] for answer in measured["answers"]] == [0, 0, 0]
    assert first["tokens"] == again["tokens"] != second["tokens"]
    assert [answer["cached"] for answer in own["answers"]] == [0, 0], "each prompt is computed"
    assert [answer["cached"] for answer in own["again"]] == [CACHED, CACHED], (
        "and found in the engine's cache when repeated"
    )
    assert own["answers"][0]["tokens"] == first["tokens"]
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith("model")]
    assert left == ["model"], "no temporary folder of the model is left"
    assert settled["cached"] == [0], "no cache outside the engine has its KV"
    assert stopped == {"stopped": True}


def test_scheduler_script_times_every_call_of_a_step(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster")
    try:
        ended = subprocess.run(
            [sys.executable, "-P", str(BENCH / "scheduler_call.py"), str(cluster.agents[0].socket), "64", "20"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    finally:
        cluster.stop()
    calls = json.loads(ended.stdout.splitlines()[-1])
    both = {"on_new_request", "get_num_new_matched_tokens", "build_connector_meta", "update_connector_output", "step"}
    only_loads = {"update_state_after_alloc", "get_external_cache_hit_sources"}
    assert set(calls) == {f"load.{name}" for name in both | only_loads} | {f"save.{name}" for name in both}
    for name, times in calls.items():
        assert 0 < times["p50_ms"] <= times["p99_ms"], name
    for kind in ("load", "save"):
        matched, step = calls[f"{kind}.get_num_new_matched_tokens"], calls[f"{kind}.step"]
        assert step["p99_ms"] > matched["p50_ms"], "a step is the sum of its calls"
