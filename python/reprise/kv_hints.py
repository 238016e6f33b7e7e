"""KV hints of an orchestrator: the versioned envelope of vLLM and SGLang (``KvHintsEnvelope``), and its actions.

```text
{"protocol_version": "0.1", "message_id": "m", "actions": [
    {"action_id": "a", "action_type": "kv.pin", "action_version": "1.0", "payload": {"ttl": 600, "start": 0, "end": 4096}}]}
```

| action | payload | meaning |
|---|---|---|
| ``kv.fetch`` | that of the field; ``no_retain`` | the request's blocks are loaded, even where computing them seems faster |
| ``kv.prefetch`` | ``start``, ``end`` | the prompt's blocks are read from devices into DRAM when the request arrives |
| ``kv.pin`` | ``ttl``; ``start``, ``end`` | the request's blocks are not evicted for a time |
| ``kv.retain`` | ``directives`` of ``start``, ``end``, ``priority``, ``duration``, ``covers_output`` | class of the saved blocks, and a pin |
| ``kv.demote`` | ``start``, ``end`` | copies in DRAM are dropped when the request has ended and its blocks are on a device |
| ``kv.share`` | none | all blocks are saved, also those of generated tokens, in the class of shared prefixes |

A directive with a priority above 0 gives its blocks the class ``high``. With a ``duration``, it also pins them for that time.
The class stays, also if an agent refuses the pin. Pins of adjacent ranges for the same time are one command.

``start`` and ``end`` are positions of tokens; only whole blocks within them count. Hints are advice: an envelope of an
unknown version, and an action that is unknown or has an invalid payload, is ignored with a message. Other actions of its
envelope are executed. A hint never changes an answer of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Priority: TypeAlias = Literal["low", "normal", "high"]

CommandName: TypeAlias = Literal["pin", "prefetch", "demote"]

PROTOCOL_VERSION = "0.1"
"""Version of the envelope."""

ACTION_MAJOR = "1"
"""Major version of all actions; minor versions only add names."""

ACTIONS_MAX = 16
"""Maximum number of actions of an envelope."""

DIRECTIVES_MAX = 128
"""Maximum number of directives of an envelope."""

RETAIN_PINS_MAX = 16
"""Maximum number of pins of its directives: all requests of an engine share one queue of commands. Other directives only set
the class."""

ID_MAX = 512
"""Maximum length of an action's id."""

POSITION_MAX = 1 << 40
"""Largest position of a token."""

TTL_MIN_S, TTL_MAX_S = 0.001, 7 * 86_400.0
"""Range of a pin's time; an agent may allow less (``retention.ttl_max``)."""

DURATION_MAX_S = 30 * 86_400.0
"""Longest duration of a directive."""

RETAIN_MAX_S = 86_400.0
"""Longest time for which a directive pins blocks, the default limit of an agent; longer durations are sent as this time."""

PRIORITY_MAX = 100
"""Largest priority of a directive; 0 releases the blocks, all others protect them."""

SHOWN = 100
"""Maximum number of characters of a value in a message."""


class InvalidHintError(ValueError):
    """A part of an envelope is invalid; the message has the expected value."""


