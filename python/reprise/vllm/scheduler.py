"""The scheduler's side: what is in Reprise, what to load, what to save.

Never waits longer than a small budget a step, and never for a save: blocks that are being saved are referenced in vLLM's
block pool, so that neither the end nor the preemption of their request gives them to somebody else.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reprise import Session, block_keys
from reprise.vllm.adapters import AdapterLook, Adapters
from reprise.vllm.asking import KEYS_PER_MATCH, Asker, Question
from reprise.vllm.events import KvEvents
from reprise.vllm.metadata import LoadPlan, RepriseMetadata, RepriseWorkerMetadata, SavePlan
from reprise.vllm.metrics import Stats
from reprise.vllm.ranks import RankSessions
from reprise.vllm.unproven import Unproven

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from reprise.vllm.geometry import Geometry
    from reprise.vllm.options import Options

ANSWER_KEPT_S = 0.5
"""How long an answer is believed when a request is asked about again, because vLLM had no room for it."""

ADAPTER_WAIT_S = 0.25
"""How long a request waits until its LoRA adapter is told from others; then it goes on without Reprise."""

SAVE_HOLDS_S = 0.25
"""A save that has taken longer is not waited for: vLLM preempts somebody instead. An agent without room takes its time."""

PINNED_SHARE = 4
"""At most one of so many blocks of vLLM's memory waits for its save; what is beyond that is saved in a later step of its request,
or left out."""


@dataclass
class Answer:
    """Leading blocks of a request that Reprise has, by their sources."""

    sources: Sequence[int]
    at: float


@dataclass
class RequestState:
    """What is known of one request."""

    request: Request
    question: Question | None = None
    asked: int = 0
    """Blocks that it is about: a part of a long prompt."""
    looked: bool = False
    """Whether its answer was looked for."""
    found: list[int] = field(default_factory=list)
    """Sources of the parts before it, all of whose blocks are there."""
    answer: Answer | None = None
    local_blocks: int = 0
    """Blocks that vLLM had itself when it was asked about last."""
    known: int | None = None
    """Leading blocks that need no save: they are there, or their save is under way. None: not known yet."""
    gave_up: bool = False
    """Loads are not tried again: one has failed."""
    left_out: int = 0
    """Full blocks that were not saved in its last step, because too many wait for their saves."""
    adapter: bytes | None = None
    """What tells its LoRA adapter apart; None: nothing does (yet), and its blocks are not kept."""
    look: AdapterLook | None = None
    """At its adapter, as long as it is under way."""
    since: float = field(default_factory=time.monotonic)
    is_stale: bool = False
    """Whether it holds KV of weights that are not the engine's any more."""


