"""KV hints of requests: commands on blocks, classes of saved blocks, and loads that are not decided."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import readme
from cluster import Cluster
from engine import BLOCK_TOKENS, Engine
from engine_checks import PROMPT_BLOCKS, counters, prompt, serve_and_save
from faults import eventually, observer
from test_scheduler import TOKENS, FakeSession, blocks_of, ended, output, request, side
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request

from reprise import Source
from reprise.kv_hints import Command, TokenRange
from reprise.vllm import block_commands
from reprise.vllm.block_commands import BlockCommand, BlockCommands
from reprise.vllm.metrics import Stats
from reprise.vllm.request_params import RequestParams


def envelope(kind: str, **payload: Any) -> dict[str, Any]:
    """Returns an envelope of one action, as in JSON."""
    action = {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


def report(affected: int = 0, in_use: int = 0, over_limit: int = 0) -> Any:
    return SimpleNamespace(affected=affected, in_use=in_use, over_limit=over_limit, refused=in_use + over_limit)


@dataclass
class CommandSession(FakeSession):
    """A session that records commands and answers them at the second poll."""

    commands: list[tuple[str, int, float | None, bool]] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    def start_command(self, action: str, keys: bytes, *, ttl: float | None = None, all_ranks: bool = False) -> Any:
        if not self.connected:
            return None
        self.commands.append((action, len(keys) // 16, ttl, all_ranks))
        answer = self.answers.pop(0) if self.answers else report(len(keys) // 16)
        polls = [answer, None]
        return SimpleNamespace(poll=polls.pop)


def hinted(kind: str, blocks: int = 4, **payload: Any) -> Any:
    made = request(blocks)
    made.kv_transfer_params = {"kv_hints": envelope(kind, **payload)}
    return made


def stats_of(commands: BlockCommands) -> dict[str, Any]:
    stats = Stats()
    commands.take_counts(stats)
    return stats.data


def test_pins_apply_to_found_blocks_at_arrival_and_to_all_blocks_after_their_saves() -> None:
    session = CommandSession()
    scheduler = side(session)
    new_request = hinted("kv.pin", ttl=60, start=TOKENS)
    scheduler.begin(new_request)
    eventually(lambda: session.commands == [("pin", 3, 60.0, False)])
    (save,) = scheduler.step(output({"r": (0, 4 * TOKENS)}, {"r": [1, 2, 3, 4]})).saves
    scheduler.finish(new_request)
    scheduler.step(output({}, {}, finished={"r"}))
    time.sleep(0.05)
    assert len(session.commands) == 1, "the blocks are not saved yet"
    scheduler.handle_worker_output(ended(save.save_id))
    eventually(lambda: session.commands[1:] == [("pin", 3, 60.0, False)])
    scheduler._commands.close()


def test_prefetch_runs_at_arrival_and_demotion_at_the_end_for_all_ranks() -> None:
    session = CommandSession()
    scheduler = side(session, ranks=2)
    read_ahead, demoted = hinted("kv.prefetch"), hinted("kv.demote", end=2 * TOKENS)
    scheduler.begin(read_ahead)
    eventually(lambda: session.commands == [("prefetch", 8, None, True)])
    scheduler.finish(read_ahead)
    demoted.request_id = "other"
    scheduler.begin(demoted)
    scheduler.finish(demoted)
    eventually(lambda: session.commands[1:] == [("demote", 4, None, True)])
    scheduler._commands.close()


def test_hints_of_vllm_s_own_field_are_executed() -> None:
    session = CommandSession()
    scheduler = side(session)
    new_request = request(2)
    action = KvHintAction(action_id="a", action_type="kv.prefetch", action_version="1.0", payload={})
    new_request.kv_hints = KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=[action])
    scheduler.begin(new_request)
    eventually(lambda: session.commands == [("prefetch", 2, None, False)])
    scheduler._commands.close()


def test_the_http_request_of_the_guide_pins_its_blocks() -> None:
    """vLLM's own classes carry the hints from the body of a request to its scheduler."""
    body = json.loads(readme.hinted_request())
    completion = CompletionRequest.model_validate(body)
    message = {"messages": [{"role": "user", "content": body.pop("prompt")}]}
    chat = ChatCompletionRequest.model_validate({**body, **message})
    for params in (completion.to_sampling_params(1, {}), chat.to_sampling_params(1, {})):
        made = Request(request_id="r", prompt_token_ids=[1, 2], sampling_params=params, pooling_params=None)
        stats = Stats()
        hints = RequestParams.of(made, stats, by_priority=False).hints
        assert (hints.commands, stats.data) == ((Command("pin", TokenRange(), 600.0),), {})


