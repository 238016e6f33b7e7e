"""Roles of an engine, hit sources in vLLM's terms, and saves of generated blocks."""

from __future__ import annotations

from typing import Any

import pytest
from test_scheduler import TOKENS, FakeSession, output, request, side
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from reprise import Source
from reprise.vllm import RepriseConnector


def connected(scheduler: Any) -> RepriseConnector:
    """Returns a connector with only this scheduler side."""
    connector = RepriseConnector.__new__(RepriseConnector)
    connector._scheduler = scheduler
    return connector


def saved(scheduler: Any, count: int = 3) -> tuple[int, ...]:
    """Returns the saved blocks of a prompt without cached blocks."""
    scheduler.matched_tokens(request(count), 0)
    ids = list(range(1, count + 1))
    saves = scheduler.step(output({"r": (0, count * TOKENS)}, {"r": ids})).saves
    return tuple(block for save in saves for block in save.blocks)


def test_hit_sources_cover_only_the_tokens_that_vllm_loads() -> None:
    places = [Source.OWN_DRAM, Source.OWN_DRAM, Source.OWN_NVME, Source.PEER_DRAM, Source.PEER_NVME]
    connector = connected(side(FakeSession(answer=places)))
    asked = request(6)
    assert connector.get_num_new_matched_tokens(asked, 0) == (5 * TOKENS, True)
    assert connector.get_external_cache_hit_sources(asked, 5 * TOKENS) == {
        CacheHitSource.HOST: 2 * TOKENS,
        CacheHitSource.DISK: TOKENS,
        CacheHitSource.P2P: 2 * TOKENS,
    }
    assert connector.get_external_cache_hit_sources(asked, TOKENS) == {CacheHitSource.HOST: TOKENS}


def test_consumer_saves_no_blocks_and_producer_matches_none() -> None:
    session = FakeSession(answer=[Source.OWN_DRAM] * 2)
    both, consumer, producer = side(FakeSession()), side(session), side(session)
    assert saved(both) == (1, 2, 3)
    consumer.may_save = False
    assert consumer.matched_tokens(request(3), 0) == (2 * TOKENS, True)
    assert saved(consumer) == ()
    producer.may_load = False
    session.matches.clear()
    assert producer.matched_tokens(request(3), 0) == (0, False)
    assert session.matches == []
    assert saved(producer) == (1, 2, 3)


@pytest.mark.parametrize(("save_decode_blocks", "wanted"), [(True, (1, 2, 3)), (False, (1, 2))])
def test_generated_blocks_are_saved_unless_disabled(save_decode_blocks: bool, wanted: tuple[int, ...]) -> None:
    scheduler = side(FakeSession(), save_decode_blocks=save_decode_blocks)
    asked = request(3)
    # The third block has generated tokens only.
    asked.num_prompt_tokens = 2 * TOKENS
    scheduler.matched_tokens(asked, 0)
    saves = scheduler.step(output({"r": (0, 3 * TOKENS)}, {"r": [1, 2, 3]})).saves
    assert tuple(block for save in saves for block in save.blocks) == wanted


def test_reset_of_the_connector_drops_matches_of_the_old_weights() -> None:
    connector = connected(side(FakeSession(answer=[Source.OWN_DRAM])))
    asked = request(2)
    assert connector.get_num_new_matched_tokens(asked, 0) == (TOKENS, True)
    assert connector.reset_cache() is True
    assert connector.get_external_cache_hit_sources(asked, TOKENS) == {}


def test_connector_does_not_support_sleep_mode() -> None:
    # vLLM 0.33 and later call this.
    assert RepriseConnector.supports_sleep_mode(None) is False
