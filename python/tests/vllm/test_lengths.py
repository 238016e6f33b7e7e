"""Tests prompts of different lengths: full blocks are saved, the rest is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import MIB, Cluster
from engine_checks import prompt
from engine_model import model
from stepped_engine import TOKENS, expected, stepped_engine

LENGTHS = (1, TOKENS - 1, TOKENS, TOKENS + 1, 2 * TOKENS, 3 * TOKENS + 7)


@pytest.mark.parametrize("layerwise", [False, True], ids=["between-steps", "layer-wise"])
def test_full_blocks_of_a_prompt_are_saved_and_loaded_and_the_rest_is_computed(
    layerwise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path / "cluster", arena=16 * MIB, pool=128 * MIB)
    try:
        weights = model(tmp_path / "model")
        with stepped_engine(weights, cluster.agents[0], monkeypatch, layerwise_loads=layerwise) as engine:
            for length in LENGTHS:
                tokens = prompt(length, blocks=4)[:length]
                engine.serve_and_save(tokens)
                again = engine.add(tokens)
                engine.finish()
                loaded = length // TOKENS * TOKENS
                if loaded == length:
                    # An answer needs at least one computed token, or one block without a load if layer-wise.
                    loaded -= TOKENS if layerwise else 1
                assert engine.computed[again.request_id] == [(loaded, length)]
                assert list(again.output_token_ids) == expected(tokens)
                engine.check_nothing_is_held()
                if length >= TOKENS:
                    assert engine.saved(again) == [True] * (length // TOKENS)
                engine.clear_cache()
    finally:
        cluster.stop()