def test_demotions_are_repeated_for_blocks_that_are_not_on_a_device_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_commands, "DEMOTE_PAUSE_S", 0.01)
    session = CommandSession(answers=[report(1, in_use=2), report(2)])
    commands = BlockCommands(session)  # type: ignore[arg-type]
    commands.submit(BlockCommand("demote", lambda first, end: bytes(16 * (end - first)), 0, 3))
    eventually(lambda: len(session.commands) == 2 and commands._counts["hint_blocks"] == 3)
    commands.close()
    assert stats_of(commands) == {"hint_blocks": 3}


def test_commands_beyond_a_limit_or_without_an_agent_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_commands, "KEYS_PER_MATCH", 4)
    session = CommandSession(answers=[report(1, over_limit=3)])
    commands = BlockCommands(session)  # type: ignore[arg-type]
    pin = BlockCommand("pin", lambda first, end: bytes(16 * (end - first)), 0, 6, ttl=1.0)
    commands.submit(pin)
    eventually(lambda: commands._counts["hint_blocks"] == 3)
    assert [count for _, count, *_ in session.commands] == [4, 2], "one message for each part"
    assert stats_of(commands) == {"hint_blocks": 3, "hint_refused_blocks": 3}
    session.connected = False
    commands.submit(pin)
    eventually(lambda: commands._counts["ignored_hints"] == 1)
    commands.close()


def test_a_flood_of_commands_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = BlockCommands(CommandSession())  # type: ignore[arg-type]
    monkeypatch.setattr(BlockCommands, "_run", lambda self: self._closed.wait())
    for _ in range(block_commands.QUEUED_MAX + 3):
        commands.submit(BlockCommand("prefetch", lambda first, end: b"", 0, 1))
    assert stats_of(commands) == {"ignored_hints": 3}
    commands.close()


def test_retained_blocks_are_saved_with_the_class_of_their_directive() -> None:
    scheduler = side(FakeSession())
    directives = [{"end": 2 * TOKENS, "priority": 50}, {"start": 3 * TOKENS, "priority": 0}]
    new_request = hinted("kv.retain", directives=directives)
    scheduler.matched_tokens(new_request, 0)
    saves = scheduler.step(output({"r": (0, 4 * TOKENS)}, {"r": [1, 2, 3, 4]})).saves
    assert [(save.blocks, save.position, save.priority) for save in saves] == [
        ((1, 2), 0, "high"),
        ((3,), 2, "normal"),
        ((4,), 3, "low"),
    ]
    assert [save.parent for save in saves] == [None, new_request.block_hashes[1], new_request.block_hashes[2]]
    new_request.kv_transfer_params["kv_no_retain"] = True
    other = side(FakeSession())
    other.matched_tokens(new_request, 0)
    (save,) = other.step(output({"r": (0, 4 * TOKENS)}, {"r": [1, 2, 3, 4]})).saves
    assert save.priority == "low", "the request's own parameter decides"


@pytest.mark.parametrize(("refuses", "pins"), [(False, [("pin", 2, 30.0)] * 2), (True, [])])
def test_blocks_that_are_retained_for_a_duration_are_pinned_after_their_save(refuses: bool, pins: list[Any]) -> None:
    session = CommandSession()
    scheduler = side(session)
    retained = hinted("kv.retain", directives=[{"end": 2 * TOKENS, "priority": 50, "duration": 30}])
    retained.kv_transfer_params["kv_no_retain"] = refuses
    scheduler.begin(retained)
    saves = scheduler.step(output({"r": (0, 4 * TOKENS)}, {"r": [1, 2, 3, 4]})).saves
    assert [save.priority for save in saves] == (["low"] if refuses else ["high", "normal"])
    scheduler.finish(retained)
    scheduler.step(output({}, {}, finished={"r"}))
    for save in saves:
        scheduler.handle_worker_output(ended(save.save_id))
    if pins:
        eventually(lambda: len(session.commands) == len(pins))
    assert [(action, count, ttl) for action, count, ttl, *_ in session.commands] == pins
    scheduler._commands.close()