@dataclass
class SchedulerSide:
    """See the module."""

    geometry: Geometry
    options: Options
    session: Session | RankSessions
    """With the agent; of several ranks, one of each."""
    may_load: bool
    may_save: bool
    ranks: int
    events: KvEvents | None = None
    """Where there is somebody to tell."""
    stats: Stats = field(default_factory=Stats)
    pool: BlockPool | None = None
    _generation: bytes = b""
    """Behind every block hash: empty, until the weights have changed under way."""
    _mistrusts_cached: bool = False
    """Whether vLLM's own cache may have KV of the weights before: what is computed on it is not saved."""
    _requests: dict[str, RequestState] = field(default_factory=dict)
    _loads: list[LoadPlan] = field(default_factory=list)
    _loading: dict[str, int] = field(default_factory=dict)
    """Requests whose loads are under way, with how many ranks have not ended them."""
    _unproven: dict[str, Unproven] = field(default_factory=dict)
    """Requests that compute with what is being loaded."""
    _proven_saves: list[SavePlan] = field(default_factory=list)
    """Of requests that were unproven; to go out with the next step."""
    _pinned: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    """Blocks of saves under way, with how many ranks have not ended them; the oldest save first."""
    _pinned_at: dict[int, float] = field(default_factory=dict)
    _partial: set[int] = field(default_factory=set)
    """Saves under way of which something was not kept."""
    _pinned_blocks: int = 0
    _next_save: int = 0
    _adapters: Adapters = field(default_factory=Adapters)
    _computing: set[str] = field(default_factory=set)
    """Requests of the last step that are not over: they wait as long as the scheduler does."""
    _asker: Asker = field(init=False)

    def __post_init__(self) -> None:
        self._asker = Asker(self.session, self.options, self.stats)

    def begin(self, request: Request) -> None:
        """Notes a request and asks about it: the answer comes while the scheduler does other things."""
        state = self._state(request)
        self._settle(state, 0.0)
        may_load = self.may_load and not request.skip_reading_prefix_cache
        if may_load and state.adapter is not None and request.block_hashes:
            self._ask(state)

    def over(self, request: Request) -> None:
        """A request computes no more."""
        self._computing.discard(request.request_id)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond vLLM's own that can be loaded, and whether between steps; None: not known yet."""
        state = self._state(request)
        if local_tokens == 0:
            state.is_stale = False
        elif self._mistrusts_cached:
            state.is_stale = True
        if not self.may_load or request.skip_reading_prefix_cache:
            return 0, False
        tokens = self.geometry.block_tokens
        state.local_blocks = local_tokens // tokens
        if not self._settle(state, 0.0 if self._computing else math.inf):
            is_waited_for = time.monotonic() - state.since < ADAPTER_WAIT_S
            return (None if is_waited_for else 0), False
        if state.gave_up or state.adapter is None or len(request.block_hashes) <= state.local_blocks:
            return 0, False
        answer = self._answer(state)
        if answer is None:
            return None, False
        state.known = len(answer.sources)
        external = state.known - state.local_blocks
        if self.options.layerwise_loads:
            # The step computes a token at the least, in a block that nothing is loaded to.
            external = min(external, (request.num_tokens - 1) // tokens - state.local_blocks)
        if external <= 0:
            return 0, False
        return external * tokens, not self.options.layerwise_loads

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """vLLM has made room for blocks to load."""
        if external_tokens == 0:
            return
        state = self._state(request)
        first = state.local_blocks
        count = external_tokens // self.geometry.block_tokens
        (block_ids,) = blocks.get_block_ids()
        plan = LoadPlan(
            request_id=request.request_id,
            hashes=self._hashes(state, first, first + count),
            blocks=tuple(block_ids[first : first + count]),
        )
        self._loads.append(plan)
        self._loading[request.request_id] = self._loading.get(request.request_id, 0) + self.ranks
        if self.options.layerwise_loads:
            assert self.pool is not None
            self._unproven[request.request_id] = Unproven.withdraw(self.pool, request, block_ids, first)

    def forget(self) -> None:
        """What was saved so far is not this engine's KV any more: its weights have changed.

        From now on its blocks are its own, whatever other engines have: nobody can say which of them have the new weights.
        """
        self._generation = uuid.uuid4().bytes
        # vLLM asks for this also where its own blocks were in use and are all still there.
        self._mistrusts_cached = self.pool is not None and len(self.pool.cached_block_hash_to_block) > 0
        for state in self._requests.values():
            state.question = state.answer = state.known = None
            state.found = []
            # What it has computed so far is the old weights'.
            state.is_stale = True

    def hit_sources(self, request: Request) -> Sequence[int]:
        """Where the blocks come from that are loaded for a request, one source number for each."""
        state = self._requests.get(request.request_id)
        if state is None or state.answer is None:
            return ()
        return state.answer.sources[state.local_blocks :]

    def step(self, output: SchedulerOutput) -> RepriseMetadata:
        """What the workers are to do in this step."""
        self._asker.begin_step()
        self._computing = set(output.num_scheduled_tokens)
        metadata = RepriseMetadata(loads=self._loads, saves=self._proven_saves, is_idle=not self._computing)
        self._loads, self._proven_saves = [], []
        if self.may_save and self.session.connected:
            for new in output.scheduled_new_reqs:
                self._save(metadata, output, new.req_id, new.num_computed_tokens)
            cached = output.scheduled_cached_reqs
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                self._save(metadata, output, request_id, computed)
        for request_id in output.finished_req_ids:
            if state := self._requests.pop(request_id, None):
                self.stats.add("left_out_blocks", state.left_out)
        return metadata

    def workers_said(self, output: KVConnectorOutput) -> None:
        """Takes what the workers have ended."""
        said = output.kv_connector_worker_meta
        if not isinstance(said, RepriseWorkerMetadata):
            return
        for request_id in said.failed_loads:
            if state := self._requests.get(request_id):
                state.gave_up = True
                state.known = None
        for request_id in list(self._unproven):
            self._prove(self._unproven.pop(request_id), is_whole=said.whole_loads[request_id] == self.ranks)
        for request_id, ended in said.ended_loads.items():
            self._loading[request_id] -= ended
            if self._loading[request_id] == 0:
                del self._loading[request_id]
        self._partial |= said.partial_saves
        for save_id, ended in said.ended_saves.items():
            self._unpin(save_id, ended)

    def is_under_way(self) -> bool:
        """Whether blocks are kept from reuse until their load or save has ended, also where their request is gone."""
        return bool(self._pinned or self._loading)

    def saves_hold_blocks(self) -> bool:
        """Whether the end of a save under way frees blocks soon: those that nobody else has. Waiting for others frees nothing."""
        pool = self.pool
        if pool is None or not self._pinned_at:
            return False
        oldest = next(iter(self._pinned_at.values()))
        return time.monotonic() - oldest < SAVE_HOLDS_S and any(
            pool.blocks[block].ref_cnt == 1 for blocks, _ in self._pinned.values() for block in blocks
        )

    def _state(self, request: Request) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            lora = request.lora_request
            look = self._adapters.look(lora) if lora is not None else None
            state = RequestState(request=request, adapter=b"" if lora is None else None, look=look)
            self._requests[request.request_id] = state
        return state

    def _settle(self, state: RequestState, patience_ms: float) -> bool:
        """Takes what was found of a request's adapter; false: not known yet. The wait is the step's, as those for answers are."""
        if state.look is None:
            return True
        if not self._asker.wait(state.look.wait, patience_ms):
            return False
        state.adapter, state.look = state.look.digest, None
        return True

    def _answer(self, state: RequestState) -> Answer | None:
        """The answer about a request, asked for when there is none; None: not yet."""
        now = time.monotonic()
        if state.answer is not None and now - state.answer.at < ANSWER_KEPT_S:
            return state.answer
        question = state.question
        # What was asked when the request came may be old: others that waited before it may have saved what it begins with.
        is_old = question is not None and not state.looked and now - question.asked_at >= ANSWER_KEPT_S
        if question is None or is_old:
            self._ask(state)
        patience_ms = self.options.match_busy_ms if self._computing else math.inf
        while state.question is not None:
            state.looked = True
            sources = self._asker.look(state.question, patience_ms)
            if sources is None:
                return None
            if self._take(state, sources):
                return state.answer
            self._ask(state)
        return None

    def _ask(self, state: RequestState) -> None:
        """Sends the question about what follows on what was found, if the step has time left for it."""
        state.looked = False
        first = len(state.found)
        end = min(first + KEYS_PER_MATCH // self.ranks, len(state.request.block_hashes))
        state.asked = end - first
        state.question = self._asker.ask(lambda: self._keys(self._hashes(state, first, end)))

    def _take(self, state: RequestState, sources: Sequence[int]) -> bool:
        """Takes the answer about a part of a request; whether that was the last: another is asked about where all of it is there."""
        state.question = None
        state.found += sources
        if 0 < state.asked == len(sources) and len(state.found) < len(state.request.block_hashes):
            return False
        state.answer = Answer(sources=tuple(state.found), at=time.monotonic())
        state.found = []
        return True

    def _hashes(self, state: RequestState, first: int, end: int) -> tuple[bytes, ...]:
        """What names blocks of a request, besides the namespace."""
        assert state.adapter is not None, "blocks of an adapter that cannot be told apart are not named"
        behind = self._generation + state.adapter
        return tuple(block_hash + behind for block_hash in state.request.block_hashes[first:end])

    def _keys(self, hashes: Sequence[bytes]) -> bytes:
        """Packed keys of blocks, those of one rank before those of the next."""
        return b"".join(block_keys(namespace, hashes) for namespace in self.geometry.namespaces)

    def _save(self, metadata: RepriseMetadata, output: SchedulerOutput, request_id: str, computed: int) -> None:
        """Plans the save of a request's blocks that are full after this step."""
        state = self._requests.get(request_id)
        if state is None or self.pool is None or state.is_stale:
            return
        self._settle(state, 0.0)
        if state.adapter is None:
            return
        request = state.request
        tokens = computed + output.num_scheduled_tokens[request_id]
        if not self.options.save_decode_blocks:
            tokens = min(tokens, request.num_prompt_tokens)
        full = min(tokens // self.geometry.block_tokens, len(request.block_hashes))
        first = state.local_blocks if state.known is None else state.known
        room = max(self.pool.num_gpu_blocks // PINNED_SHARE - self._pinned_blocks, 0)
        state.left_out = max(full - first - room, 0)
        full = min(full, first + room)
        if full <= first:
            return
        assert output.kv_connector_block_state is not None
        block_ids = output.kv_connector_block_state.get_block_ids(request_id)
        if block_ids is None:
            return
        blocks = tuple(block_ids[0][first:full])
        before = self._hashes(state, first - 1, first) if first else ()
        plan = SavePlan(self._pin(blocks), self._hashes(state, first, full), blocks, *before)
        unproven = self._unproven.get(request_id)
        (metadata.saves if unproven is None else unproven.saves).append(plan)
        if self.events is not None:
            self.events.plan(plan.save_id, request, first, plan.hashes, before)
        state.known = full

    def _prove(self, unproven: Unproven, *, is_whole: bool) -> None:
        """Lets others have what a request has loaded and computed in the same step, or drops its saves."""
        if is_whole:
            assert self.pool is not None
            unproven.enter(self.pool, self.geometry.block_tokens)
            self._proven_saves += unproven.saves
            return
        for plan in unproven.saves:
            self._partial.add(plan.save_id)
            self._unpin(plan.save_id, self.ranks)

    def _pin(self, blocks: tuple[int, ...]) -> int:
        assert self.pool is not None
        self.pool.touch([self.pool.blocks[block] for block in blocks])
        save_id = self._next_save
        self._next_save += 1
        self._pinned[save_id] = (blocks, self.ranks)
        self._pinned_at[save_id] = time.monotonic()
        self._pinned_blocks += len(blocks)
        return save_id

    def _unpin(self, save_id: int, ended: int) -> None:
        blocks, ranks = self._pinned[save_id]
        if ranks > ended:
            self._pinned[save_id] = (blocks, ranks - ended)
            return
        del self._pinned[save_id], self._pinned_at[save_id]
        self._pinned_blocks -= len(blocks)
        if self.events is not None:
            self.events.ended(save_id, whole=save_id not in self._partial)
        self._partial.discard(save_id)
        assert self.pool is not None
        # The last block of a prompt is the first that vLLM should reuse.
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(blocks)])
