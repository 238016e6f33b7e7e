"""Tests which engines share blocks."""

from __future__ import annotations

from pathlib import Path

from cluster import Cluster
from engine import BLOCK_TOKENS, Engine, connector
from engine_checks import PROMPT_BLOCKS, prompt, serve_and_save, serve_from_reprise
from engine_model import adapter, model
from faults import drop_dram, eventually, observer


def test_a_restarted_engine_finds_its_blocks_and_another_revision_finds_nothing(
    engine: Engine, home: Path, weights: Path, cluster: Cluster
) -> None:
    tokens = prompt(50)
    first = serve_and_save(engine, tokens)
    retrained = model(home / "retrained" / "model", seed=2)
    # With the model's name before the training.
    transfer = connector(cluster.agents[0].socket, model_id=str(weights))
    started = Engine(retrained, home / "retrained.log", transfer)
    try:
        cold = serve_and_save(started, tokens)
    finally:
        started.kill()
    assert cold["cached"] == [0], "blocks of another revision"
    assert cold["tokens"] != first["tokens"]
    agent = cluster.agents[0]
    with observer(agent) as seen:
        drop_dram(seen)
    agent.kill()
    try:
        again = Engine(retrained, home / "retrained-again.log", transfer)
    except BaseException:
        agent.start()
        raise
    try:
        try:
            without = again.generate([tokens])
        finally:
            agent.start()
        assert without["cached"] == [0]
        assert without["tokens"] == cold["tokens"]

        def is_found() -> bool:
            again.clear_cache()
            answer = again.generate([tokens])
            assert answer["tokens"] == cold["tokens"]
            return bool(answer["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS])

        eventually(is_found)
        assert again.metrics().get("vllm:reprise_saved_blocks", 0) == 0, "it found the first engine's blocks"
    finally:
        again.stop()


def test_dtypes_and_lora_adapters_do_not_share_blocks(
    engine: Engine, home: Path, weights: Path, cluster: Cluster
) -> None:
    tokens = prompt(51)
    serve_and_save(engine, tokens)
    adapters = {name: adapter(home / name, seed=number) for number, name in enumerate(("law", "medicine"), start=1)}
    transfer = connector(cluster.agents[0].socket)
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    adapted = Engine(weights, home / "adapted.log", transfer, **{"dtype": "bfloat16", **lora})
    try:
        answers = {}
        plain = serve_and_save(adapted, tokens)
        assert plain["cached"] == [0], "bfloat16 does not find blocks of float32, even without an adapter"
        adapted.clear_cache()
        for number, (name, folder) in enumerate(adapters.items(), start=1):
            answers[name] = serve_and_save(adapted, tokens, lora=[name, number, str(folder)])
            assert answers[name]["cached"] == [0], f"{name} finds no blocks of others"
            adapted.clear_cache()
        assert answers["law"]["tokens"] != answers["medicine"]["tokens"]
        for number, (name, folder) in enumerate(adapters.items(), start=1):
            warm = serve_from_reprise(adapted, tokens, lora=[name, number, str(folder)])
            assert warm["tokens"] == answers[name]["tokens"]
            adapted.clear_cache()
    finally:
        adapted.stop()