def test_shared_requests_save_generated_tokens_too() -> None:
    generated = request(4)
    generated.num_prompt_tokens = 2 * TOKENS
    for params, blocks in ((None, (1, 2)), ({"kv_hint": envelope("kv.share")}, (1, 2, 3, 4))):
        scheduler = side(FakeSession(), save_decode_blocks=False)
        generated.kv_transfer_params = params
        scheduler.matched_tokens(generated, 0)
        (save,) = scheduler.step(output({"r": (0, 4 * TOKENS)}, {"r": [1, 2, 3, 4]})).saves
        assert (save.blocks, save.priority) == (blocks, "high" if params else "normal")


def test_fetched_blocks_are_loaded_even_where_computing_is_faster() -> None:
    for params, loaded in ((None, 0), ({"kv_hints": envelope("kv.fetch")}, 4 * TOKENS)):
        scheduler = side(FakeSession(answer=[Source.OWN_NVME] * 4))
        chooser = scheduler._chooser
        chooser.policy.observe_load([0, 4, 0, 0], [0, 4, 0, 0], 50.0)
        for _ in range(50):
            chooser.policy.observe_step(1000, 500.0, 1e-6)
        new_request = request(6)
        new_request.kv_transfer_params = params
        assert scheduler.matched_tokens(new_request, 0)[0] == loaded
        if loaded:
            scheduler.allocated(new_request, blocks_of(list(range(1, 7))), loaded)
            (load,) = scheduler.step(output({}, {})).loads
            assert load.limit is not None, "the wait is limited"


@pytest.mark.parametrize(
    "params",
    [
        {"kv_hints": 7},
        {"kv_hints": envelope("kv.pin", ttl=-1)},
        {"kv_hints": {**envelope("kv.share"), "protocol_version": "9"}},
        {"kv_hints": envelope("kv.share"), "kv_no_store": True},
    ],
)
def test_invalid_hints_are_counted_and_do_not_change_the_request(params: dict[str, Any]) -> None:
    scheduler = side(FakeSession(answer=[Source.OWN_DRAM] * 2))
    new_request = request(4)
    new_request.kv_transfer_params = params
    assert scheduler.matched_tokens(new_request, 0) == (2 * TOKENS, True)
    assert scheduler.stats.data["ignored_hints"] == 1


def test_hints_of_a_request_pin_and_demote_blocks_of_a_real_agent(engine: Engine, cluster: Cluster) -> None:
    tokens = prompt(400)
    serve_and_save(engine, tokens)
    first = engine.generate([tokens], params={"kv_hints": envelope("kv.pin", ttl=60)})
    before = counters(engine)

    def pinned(agent: Any) -> int:
        return int(agent.stats()["retention_pinned_blocks"])

    with observer(cluster.agents[0]) as agent:
        eventually(lambda: pinned(agent) >= PROMPT_BLOCKS)
        tail = {"kv_hints": envelope("kv.pin", ttl=0.05, start=0, end=PROMPT_BLOCKS * BLOCK_TOKENS)}
        assert engine.generate([tokens], params=tail)["tokens"] == first["tokens"]
        eventually(lambda: pinned(agent) == 0)
        bad = {"kv_hints": envelope("kv.pin", ttl=1, tier="CPU")}
        assert engine.generate([tokens], params=bad)["tokens"] == first["tokens"]
    after = counters(engine)
    assert after["ignored_hints"] == before["ignored_hints"] + 1
    assert after["hint_blocks"] >= before["hint_blocks"] + PROMPT_BLOCKS