@dataclass(frozen=True)
class TokenRange:
    """Positions of tokens."""

    start: int = 0
    end: int | None = None
    """Position after the last one; None: the end of the request."""

    def blocks(self, block_tokens: int, count: int) -> tuple[int, int]:
        """Returns the first of the blocks within these positions, and the one after the last, of ``count`` blocks."""
        first = -(-self.start // block_tokens)
        end = count if self.end is None else min(self.end // block_tokens, count)
        return min(first, end), end


@dataclass(frozen=True)
class Directive:
    """Class of the blocks that begin within a range of tokens."""

    priority: Priority | None
    """None: the class that they have without it, because its time has ended."""
    tokens: TokenRange = TokenRange()
    covers_output: bool = False
    """Whether the range is that of the generated tokens."""

    def covers(self, token: int, prompt_tokens: int) -> bool:
        """Returns whether a block that begins with this token is in the range."""
        if self.covers_output:
            return token >= prompt_tokens
        return self.tokens.start <= token and (self.tokens.end is None or token < self.tokens.end)


@dataclass(frozen=True)
class Command:
    """Change of blocks on this node."""

    action: CommandName
    tokens: TokenRange = TokenRange()
    ttl: float | None = None
    """Seconds of a pin."""
    retains: bool = False
    """Whether it is a pin of ``kv.retain``, which a request may refuse."""
    covers_output: bool = False
    """Whether the range is that of the generated tokens."""

    def blocks(self, block_tokens: int, count: int, prompt_tokens: int) -> tuple[int, int]:
        """Returns the first of its blocks, and the one after the last, of the ``count`` blocks of a request."""
        tokens = TokenRange(prompt_tokens) if self.covers_output else self.tokens
        return tokens.blocks(block_tokens, count)


@dataclass(frozen=True)
class Hints:
    """Valid actions of one request."""

    commands: tuple[Command, ...] = ()
    directives: tuple[Directive, ...] = ()
    fetches: bool = False
    """Whether found blocks are loaded even where computing them is expected to be faster."""
    releases: bool = False
    """Whether its blocks are evicted first."""
    shares: bool = False
    """Whether all of its blocks are saved for other engines."""

    def priority(self, token: int, prompt_tokens: int, otherwise: Priority) -> Priority:
        """Returns the class of the block that begins with a token; the first directive that covers it decides."""
        for directive in self.directives:
            if directive.covers(token, prompt_tokens):
                if directive.priority is None:
                    break
                return directive.priority
        if self.releases:
            return "low"
        return "high" if self.shares else otherwise


NONE = Hints()
"""No hints."""


def read(envelope: Any, ignore: Callable[[str], None]) -> Hints:
    """Reads an envelope: a mapping as in JSON, or the structure of vLLM or SGLang.

    Args:
        envelope: the envelope; None: no hints.
        ignore: called with the reason for each part that is ignored.
    """
    if envelope is None:
        return NONE
    try:
        actions = _actions(envelope)
    except InvalidHintError as error:
        ignore(str(error))
        return NONE
    reader = _Reader(ignore)
    for action in actions:
        try:
            reader.add(action)
        except InvalidHintError as error:
            ignore(str(error))
    return Hints(
        commands=tuple(reader.commands),
        directives=tuple(reader.directives),
        fetches=reader.fetches,
        releases=reader.releases,
        shares=reader.shares,
    )


@dataclass
class _Reader:
    """Collects the valid actions of one envelope."""

    ignore: Callable[[str], None]
    commands: list[Command] = field(default_factory=list)
    directives: list[Directive] = field(default_factory=list)
    fetches: bool = False
    releases: bool = False
    shares: bool = False

    def add(self, action: Any) -> None:
        """Adds an action.

        Raises:
            InvalidHintError: the action is unknown or invalid; nothing of it was added.
        """
        name, version = _text(action, "action_type"), _text(action, "action_version")
        if not 0 < len(_text(action, "action_id")) <= ID_MAX:
            raise InvalidHintError(f"invalid action_id: expected 1 to {ID_MAX} characters")
        if name not in PAYLOADS:
            raise InvalidHintError(f"unknown action {name[:SHOWN]!r}: expected one of {', '.join(PAYLOADS)}")
        if version.partition(".")[0] != ACTION_MAJOR:
            raise InvalidHintError(f"unknown version {version[:SHOWN]!r} of {name}: expected {ACTION_MAJOR}.0")
        payload = _get(action, "payload")
        payload = {} if payload is None else payload
        if not isinstance(payload, Mapping):
            raise InvalidHintError(f"invalid payload of {name}: expected an object")
        _check_names(name, payload, PAYLOADS[name])
        match name:
            case "kv.fetch":
                if payload.get("mode", "copy") != "copy":
                    raise InvalidHintError('invalid mode of kv.fetch: expected "copy"')
                self.releases |= _flag(name, payload, "no_retain")
                self.fetches = True
            case "kv.share":
                self.shares = True
            case "kv.retain":
                self._retain(payload)
            case "kv.pin":
                ttl = _seconds(name, payload, "ttl", (TTL_MIN_S, TTL_MAX_S))
                self.commands.append(Command("pin", _tokens(name, payload), ttl))
            case "kv.prefetch":
                self.commands.append(Command("prefetch", _tokens(name, payload)))
            case _:
                self.commands.append(Command("demote", _tokens(name, payload)))

    def _retain(self, payload: Mapping[str, Any]) -> None:
        name = "kv.retain"
        scope, raw = payload.get("scope"), payload.get("directives")
        if scope is not None and not isinstance(scope, str):
            raise InvalidHintError(f"invalid scope of {name}: expected a string")
        room = DIRECTIVES_MAX - len(self.directives)
        if not isinstance(raw, list) or len(raw) > room:
            raise InvalidHintError(f"invalid directives of {name}: expected a list, at most {DIRECTIVES_MAX} in total")
        read_ones = [_directive(name, directive) for directive in raw]
        order = sorted(read_ones, key=lambda one: (one[0].covers_output, one[0].tokens.start))
        priorities = [priority for _, priority, _ in order]
        if priorities != sorted(priorities, reverse=True):
            # A block is only found if all blocks before it are.
            raise InvalidHintError(
                f"invalid directives of {name}: expected priorities that do not increase with the position"
            )
        self.directives += [directive for directive, _, _ in order]
        pins = _pins([(directive, pin_s) for directive, _, pin_s in order if pin_s is not None])
        room = RETAIN_PINS_MAX - sum(command.retains for command in self.commands)
        self.commands += pins[:room]
        for _ in pins[room:]:
            self.ignore(f"a pin of {name}: expected at most {RETAIN_PINS_MAX} for a request")


RANGE = frozenset({"start", "end"})

PAYLOADS: dict[str, frozenset[str]] = {
    # The agents know the places of blocks, so the source and the hashes of the field are not needed.
    "kv.fetch": frozenset({"source_control_endpoint", "block_hashes", "mode", "no_retain"}),
    "kv.prefetch": RANGE,
    "kv.pin": RANGE | {"ttl"},
    "kv.retain": frozenset({"scope", "directives"}),
    "kv.demote": RANGE,
    "kv.share": frozenset(),
}
"""Names in the payload of each action."""

DIRECTIVE = RANGE | {"priority", "duration", "covers_output"}
"""Names of a directive of ``kv.retain``."""


def _actions(envelope: Any) -> list[Any]:
    version = _text(envelope, "protocol_version")
    if version != PROTOCOL_VERSION:
        raise InvalidHintError(f"unknown protocol_version {version[:SHOWN]!r}: expected {PROTOCOL_VERSION!r}")
    _text(envelope, "message_id")
    actions = _get(envelope, "actions")
    if not isinstance(actions, list) or len(actions) > ACTIONS_MAX:
        raise InvalidHintError(f"invalid actions: expected a list of at most {ACTIONS_MAX}")
    return actions


def _get(part: Any, name: str) -> Any:
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)


def _text(part: Any, name: str) -> str:
    value = _get(part, name)
    if not isinstance(value, str):
        raise InvalidHintError(f"invalid {name} {str(value)[:SHOWN]!r}: expected a string")
    return value


def _check_names(where: str, given: Mapping[Any, Any], known: frozenset[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        expected = f"expected {', '.join(sorted(known))}" if known else "expected an empty object"
        raise InvalidHintError(f"unknown name {str(unknown[0])[:SHOWN]!r} in {where}: {expected}")


def _flag(where: str, given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise InvalidHintError(f"invalid {name} of {where}: expected true or false")
    return value


def _whole(where: str, given: Mapping[str, Any], name: str, most: int) -> int:
    value = given.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise InvalidHintError(f"invalid {name} of {where}: expected 0 to {most}")
    return value


def _seconds(where: str, given: Mapping[str, Any], name: str, limits: tuple[float, float]) -> float:
    value = given.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # The comparison is false for NaN, and integers may be too large for a float.
    if not is_number or not limits[0] <= value <= limits[1] or not math.isfinite(value):
        raise InvalidHintError(f"invalid {name} of {where}: expected {limits[0]:g} to {limits[1]:g} seconds")
    return float(value)


def _tokens(where: str, given: Mapping[str, Any]) -> TokenRange:
    start = _whole(where, given, "start", POSITION_MAX) if "start" in given else 0
    end = _whole(where, given, "end", POSITION_MAX) if given.get("end") is not None else None
    if end is not None and end <= start:
        raise InvalidHintError(f"invalid end of {where}: expected more than start")
    return TokenRange(start, end)


def _pins(directives: list[tuple[Directive, float]]) -> list[Command]:
    """Returns the pins of directives in the order of their ranges, with their seconds: one for adjacent equal ones."""
    pins: list[Command] = []
    for directive, seconds in directives:
        tokens, covers_output = directive.tokens, directive.covers_output
        if pins and (pins[-1].ttl, pins[-1].covers_output) == (seconds, covers_output):
            before = pins[-1].tokens
            if before.end is None or tokens.start <= before.end:
                end = None if before.end is None or tokens.end is None else max(before.end, tokens.end)
                tokens = TokenRange(before.start, end)
                pins.pop()
        pins.append(Command("pin", tokens, seconds, retains=True, covers_output=covers_output))
    return pins


def _directive(where: str, given: Any) -> tuple[Directive, int, float | None]:
    """Returns a directive, its number, and the seconds for which it pins its blocks."""
    if not isinstance(given, Mapping):
        raise InvalidHintError(f"invalid directive of {where}: expected an object")
    _check_names(where, given, DIRECTIVE)
    number = _whole(where, given, "priority", PRIORITY_MAX)
    priority: Priority | None = "high" if number else "low"
    pin_s = None
    if given.get("duration") is not None:
        duration = _seconds(where, given, "duration", (0.0, DURATION_MAX_S))
        if number and duration < TTL_MIN_S:
            priority = None
        elif number:
            pin_s = min(duration, RETAIN_MAX_S)
    covers_output = _flag(where, given, "covers_output")
    if covers_output and not RANGE.isdisjoint(given):
        raise InvalidHintError(f"invalid directive of {where}: covers_output has no start and no end")
    return Directive(priority, _tokens(where, given), covers_output), number, pin_s
