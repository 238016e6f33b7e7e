"""Filters of sources by vLLM's names of tiers."""

from __future__ import annotations

import pytest

from reprise import Source, tiers

DRAM, NVME, PEER_DRAM, PEER_NVME = Source.OWN_DRAM, Source.OWN_NVME, Source.PEER_DRAM, Source.PEER_NVME


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CPU", {DRAM, PEER_DRAM}),
        ("local", {DRAM, NVME}),
        ("STORAGE:LOCAL, CPU:REMOTE", {NVME, PEER_DRAM}),
        ("LOCAL:STORAGE", {NVME}),
        ("CPU,STORAGE", set(Source)),
        ("none", set()),
    ],
)
def test_lists_name_sources(text: str, expected: set[int]) -> None:
    assert tiers.parse(text) == expected


@pytest.mark.parametrize("text", ["TAPE", "CPU:TAPE", "CPU:CPU", "CPU,", "CPU:LOCAL:REMOTE", ":"])
def test_invalid_lists_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="invalid tier"):
        tiers.parse(text)


def test_leading_blocks_of_allowed_sources_are_loadable() -> None:
    found = [DRAM, NVME, PEER_NVME, DRAM]
    assert tiers.loadable(found, tiers.parse("LOCAL")) == 2
    assert tiers.loadable(found, frozenset()) == 0
    assert tiers.loadable(found, tiers.ALL) == 4
