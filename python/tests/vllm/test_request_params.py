"""Parameters of requests: sources to load from, no-store, no-retain, and priorities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_scheduler import TOKENS, FakeSession, blocks_of, output, request, side

from reprise import Source
from reprise.vllm.metrics import Stats
from reprise.vllm.request_params import ENTRIES_MAX, RequestParams

SOURCES = [Source.OWN_DRAM, Source.OWN_DRAM, Source.OWN_NVME, Source.PEER_DRAM]


def read(params: Any, priority: int = 0, *, by_priority: bool = True) -> tuple[RequestParams, dict[str, Any]]:
    stats = Stats()
    given = SimpleNamespace(kv_transfer_params=params, priority=priority)
    return RequestParams.of(given, stats, by_priority=by_priority), stats.data  # type: ignore[arg-type]


def test_request_without_parameters_uses_everything() -> None:
    for given in (None, {}, {"other": 1}):
        assert read(given) == (RequestParams(), {})
    assert RequestParams().loadable(SOURCES) == 4


@pytest.mark.parametrize(
    ("tiers", "loadable"),
    [
        ([], 0),
        ([{}], 4),
        ([{"medium": "CPU"}], 2),
        ([{"medium": "cpu", "locality": "local"}], 2),
        ([{"locality": "LOCAL"}], 3),
        ([{"locality": "REMOTE"}], 0),
        ([{"locality": "LOCAL"}, {"medium": "CPU", "locality": "REMOTE"}], 4),
    ],
)
def test_leading_blocks_of_matching_tiers_are_loaded(tiers: list[dict[str, str]], loadable: int) -> None:
    params, counted = read({"kv_load_tiers": tiers})
    assert (params.loadable(SOURCES), counted) == (loadable, {})
    scheduler = side(FakeSession(answer=SOURCES))
    new_request = request(6)
    new_request.kv_transfer_params = {"kv_load_tiers": tiers}
    assert scheduler.matched_tokens(new_request, 0)[0] == loadable * TOKENS
    if loadable:
        scheduler.allocated(new_request, blocks_of(list(range(1, 7))), loadable * TOKENS)
        assert len(scheduler.step(output({}, {})).loads[0].blocks) == loadable
    if tiers == []:
        assert scheduler.session.matches == [], "nothing can be loaded"


@pytest.mark.parametrize(
    ("params", "stores"),
    [
        ({"kv_no_store": True}, False),
        ({"kv_no_store": False}, True),
        ({"kv_store_tiers": []}, False),
        ({"kv_store_tiers": [{"locality": "REMOTE"}]}, False),
        ({"kv_store_tiers": [{"medium": "STORAGE"}]}, True),
    ],
)
def test_request_is_saved_only_if_it_may_be(params: dict[str, Any], stores: bool) -> None:
    scheduler = side(FakeSession())
    new_request = request(2)
    new_request.kv_transfer_params = params
    scheduler.matched_tokens(new_request, 0)
    saves = scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": [1, 2]})).saves
    assert [save.blocks for save in saves] == ([(1, 2)] if stores else [])
    assert scheduler.has_pending_transfers() == stores


@pytest.mark.parametrize(
    ("params", "vllm_priority", "priority"),
    [(None, 0, "normal"), (None, -5, "high"), (None, 7, "low"), ({"kv_no_retain": True}, -5, "low")],
)
def test_blocks_are_saved_with_the_class_of_their_request(
    params: dict[str, Any] | None, vllm_priority: int, priority: str
) -> None:
    scheduler = side(FakeSession())
    scheduler.by_priority = True
    new_request = request(2)
    new_request.kv_transfer_params, new_request.priority = params, vllm_priority
    new_request.arrival_time = 0.0
    scheduler.matched_tokens(new_request, 0)
    (save,) = scheduler.step(output({"r": (0, 2 * TOKENS)}, {"r": [1, 2]})).saves
    assert save.priority == priority
    assert read(params, vllm_priority, by_priority=False)[0].priority == ("low" if params else "normal")


@pytest.mark.parametrize(
    "params",
    [
        {"kv_load_tiers": "CPU"},
        {"kv_load_tiers": [{"medium": "TAPE"}]},
        {"kv_load_tiers": [{"kind": "CPU"}]},
        {"kv_load_tiers": [7]},
        {"kv_store_tiers": [{}] * (ENTRIES_MAX + 1)},
        {"kv_store_tiers": {"locality": None}},
        {"kv_no_store": "yes"},
        {"kv_no_retain": 1},
    ],
)
def test_invalid_parameters_are_ignored_and_counted(params: dict[str, Any]) -> None:
    assert read(params) == (RequestParams(), {"ignored_parameters": 1})
