"""Keys of requests with LoRA adapters depend on the adapters' weights."""

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
    """Returns a request with an adapter."""
    asked = request(2, name)
    asked.lora_request = LoRARequest("law", 1, str(folder))
    return asked


def keys_with(folder: Path) -> list[bytes]:
    """Returns the keys that a new engine matches for a request with an adapter."""
    session = FakeSession()
    side(session).matched_tokens(adapted(folder), 0)
    return keys_of(session.matches[0])


def test_retrained_adapter_with_the_same_name_and_path_has_other_keys(tmp_path: Path) -> None:
    first = keys_with(adapter(tmp_path / "law", seed=1))
    moved = keys_with(adapter(tmp_path / "elsewhere" / "law", seed=1))
    assert first == moved, "vLLM's hash covers the path, our suffix only the weights"
    again = keys_with(adapter(tmp_path / "law", seed=2))
    without = FakeSession()
    side(without).matched_tokens(request(2), 0)
    assert len({*first, *again, *keys_of(without.matches[0])}) == 6


def test_adapter_with_changed_files_is_not_cached_until_it_is_reloaded(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "law", seed=1)
    session = FakeSession()
    scheduler = side(session)
    scheduler.matched_tokens(adapted(folder, "a"), 0)
    scheduler.matched_tokens(adapted(folder, "b"), 0)
    adapter(folder, seed=2)
    os.utime(folder / "adapter_model.safetensors", (1, 1))
    # vLLM may still use the old adapter, or may have evicted it and read the new one.
    assert scheduler.matched_tokens(adapted(folder, "c"), 0) == (0, False)
    reloaded = adapted(folder, "d")
    reloaded.lora_request.load_inplace = True
    scheduler.matched_tokens(reloaded, 0)
    scheduler.matched_tokens(adapted(folder, "e"), 0)
    before, same, after, since = (keys_of(match) for match in session.matches)
    assert before == same
    assert not set(before) & set(after)
    assert after == since


def test_scheduler_does_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert scheduler.matched_tokens(asked, 0) == (None, False), "vLLM polls again in its next step"
    assert reads.wait(60.0)
    asked_long_ago = adapted(folder, "b")
    scheduler.begin(asked_long_ago)
    monkeypatch.setattr(scheduler_module, "ADAPTER_WAIT_S", 0.0)
    assert scheduler.matched_tokens(asked_long_ago, 0) == (0, False), "the request continues without Reprise"
    assert scheduler.step(output({"b": (0, 2 * TOKENS)}, {"b": [1, 2]})).saves == []
    is_read.set()
    monkeypatch.setattr(scheduler_module, "ADAPTER_WAIT_S", 600.0)
    while (result := scheduler.matched_tokens(asked, 0)) == (None, False):
        scheduler.step(output({}, {}))
    assert result == (2 * TOKENS, True)


def test_requests_waiting_for_an_adapter_share_the_budget_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read = threading.Event()

    def hung(files: list[Path]) -> str:
        assert is_read.wait(60.0)
        return "digest"

    monkeypatch.setattr(weights, "sample", hung)
    monkeypatch.setattr(scheduler_module, "ADAPTER_WAIT_S", 600.0)
    scheduler = side(FakeSession(), match_budget_ms=20.0)
    folder = adapter(tmp_path / "law", seed=1)
    try:
        before = time.monotonic()
        for number in range(100):
            assert scheduler.matched_tokens(adapted(folder, f"r{number}"), 0) == (None, False)
        assert time.monotonic() - before < 1.0, "separate budgets would take 2 s"
    finally:
        is_read.set()


def test_unreadable_adapter_does_not_stop_the_identification_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sample = weights.sample

    def fails(files: list[Path]) -> str:
        if "broken" in str(files[0]):
            raise RuntimeError("an unexpected error")
        return sample(files)

    monkeypatch.setattr(weights, "sample", fails)
    session = FakeSession(answer=[Source.OWN_DRAM] * 2)
    scheduler = side(session)
    assert scheduler.matched_tokens(adapted(adapter(tmp_path / "broken", seed=1), "a"), 0) == (0, False)
    assert scheduler.matched_tokens(adapted(adapter(tmp_path / "law", seed=1), "b"), 0) == (2 * TOKENS, True)
    assert "an unexpected error" in caplog.text


def test_blocks_of_an_unidentified_adapter_are_neither_loaded_nor_saved(tmp_path: Path) -> None:
    session = FakeSession(answer=[Source.OWN_DRAM] * 2)
    scheduler = side(session)
    asked = adapted(tmp_path / "nothing")
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": [1, 2]})).saves == []
    assert session.matches == []
