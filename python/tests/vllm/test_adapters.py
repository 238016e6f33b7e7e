"""Requests of LoRA adapters have keys of their own, whatever name and path an adapter has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engine_model import adapter
from test_scheduler import TOKENS, FakeSession, keys_of, output, request, side
from vllm.lora.request import LoRARequest

from reprise import Source


def adapted(folder: Path, name: str = "r") -> Any:
    """A request of an adapter."""
    asked = request(2, name)
    asked.lora_request = LoRARequest("law", 1, str(folder))
    return asked


def keys_with(folder: Path) -> list[bytes]:
    """Keys that a new engine asks for, for a request of an adapter."""
    session = FakeSession()
    side(session).matched_tokens(adapted(folder), 0)
    return keys_of(session.questions[0])


def test_an_adapter_that_was_trained_again_under_its_name_and_path_has_keys_of_its_own(tmp_path: Path) -> None:
    first = keys_with(adapter(tmp_path / "law", seed=1))
    moved = keys_with(adapter(tmp_path / "elsewhere" / "law", seed=1))
    assert first == moved, "vLLM's hash has the path; what is behind it is of the weights"
    again = keys_with(adapter(tmp_path / "law", seed=2))
    without = FakeSession()
    side(without).matched_tokens(request(2), 0)
    assert len({*first, *again, *keys_of(without.questions[0])}) == 6


def test_an_adapter_is_read_once_unless_it_is_to_be_loaded_anew(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "law", seed=1)
    session = FakeSession()
    scheduler = side(session)
    scheduler.matched_tokens(adapted(folder, "a"), 0)
    adapter(folder, seed=2)
    os.utime(folder / "adapter_model.safetensors", (1, 1))
    scheduler.matched_tokens(adapted(folder, "b"), 0)
    anew = adapted(folder, "c")
    anew.lora_request.load_inplace = True
    scheduler.matched_tokens(anew, 0)
    before, same, after = (keys_of(question) for question in session.questions)
    assert before == same
    assert not set(before) & set(after)


def test_blocks_of_an_adapter_that_cannot_be_told_apart_are_neither_loaded_nor_saved(tmp_path: Path) -> None:
    session = FakeSession(answer=[Source.OWN_DRAM] * 2)
    scheduler = side(session)
    asked = adapted(tmp_path / "nothing")
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": [1, 2]})).saves == []
    assert session.questions == []
