"""Scripts of benchmarks: the engines' processes, and the scheduler's calls."""

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


def measured(seed: int, own: int, output: int, prefix: int = 0, at: float = 0.0) -> dict[str, object]:
    """Returns a request of the measured engine, whose prefix has the seed 1."""
    request = {"at": at, "prefix_seed": 1, "prefix": prefix, "seed": seed, "own": own, "output": output}
    return {**request, "is_stored": False}


def test_measured_engine_reports_the_composition_of_steps_and_times_from_the_arrival(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    settings = {
        "model": str(tmp_path / "model"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 128,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
    }
    lines = [
        {"settings": settings, "config": config},
        {"do": "steps", "runs": [{"requests": [measured(2, 300, 3), measured(3, 40, 1)]}]},
        {"do": "serve", "requests": [measured(4, 10, 2, prefix=128), measured(5, 10, 2, prefix=128, at=0.2)]},
        {"do": "loads", "requests": [measured(6, 10, 1, prefix=128)]},
        {"do": "unknown"},
    ]
    with (tmp_path / "engine.log").open("w") as log:
        ended = subprocess.run(
            [sys.executable, "-P", str(BENCH / "measured_engine.py")],
            input="".join(json.dumps(line) + "\n" for line in lines),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            check=False,
            env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
    assert ended.returncode != 0, "an unknown command fails"
    described, stepped, served, loaded, failed = [json.loads(line) for line in ended.stdout.splitlines()]
    # Embedding, attention (queries and output 64 wide, keys and values 32), three projections, three norms.
    assert described["parameters"] == 512 * 64 + 64 * (2 * 64 + 2 * 32) + 3 * 64 * 64 + 3 * 64
    assert (described["layers"], described["kv_heads"], described["block_tokens"]) == (1, 1, 128)
    (steps,) = stepped["runs"]
    assert [step["chunks"] for step in steps] == [[[256, 0]], [[44, 256], [40, 0]], [[1, 300]], [[1, 301]]]
    assert all(step["seconds"] > 0 for step in steps)
    first, second = served["answers"]
    assert (first["cached"], second["cached"]) == (0, 128), "the engine's own cache has the prefix of the second"
    for answer in (first, second):
        assert 0 < answer["ttft"] <= answer["end"] - answer["at"]
    assert second["end"] > 0.2
    (load,) = loaded["answers"]
    assert load["cached"] == 0, "the engine's own cache was cleared"
    assert 0 <= load["wait"] < load["ttft"]
    assert "unknown" in failed["error"]
