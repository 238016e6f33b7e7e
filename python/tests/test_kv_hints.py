"""Envelopes of KV hints: valid actions are read, everything else is ignored with a message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from reprise import kv_hints
from reprise.kv_hints import (
    ACTIONS_MAX,
    DIRECTIVES_MAX,
    DURATION_MAX_S,
    RETAIN_MAX_S,
    RETAIN_PINS_MAX,
    Command,
    Hints,
    TokenRange,
)


def action(kind: str, payload: Any = None, version: str = "1.0", name: str = "a") -> dict[str, Any]:
    return {"action_id": name, "action_type": kind, "action_version": version, "payload": payload or {}}


def envelope(*actions: Any, **changes: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions), **changes}


def read(given: Any) -> tuple[Hints, list[str]]:
    ignored: list[str] = []
    return kv_hints.read(given, ignored.append), ignored


def test_every_action_is_read() -> None:
    hints, ignored = read(
        envelope(
            action("kv.fetch", {"source_control_endpoint": "tcp://a:1", "block_hashes": [1], "mode": "copy"}),
            action("kv.prefetch"),
            action("kv.pin", {"ttl": 60, "start": 32, "end": 128}),
            action("kv.demote", {"start": 16}, version="1.7"),
            action("kv.share"),
            action("kv.retain", {"scope": "s", "directives": [{"start": 0, "end": 64, "priority": 80}]}),
        )
    )
    assert ignored == []
    assert hints.commands == (
        Command("prefetch"),
        Command("pin", TokenRange(32, 128), 60.0),
        Command("demote", TokenRange(16)),
    )
    assert (hints.fetches, hints.shares, hints.releases) == (True, True, False)
    assert [hints.priority(token, 100, "normal") for token in (0, 63, 64, 200)] == ["high"] * 4
    assert read(None) == (kv_hints.NONE, [])


def test_structures_of_engines_are_read_like_json() -> None:
    given = envelope(action("kv.pin", {"ttl": 1.5}))
    structure = SimpleNamespace(**{**given, "actions": [SimpleNamespace(**given["actions"][0])]})
    assert read(structure) == read(given) == (Hints(commands=(Command("pin", TokenRange(), 1.5),)), [])


def test_directives_decide_the_class_of_the_blocks_that_begin_in_their_range() -> None:
    directives = [
        {"covers_output": True, "priority": 0, "duration": 5},
        {"start": 32, "end": 64, "priority": 10},
        {"start": 0, "end": 16, "priority": 90, "duration": None},
    ]
    hints, ignored = read(envelope(action("kv.retain", {"directives": directives})))
    assert ignored == []
    classes = [hints.priority(token, 96, "normal") for token in (0, 16, 32, 48, 64, 96, 500)]
    assert classes == ["high", "normal", "high", "high", "normal", "low", "low"]
    assert hints.commands == (), "without a duration, or with priority 0, nothing is pinned"
    released, _ = read(envelope(action("kv.fetch", {"no_retain": True})))
    assert released.priority(0, 96, "high") == "low"


def test_directives_with_a_duration_pin_their_blocks_for_that_time() -> None:
    directives = [
        {"start": 0, "end": 32, "priority": 90, "duration": 60},
        {"start": 32, "end": 64, "priority": 50, "duration": DURATION_MAX_S},
        {"start": 64, "priority": 40, "duration": 0},
        {"covers_output": True, "priority": 30, "duration": 1.5},
    ]
    hints, ignored = read(envelope(action("kv.retain", {"directives": directives}), action("kv.share")))
    assert ignored == []
    assert hints.commands == (
        Command("pin", TokenRange(0, 32), 60.0, retains=True),
        Command("pin", TokenRange(32, 64), RETAIN_MAX_S, retains=True),
        Command("pin", TokenRange(), 1.5, retains=True, covers_output=True),
    )
    *_, output = hints.commands
    assert [command.blocks(16, 10, 100) for command in (hints.commands[1], output)] == [(2, 4), (7, 10)]
    assert hints.priority(0, 100, "low") == "high", "that of kv.share"
    alone, _ = read(envelope(action("kv.retain", {"directives": directives})))
    classes = [alone.priority(token, 100, "normal") for token in (0, 40, 64, 100)]
    assert classes == ["high", "high", "normal", "normal"], "the class stays if an agent refuses the pin"


def test_adjacent_directives_of_one_duration_are_one_pin() -> None:
    directives = [{"start": 16 * at, "end": 16 * at + 16, "priority": 9, "duration": 5} for at in range(28, 128)]
    directives += [{"covers_output": True, "priority": 0}, {"start": 2000, "end": 2040, "priority": 9, "duration": 5}]
    hints, ignored = read(envelope(action("kv.retain", {"directives": directives})))
    assert (hints.commands, ignored) == ((Command("pin", TokenRange(448, 2048), 5.0, retains=True),), [])
    apart = [{"start": at, "end": at + 8, "priority": 1, "duration": 5} for at in (0, 16)]
    open_ends = [{"start": 8, "priority": 1, "duration": 5}, {"start": 32, "end": 64, "priority": 1, "duration": 5}]
    for given, ranges in ((apart, [TokenRange(0, 8), TokenRange(16, 24)]), (open_ends, [TokenRange(8)])):
        hints, _ = read(envelope(action("kv.retain", {"directives": given})))
        assert [command.tokens for command in hints.commands] == ranges


def test_pins_of_directives_are_limited_and_the_others_keep_their_class() -> None:
    directives = [{"start": 32 * at, "end": 32 * at + 16, "priority": 1, "duration": 5} for at in range(40)]
    halves = [action("kv.retain", {"directives": directives[at : at + 20]}) for at in (0, 20)]
    hints, ignored = read(envelope(*halves, action("kv.pin", {"ttl": 1})))
    assert [command.tokens.start for command in hints.commands] == [*range(0, 32 * RETAIN_PINS_MAX, 32), 0]
    assert len(ignored) == 40 - RETAIN_PINS_MAX
    assert "at most 16" in ignored[0]
    assert hints.priority(32 * 39, 2000, "normal") == "high"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("text", "protocol_version"),
        (envelope(protocol_version="0.2"), "unknown protocol_version '0.2'"),
        (envelope(protocol_version=1), "protocol_version"),
        (envelope(message_id=None), "message_id"),
        (envelope(actions={}), "actions"),
        (envelope(*[action("kv.share")] * (ACTIONS_MAX + 1)), "actions"),
    ],
)
def test_an_invalid_envelope_is_ignored_as_a_whole(given: Any, words: str) -> None:
    hints, (reason,) = read(given)
    assert hints == kv_hints.NONE
    assert words in reason


BAD_TIMES = [0, -1.0, float("nan"), float("inf"), 10**400, 8 * 86_400.0, True, "60", None]


@pytest.mark.parametrize(
    "bad",
    [
        7,
        action("kv.steal"),
        action("kv.pin", {"ttl": 1}, version="2.0"),
        action("kv.pin", {"ttl": 1}, name=""),
        action("kv.pin", {"ttl": 1}, name="x" * 513),
        action("kv.pin", {"ttl": 1, "tier": "CPU"}),
        action("kv.pin", {"ttl": 1, "start": 8, "end": 8}),
        action("kv.pin", {"ttl": 1, "start": -1}),
        action("kv.pin", {"ttl": 1, "end": 1 << 60}),
        action("kv.pin", {"ttl": 1, "start": True}),
        {**action("kv.pin"), "payload": [1]},
        action("kv.share", {"to": "b"}),
        action("kv.fetch", {"mode": "move"}),
        action("kv.fetch", {"no_retain": "yes"}),
        action("kv.retain"),
        action("kv.retain", {"directives": {}}),
        action("kv.retain", {"directives": [7]}),
        action("kv.retain", {"scope": 7, "directives": []}),
        action("kv.retain", {"directives": [{"start": 0, "end": 9}]}),
        action("kv.retain", {"directives": [{"priority": 101}]}),
        action("kv.retain", {"directives": [{"priority": 1, "bogus": 1}]}),
        action("kv.retain", {"directives": [{"covers_output": True, "start": 0, "priority": 1}]}),
        action("kv.retain", {"directives": [{"priority": 1}] * (DIRECTIVES_MAX + 1)}),
        action("kv.retain", {"directives": [{"end": 9, "priority": 1}, {"start": 9, "priority": 2}]}),
        *[action("kv.pin", {"ttl": time}) for time in BAD_TIMES],
        *[action("kv.retain", {"directives": [{"priority": 1, "duration": time}]}) for time in (-1, float("nan"), 1e9)],
    ],
)
def test_an_invalid_action_is_ignored_and_the_others_are_executed(bad: Any) -> None:
    hints, ignored = read(envelope(bad, action("kv.share")))
    assert hints == Hints(shares=True)
    assert len(ignored) == 1
    assert len(ignored[0]) < 400


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [
        (TokenRange(), (0, 10)),
        (TokenRange(1), (1, 10)),
        (TokenRange(16, 48), (1, 3)),
        (TokenRange(17, 47), (2, 2)),
        (TokenRange(0, 15), (0, 0)),
        (TokenRange(1000), (10, 10)),
        (TokenRange(0, 1000), (0, 10)),
    ],
)
def test_ranges_cover_whole_blocks(tokens: TokenRange, blocks: tuple[int, int]) -> None:
    assert tokens.blocks(16, 10) == blocks
