"""Requests of LoRA adapters have keys of their own, whatever name and path an adapter has."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from engine_model import adapter
from test_scheduler import TOKENS, FakeSession, keys_of, output, request, side
from vllm.lora.request import LoRARequest

from reprise import Source, weights
from reprise.vllm import scheduler as scheduler_module


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


def test_an_adapter_whose_files_change_is_not_kept_until_it_is_to_be_loaded_anew(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "law", seed=1)
    session = FakeSession()
    scheduler = side(session)
    scheduler.matched_tokens(adapted(folder, "a"), 0)
    scheduler.matched_tokens(adapted(folder, "b"), 0)
    adapter(folder, seed=2)
    os.utime(folder / "adapter_model.safetensors", (1, 1))
    # vLLM has the old one, or has forgotten it and read the new one: nobody here knows which.
    assert scheduler.matched_tokens(adapted(folder, "c"), 0) == (0, False)
    anew = adapted(folder, "d")
    anew.lora_request.load_inplace = True
    scheduler.matched_tokens(anew, 0)
    scheduler.matched_tokens(adapted(folder, "e"), 0)
    before, same, after, since = (keys_of(question) for question in session.questions)
    assert before == same
    assert not set(before) & set(after)
    assert after == since


def test_the_scheduler_does_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, is_read = threading.Event(), threading.Event()
    sample = weights.sample

    def slow(files: list[Path]) -> str:
        reads.set()
        assert is_read.wait(60.0)
        return sample(files)

    monkeypatch.setattr(weights, "sample", slow)
    session = FakeSession(answer=[Source.OWN_DRAM] * 2)
    scheduler = side(session, match_budget_ms=5.0)
    folder = adapter(tmp_path / "law", seed=1)
    asked = adapted(folder, "a")
    assert scheduler.matched_tokens(asked, 0) == (None, False), "vLLM asks again in its next step"
    assert reads.wait(60.0)
    asked_long_ago = adapted(folder, "b")
    scheduler.begin(asked_long_ago)
    monkeypatch.setattr(scheduler_module, "ADAPTER_WAIT_S", 0.0)
    assert scheduler.matched_tokens(asked_long_ago, 0) == (0, False), "it goes on without Reprise"
    assert scheduler.step(output({"b": (0, 2 * TOKENS)}, {"b": [1, 2]})).saves == []
    is_read.set()
    monkeypatch.setattr(scheduler_module, "ADAPTER_WAIT_S", 600.0)
    while (told := scheduler.matched_tokens(asked, 0)) == (None, False):
        scheduler.step(output({}, {}))
    assert told == (2 * TOKENS, True)


def test_requests_that_wait_for_an_adapter_wait_for_one_step_s_budget_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read = threading.Event()

    def hung(files: list[Path]) -> str:
        assert is_read.wait(60.0)
        return "told"

    monkeypatch.setattr(weights, "sample", hung)
    monkeypatch.setattr(scheduler_module, "ADAPTER_WAIT_S", 600.0)
    scheduler = side(FakeSession(), match_budget_ms=20.0)
    folder = adapter(tmp_path / "law", seed=1)
    try:
        before = time.monotonic()
        for number in range(100):
            assert scheduler.matched_tokens(adapted(folder, f"r{number}"), 0) == (None, False)
        assert time.monotonic() - before < 1.0, "100 times 20 ms would be 2 s"
    finally:
        is_read.set()


def test_an_adapter_that_cannot_be_read_does_not_end_the_looks_at_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sample = weights.sample

    def fails(files: list[Path]) -> str:
        if "broken" in str(files[0]):
            raise RuntimeError("nobody has thought of this")
        return sample(files)

    monkeypatch.setattr(weights, "sample", fails)
    session = FakeSession(answer=[Source.OWN_DRAM] * 2)
    scheduler = side(session)
    assert scheduler.matched_tokens(adapted(adapter(tmp_path / "broken", seed=1), "a"), 0) == (0, False)
    assert scheduler.matched_tokens(adapted(adapter(tmp_path / "law", seed=1), "b"), 0) == (2 * TOKENS, True)
    assert "nobody has thought of this" in caplog.text


def test_blocks_of_an_adapter_that_cannot_be_told_apart_are_neither_loaded_nor_saved(tmp_path: Path) -> None:
    session = FakeSession(answer=[Source.OWN_DRAM] * 2)
    scheduler = side(session)
    asked = adapted(tmp_path / "nothing")
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": [1, 2]})).saves == []
    assert session.questions == []
