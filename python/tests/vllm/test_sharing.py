"""Which engines share blocks, and which must not."""

from __future__ import annotations

from pathlib import Path

from cluster import Cluster
from engine import BLOCK_TOKENS, Engine, connector
from engine_model import adapter, model
from faults import drop_dram, eventually, observer
from serving import PROMPT_BLOCKS, prompt, see, see_again


def test_an_engine_that_is_started_again_before_its_agent_finds_what_it_saved_and_another_revision_finds_nothing(
    engine: Engine, home: Path, weights: Path, cluster: Cluster
) -> None:
    tokens = prompt(50)
    first = see(engine, tokens)
    retrained = model(home / "retrained" / "model", seed=2)
    # Under the name that the model had before its training.
    transfer = connector(cluster.agents[0].socket, model_id=str(weights))
    started = Engine(retrained, home / "retrained.log", transfer)
    try:
        cold = see(started, tokens)
    finally:
        started.kill()
    assert cold["cached"] == [0], "of the other revision"
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

        def found() -> bool:
            again.forget()
            told = again.generate([tokens])
            assert told["tokens"] == cold["tokens"]
            return bool(told["cached"] == [PROMPT_BLOCKS * BLOCK_TOKENS])

        eventually(found)
        assert again.metrics().get("vllm:reprise_saved_blocks", 0) == 0, "it found what the first engine had saved"
    finally:
        again.stop()


def test_another_dtype_and_another_lora_adapter_find_nothing_of_each_other(
    engine: Engine, home: Path, weights: Path, cluster: Cluster
) -> None:
    tokens = prompt(51)
    see(engine, tokens)
    adapters = {name: adapter(home / name, seed=number) for number, name in enumerate(("law", "medicine"), start=1)}
    transfer = connector(cluster.agents[0].socket)
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    adapted = Engine(weights, home / "adapted.log", transfer, **{"dtype": "bfloat16", **lora})
    try:
        told = {}
        plain = see(adapted, tokens)
        assert plain["cached"] == [0], "bfloat16 is another model than float32, without an adapter as well"
        adapted.forget()
        for number, (name, folder) in enumerate(adapters.items(), start=1):
            told[name] = see(adapted, tokens, lora=[name, number, str(folder)])
            assert told[name]["cached"] == [0], f"{name} has KV of its own"
            adapted.forget()
        assert told["law"]["tokens"] != told["medicine"]["tokens"]
        for number, (name, folder) in enumerate(adapters.items(), start=1):
            warm = see_again(adapted, tokens, lora=[name, number, str(folder)])
            assert warm["tokens"] == told[name]["tokens"]
            adapted.forget()
    finally:
        adapted.stop()
