"""The order of an engine's queue in hints, and when hints are sent, with a session whose answers the test sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from reprise import AgentLost, Source
from reprise.lookahead import (
    BEGUN_CHANGED_S,
    BEGUN_INTERVAL_S,
    BEGUN_KEYS_MAX,
    BEGUN_KEYS_PER_HINT,
    BEGUN_REQUESTS_MAX,
    COST_SHARE,
    FAILED_PAUSE_S,
    INTERVAL_S,
    KEY_BYTES,
    KEYS_MAX,
    REQUEST_KEYS_MAX,
    REQUESTS_MAX,
    WINDOW_MIN,
    Lookahead,
    Queue,
    blocks_ahead,
)

STEP_S = 0.02


@dataclass
class FakeReport:
    """Answer of an agent."""

    window: int = WINDOW_MIN
    ignored: int = 0


@dataclass
class FakePending:
    """A hint that is answered when the test allows it."""

    session: FakeSession

    def poll(self) -> FakeReport | None:
        if self.session.error is not None:
            raise self.session.error
        return FakeReport(self.session.window, self.session.ignored) if self.session.answers else None


@dataclass
class BegunAgent:
    """What an agent does with lists of requests that have begun (docs/PROTOCOL.md, "Lookahead")."""

    known: dict[int, bytes] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    """Requests that a list omitted."""

    def answer(self, begun: list[tuple[int, bool, int, bytes]] | None) -> int:
        """Applies a list; returns the number of requests that are ignored."""
        if begun is None:
            return 0
        assert len(begun) <= BEGUN_REQUESTS_MAX
        assert sum(len(keys) for *_, keys in begun) <= BEGUN_KEYS_PER_HINT * KEY_BYTES
        named = {number for number, *_ in begun}
        self.ended += [number for number in self.known if number not in named]
        self.known = {number: keys for number, keys in self.known.items() if number in named}
        return sum(not self.is_applied(number, first * KEY_BYTES, keys) for number, _, first, keys in begun)

    def is_applied(self, number: int, first: int, keys: bytes) -> bool:
        known = self.known.get(number, b"")
        if first > len(known) or not (known or keys):
            return False
        if not known[first:].startswith(keys):
            self.known[number] = known[:first] + keys
        assert sum(len(keys) for keys in self.known.values()) <= BEGUN_KEYS_MAX * KEY_BYTES
        return True


@dataclass
class FakeSession:
    """A session that records hints."""

    connected: bool = True
    suspected: bool = False
    sessions: int = 1
    answers: bool = True
    window: int = WINDOW_MIN
    ignored: int = 0
    error: Exception | None = None
    hints: list[tuple[float, list[tuple[int, int, float, bytes]], list[int]]] = field(default_factory=list)
    begun: list[list[tuple[int, bool, int, bytes]] | None] = field(default_factory=list)
    agent: BegunAgent | None = None
    """Decides which requests are ignored; without it, the test does."""

    def start_lookahead(
        self, iteration: float, requests: Any, cancelled: Any = (), all_ranks: bool = False, begun: Any = None
    ) -> FakePending:
        self.hints.append((iteration, list(requests), list(cancelled)))
        self.begun.append(begun)
        if self.agent is not None:
            self.ignored = self.agent.answer(begun)
        return FakePending(self)


@dataclass
class Engine:
    """Hints of an engine whose time the test advances."""

    session: FakeSession = field(default_factory=FakeSession)
    keys: dict[str, bytes] = field(default_factory=dict)
    asked_near: list[str] = field(default_factory=list)
    time: float = 100.0
    cost: float = 0.0
    hints: Any = None

    def __post_init__(self) -> None:
        self.hints = Lookahead(self.session, self.keys_of, now=lambda: self.time)  # type: ignore[arg-type]

    def keys_of(self, request_id: str, is_near: bool) -> bytes:
        self.time += self.cost
        if is_near:
            self.asked_near.append(request_id)
        return self.keys.get(request_id, b"")

    def arrive(self, *names: str) -> None:
        for name in names:
            self.keys[name] = name.encode().ljust(KEY_BYTES)
            self.hints.arrived(name)

    def step(self, *computing: str, seconds: float = STEP_S, is_idle: bool = False) -> None:
        self.time += seconds
        self.hints.step(computing, is_idle=is_idle)

    def listed(self) -> list[tuple[int, int, bytes]]:
        """Numbers, iterations and keys of the last hint."""
        return [(number, iterations, keys.strip()) for number, iterations, _, keys in self.session.hints[-1][1]]


def test_blocks_of_this_node_are_listed_if_one_is_on_a_device() -> None:
    dram, nvme, peer = Source.OWN_DRAM, Source.OWN_NVME, Source.PEER_NVME
    for sources, wanted in (
        ([], 0),
        ([dram, dram], 0),
        ([dram, nvme, dram], 3),
        ([nvme, peer, nvme], 1),
        ([dram, peer, nvme], 0),
    ):
        assert blocks_ahead(sources) == wanted, sources


def test_waiting_requests_run_in_the_order_of_their_arrival() -> None:
    queue = Queue()
    for name in "abc":
        queue.arrived(name)
    queue.begun("a")
    assert [waiting.request_id for waiting in queue.head(9)] == ["b", "c"]
    assert [waiting.request_id for waiting in queue.head(1)] == ["b"]


def test_preempted_requests_run_first_under_a_new_number() -> None:
    queue = Queue()
    for name in "abcd":
        queue.arrived(name)
    queue.begun("ab")
    former = {queue.preempted("b"), queue.preempted("a")}
    assert [waiting.request_id for waiting in queue.head(9)] == ["a", "b", "c", "d"]
    assert former.isdisjoint(waiting.number for waiting in queue.waiting.values())
    assert queue.preempted("c") is None, "it waits already"


def test_requests_with_a_rank_run_in_its_order_even_after_a_preemption() -> None:
    queue = Queue()
    queue.arrived("late", (1, 5.0))
    queue.arrived("urgent", (0, 9.0))
    queue.arrived("early", (1, 2.0))
    assert [waiting.request_id for waiting in queue.head(9)] == ["urgent", "early", "late"]
    queue.begun(["late"])
    queue.preempted("late")
    assert [waiting.request_id for waiting in queue.head(9)] == ["urgent", "early", "late"]


def test_expected_iterations_grow_with_the_place_and_the_time_between_starts() -> None:
    queue = Queue()
    assert [queue.iterations(place, WINDOW_MIN) for place in range(3)] == [1, 2, 3]
    for iteration in range(1000):
        queue.iterated(1 if iteration % 10 == 9 else 0)
    assert queue.between_starts == pytest.approx(10, rel=1e-3)
    queue.between_starts = 10.0
    assert [queue.iterations(place, 64) for place in range(3)] == [6, 16, 26]
    assert queue.iterations(0, WINDOW_MIN) == WINDOW_MIN, "the first request is within the window"


def test_several_starts_in_each_iteration_have_the_same_expected_iteration() -> None:
    queue = Queue()
    for _ in range(1000):
        queue.iterated(4)
    assert [queue.iterations(place, WINDOW_MIN) for place in range(8)] == [1, 1, 1, 1, 2, 2, 2, 2]


def test_an_engine_without_a_queue_sends_nothing() -> None:
    engine = Engine()
    engine.arrive("a")
    for _ in range(10):
        engine.step("a")
    engine.hints.finished("a")
    engine.step(is_idle=True)
    assert engine.session.hints == []


def test_keys_travel_once_and_a_request_that_has_begun_is_missing() -> None:
    engine = Engine()
    engine.arrive("a", "b", "c")
    engine.step("a")
    engine.step("a")
    assert engine.listed() == [(2, 1, b"b"), (3, 2, b"c")]
    assert engine.session.hints[-1][0] == pytest.approx(STEP_S)
    engine.step("a")
    assert [(number, keys) for number, _, keys in engine.listed()] == [(2, b""), (3, b"")]
    engine.step("a", "b", "c")
    assert engine.session.hints[-1][1:] == ([], []), "the agent learns that all have begun"
    engine.step("a", "b", "c")
    assert len(engine.session.hints) == 3


def test_keys_travel_again_while_the_agent_ignores_requests() -> None:
    engine = Engine()
    engine.arrive("a", "b", "c")
    engine.session.ignored = 1
    for _ in range(3):
        engine.step("a")
    assert [keys for _, _, keys in engine.listed()] == [b"b", b"c"], "the agent had no room for one of them"
    engine.session.ignored = 0
    for _ in range(2):
        engine.step("a")
    assert [keys for _, _, keys in engine.listed()] == [b"", b""]


def test_requests_without_blocks_on_devices_count_as_places_of_the_queue_only() -> None:
    engine = Engine()
    engine.arrive("a", "b", "c")
    engine.keys["b"] = b""
    engine.step("a")
    engine.step("a")
    assert engine.listed() == [(3, 2, b"c")]


def test_a_listed_request_stays_listed_when_its_blocks_have_reached_dram() -> None:
    engine = Engine()
    engine.arrive("a", "b")
    engine.step("a")
    engine.step("a")
    engine.keys["b"] = b""
    engine.step("a")
    assert [(number, keys) for number, _, keys in engine.listed()] == [(2, b"")]
    engine.keys["b"] = b"more".ljust(KEY_BYTES)
    engine.step("a")
    assert [(number, keys) for number, _, keys in engine.listed()] == [(2, b"more")]


def test_preempted_and_finished_requests_are_cancelled() -> None:
    engine = Engine()
    engine.arrive("a", "b", "c")
    engine.step("a")
    engine.step("a")
    engine.hints.finished("c")
    engine.step("a")
    assert engine.session.hints[-1][2] == [3]
    engine.step("a", "b")
    engine.hints.preempted(["b"])
    engine.step("a")
    assert engine.session.hints[-1][2] == [2]
    assert [(number, keys) for number, _, keys in engine.listed()] == [(4, b"b")], "a new number, with keys"
    engine.hints.finished("a")
    engine.step("b")
    assert engine.session.hints[-1][2] == [], "it was never hinted"


def test_time_without_computation_is_not_part_of_an_iteration() -> None:
    engine = Engine()
    engine.arrive("a")
    engine.step("a")
    engine.hints.finished("a")
    engine.arrive("b", "c")
    engine.step("b", seconds=50.0)
    assert engine.session.hints == [], "no iteration was measured"
    engine.step("b")
    assert engine.session.hints[-1][0] == pytest.approx(STEP_S)
    engine.step(is_idle=True)
    engine.step(seconds=30.0, is_idle=True)
    assert engine.session.hints[-1][0] == pytest.approx(STEP_S), "idle steps repeat the last time"


def test_hints_are_limited_by_their_interval_and_their_cost() -> None:
    engine = Engine()
    engine.arrive("a", "b")
    engine.step("a")
    for _ in range(100):
        engine.step("a", seconds=INTERVAL_S / 10)
    assert len(engine.session.hints) == 10
    assert engine.session.hints[-1][0] == pytest.approx(INTERVAL_S / 10), "the mean since the last hint"
    engine.cost = 0.001
    engine.step("a")
    sent = len(engine.session.hints)
    began = engine.time
    while len(engine.session.hints) == sent:
        engine.step("a", seconds=0.001)
    assert engine.time - began >= COST_SHARE * engine.cost


def test_a_hint_waits_for_the_answer_to_the_last_one() -> None:
    engine = Engine(FakeSession(answers=False))
    engine.arrive("a", "b")
    for _ in range(10):
        engine.step("a")
    assert len(engine.session.hints) == 1
    engine.session.answers, engine.session.window = True, 9
    engine.step("a")
    assert len(engine.session.hints) == 2
    for _ in range(40):
        engine.step("a")
        engine.hints.queue.between_starts = 30.0
    assert engine.listed()[0][1] == 9, "the window of the agent's answer"


def test_only_requests_within_the_window_are_matched_again() -> None:
    engine = Engine()
    engine.arrive(*"abcdefgh")
    engine.step("a")
    engine.step("a")
    assert engine.asked_near == ["b", "c", "d", "e"]


def test_keys_are_sent_again_to_an_agent_that_has_restarted() -> None:
    engine = Engine()
    engine.arrive("a", "b")
    engine.step("a")
    engine.step("a")
    engine.session.error = AgentLost("restarted")
    engine.step("a")
    engine.session.error = None
    engine.session.sessions += 1
    engine.step("a")
    assert len(engine.session.hints) == 1, "a pause after a failure"
    engine.step("a", seconds=FAILED_PAUSE_S)
    assert [keys for _, _, keys in engine.listed()] == [b"b"]
    engine.session.sessions += 1
    engine.step("a")
    assert [keys for _, _, keys in engine.listed()] == [b"b"], "a new session without a failed hint"


def test_nothing_is_sent_to_an_agent_that_does_not_answer() -> None:
    engine = Engine(FakeSession(suspected=True))
    engine.arrive("a", "b")
    for _ in range(5):
        engine.step("a")
    engine.session.suspected, engine.session.connected = False, False
    engine.step("a", seconds=FAILED_PAUSE_S)
    assert (engine.session.hints, engine.asked_near) == ([], [])


def test_a_hint_respects_the_limits_of_the_agent() -> None:
    engine = Engine()
    names = [f"r{number}" for number in range(2 * REQUESTS_MAX)]
    engine.arrive("a", *names)
    engine.step("a")
    engine.step("a")
    assert len(engine.session.hints[-1][1]) == REQUESTS_MAX
    engine.keys["r0"] = engine.keys["r1"] = bytes(KEY_BYTES * (KEYS_MAX // 2))
    engine.step("a")
    assert [number for number, _, _ in engine.listed()] == [2, 3], "their keys fill the limit"
    engine.keys["r0"] = bytes(KEY_BYTES)
    engine.step("a")
    assert engine.listed()[2][2] == b"r2", "the agent has forgotten those that were not listed"


def test_a_request_with_too_many_keys_is_listed_with_its_first_blocks_and_hides_none() -> None:
    engine = Engine()
    engine.hints.ranks = 3
    engine.arrive("a", "long", "b", "c")
    engine.keys["long"] = bytes(range(1, 49)) * KEYS_MAX
    engine.step("a")
    engine.step("a")
    (_, _, long), (_, _, b), (_, _, c) = engine.listed()
    assert (b, c) == (b"b", b"c")
    assert len(long) == REQUEST_KEYS_MAX // 3 * 3 * KEY_BYTES, "whole blocks of three ranks"
    assert engine.keys["long"].startswith(long)
    engine.step("a")
    assert [keys for _, _, keys in engine.listed()] == [b"", b"", b""], "keys travel once"


def test_keys_of_a_shortened_request_do_not_travel_again_when_others_need_less_room() -> None:
    engine = Engine()
    engine.arrive("a", "b", "c")
    for name in "bc":
        engine.keys[name] = name.encode() * KEY_BYTES * (REQUEST_KEYS_MAX - 4)
    engine.arrive("d")
    engine.keys["d"] = b"d" * KEY_BYTES * 20
    engine.step("a")
    engine.step("a")
    assert len(engine.listed()[2][2]) == 8 * KEY_BYTES, "the rest of the limit"
    engine.keys["b"] = engine.keys["b"][: -2 * KEY_BYTES]
    engine.step("a")
    assert engine.listed()[2][2] == b""
    engine.step("a", "b")
    assert len(engine.listed()[1][2]) == 20 * KEY_BYTES, "there is room for all of it"


def test_keys_travel_again_ever_more_rarely_while_the_agent_ignores_requests() -> None:
    engine = Engine()
    engine.arrive("a", "b")
    engine.session.ignored = 1
    for _ in range(int(60 / STEP_S)):
        engine.step("a")
    with_keys = [any(keys for *_, keys in requests) for _, requests, _ in engine.session.hints]
    assert len(with_keys) > 1000
    assert 5 <= sum(with_keys) <= 8, "at once, then after 1, 2, 4, 8 and 16 seconds"
    engine.session.ignored = 0
    engine.step("a")
    engine.session.ignored = 1
    engine.step("a")
    assert engine.listed()[0][2] == b"b", "the first repetition does not wait"


def engine_with_begun(**blocks: bytes) -> Engine:
    """Returns an engine whose requests have these keys once they have begun, with a first iteration."""
    engine = Engine()
    engine.hints.blocks = lambda name, first: blocks.get(name, b"")[first * KEY_BYTES :]
    engine.step("warm")
    return engine


def keys_of_blocks(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(KEY_BYTES, "big") for number in numbers)


def test_requests_that_have_begun_are_listed_with_new_keys_only() -> None:
    blocks = {"a": keys_of_blocks(1, 2), "b": b""}
    engine = engine_with_begun()
    engine.hints.blocks = lambda name, first: blocks[name][first * KEY_BYTES :]
    engine.arrive("a", "b")
    engine.step("a", "b", seconds=2 * BEGUN_CHANGED_S)
    assert engine.session.begun[-1] == [(1, False, 0, keys_of_blocks(1, 2))], "b has no blocks yet"
    blocks["a"] += keys_of_blocks(3)
    blocks["b"] = keys_of_blocks(4)
    before = len(engine.session.begun)
    engine.step("a", "b", seconds=BEGUN_INTERVAL_S / 2)
    assert len(engine.session.begun) == before, "no request has changed"
    engine.step("a", "b", seconds=BEGUN_INTERVAL_S / 2)
    assert engine.session.begun[-1] == [(1, False, 2, keys_of_blocks(3)), (2, False, 0, keys_of_blocks(4))]
    engine.hints.preempted(["a"])
    engine.step("b", seconds=2 * BEGUN_CHANGED_S)
    assert engine.session.begun[-1] == [(1, True, 3, b""), (2, False, 1, b"")]
    engine.step("a", "b", seconds=2 * BEGUN_CHANGED_S)
    engine.hints.finished("b")
    engine.step("a", seconds=2 * BEGUN_CHANGED_S)
    assert engine.session.begun[-1] == [(1, False, 3, b"")]
    engine.hints.finished("a")
    engine.step("c", seconds=2 * BEGUN_CHANGED_S)
    assert engine.session.begun[-1] == [], "the last one has ended"
    before = len(engine.session.begun)
    engine.step("c", seconds=10.0)
    assert len(engine.session.begun) == before


def test_keys_of_begun_requests_travel_again_to_a_new_session_and_if_they_were_ignored() -> None:
    engine = engine_with_begun(a=keys_of_blocks(1, 2))
    engine.arrive("a")
    whole = [(1, False, 0, keys_of_blocks(1, 2))]
    engine.step("a", seconds=2 * BEGUN_CHANGED_S)
    assert engine.session.begun[-1] == whole
    engine.session.ignored = 1
    engine.step("a", seconds=BEGUN_INTERVAL_S)
    assert engine.session.begun[-1] == whole
    engine.session.ignored = 0
    engine.step("a", seconds=BEGUN_INTERVAL_S)
    assert engine.session.begun[-1] == [(1, False, 2, b"")]
    # On a busy engine, most hints list requests that wait only: their answers show nothing about the others.
    engine.session.ignored = 1
    engine.arrive("b")
    engine.step("a", seconds=BEGUN_CHANGED_S / 5)
    engine.session.ignored = 0
    lists = len(engine.session.begun)
    engine.step("a", seconds=BEGUN_CHANGED_S / 5)
    assert engine.session.begun[lists:] == [None]
    engine.step("a", seconds=BEGUN_CHANGED_S)
    assert engine.session.begun[-1] == whole, "within the pause of lists that have changed"
    engine.step("a", seconds=BEGUN_INTERVAL_S)
    assert engine.session.begun[-1] == [(1, False, 2, b"")]
    engine.session.sessions += 1
    engine.step("a", seconds=BEGUN_INTERVAL_S)
    assert engine.session.begun[-1] == whole


def test_keys_of_begun_requests_are_bounded_per_hint_and_in_total() -> None:
    names = [f"r{number}" for number in range(12)]
    engine = engine_with_begun(**{name: bytes(KEY_BYTES * 3_000) for name in names})
    engine.arrive(*names)
    while len(engine.session.begun) < 20:
        engine.step(*names, seconds=BEGUN_INTERVAL_S)
    sent = [sum(len(keys) for *_, keys in begun or ()) // KEY_BYTES for begun in engine.session.begun]
    assert (max(sent), sum(sent)) == (BEGUN_KEYS_PER_HINT, BEGUN_KEYS_MAX)


def engine_with_many(agent: BegunAgent) -> tuple[Engine, list[str], dict[str, bytes]]:
    """Returns an engine whose requests have 32,768 keys, all of which the agent has."""
    counts = {"long": 3 * BEGUN_KEYS_PER_HINT - 5, **{f"r{number}": 1_024 for number in range(20)}, "rest": 5}
    blocks, first = {}, 0
    for name, count in counts.items():
        blocks[name] = keys_of_blocks(*range(first, first + count))
        first += count
    assert first == BEGUN_KEYS_MAX
    engine = engine_with_begun(**blocks)
    engine.session.agent = agent
    names = [*counts]
    engine.arrive(*names)
    for _ in range(10):
        engine.step(*names, seconds=BEGUN_INTERVAL_S)
    assert [*agent.known.values()] == [*blocks.values()]
    return engine, names, blocks


@pytest.mark.parametrize("lost", ["all", "long", "r3", "tail"])
def test_keys_that_travel_again_end_no_request_that_the_agent_has(lost: str) -> None:
    agent = BegunAgent()
    engine, names, blocks = engine_with_many(agent)
    if lost == "all":
        agent.known.clear()
    elif lost == "tail":
        agent.known[1] = agent.known[1][:KEY_BYTES]
    else:
        del agent.known[1 + names.index(lost)]
    healthy = dict(agent.known)
    engine.step(*names, seconds=BEGUN_INTERVAL_S)
    assert engine.session.ignored > 0
    lists = len(engine.session.begun)
    for _ in range(BEGUN_KEYS_MAX // BEGUN_KEYS_PER_HINT):
        engine.step(*names, seconds=2 * BEGUN_CHANGED_S)
        assert all(agent.known[number].startswith(keys) for number, keys in healthy.items())
    assert len(engine.session.begun) == lists + BEGUN_KEYS_MAX // BEGUN_KEYS_PER_HINT
    assert agent.ended == []
    assert {number: agent.known[number] for number in range(1, len(names) + 1)} == {
        1 + place: blocks[name] for place, name in enumerate(names)
    }
    engine.step(*names, seconds=BEGUN_INTERVAL_S)
    assert (engine.session.ignored, any(keys for *_, keys in engine.session.begun[-1] or ())) == (0, False)


def test_a_request_beyond_the_limit_of_a_list_is_sent_when_others_have_finished() -> None:
    agent = BegunAgent()
    names = [f"r{number}" for number in range(BEGUN_REQUESTS_MAX + 1)]
    blocks = {name: keys_of_blocks(number) for number, name in enumerate(names)}
    late, blocks["r0"] = blocks["r0"], b""
    engine = engine_with_begun()
    engine.hints.blocks = lambda name, first: blocks[name][first * KEY_BYTES :]
    engine.session.agent = agent
    engine.arrive(*names)
    engine.step(*names, seconds=BEGUN_INTERVAL_S)
    last = len(names)
    assert (len(agent.known), agent.known[last]) == (BEGUN_REQUESTS_MAX, blocks[names[-1]])
    blocks["r0"] = late
    engine.step(*names, seconds=BEGUN_INTERVAL_S)
    assert agent.ended == [last], "the list has no place for it"
    engine.hints.finished("r1")
    engine.step(*[name for name in names if name != "r1"], seconds=BEGUN_INTERVAL_S)
    assert agent.known[last] == blocks[names[-1]]
    assert engine.session.ignored == 0


def test_blocks_that_are_replaced_travel_from_the_first_one_on() -> None:
    agent = BegunAgent()
    blocks = {"a": keys_of_blocks(1, 2, 3)}
    engine = engine_with_begun()
    engine.hints.blocks = lambda name, first: blocks[name][first * KEY_BYTES :]
    engine.session.agent = agent
    engine.arrive("a")
    engine.step("a", seconds=BEGUN_INTERVAL_S)
    blocks["a"] = keys_of_blocks(7, 8)
    engine.hints.replaced("a")
    engine.step("a", seconds=BEGUN_INTERVAL_S)
    assert agent.known == {1: keys_of_blocks(7, 8)}
