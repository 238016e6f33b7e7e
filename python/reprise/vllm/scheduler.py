"""Scheduler side of the connector: matches requests and plans loads and saves.

A step waits at most for a small time budget, and never for a save. Blocks with a pending save have an extra reference in
vLLM's block pool, so that they are not reused when their request ends or is preempted.
"""

from __future__ import annotations

import bisect
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reprise import LoadDecision, Session, block_keys
from reprise.kv_hints import Command
from reprise.lookahead import KEY_BYTES, REMATCH_S, Lookahead, blocks_ahead
from reprise.recompute import LoadChooser
from reprise.vllm.adapters import AdapterIdentification, Adapters
from reprise.vllm.block_commands import BlockCommand, BlockCommands
from reprise.vllm.computations import computation_of, prefill_of
from reprise.vllm.events import KvEvents
from reprise.vllm.match_calls import KEYS_PER_MATCH, KEYS_PER_PART, KeyDerivation, MatchCall, Matcher
from reprise.vllm.metadata import LoadPlan, RepriseMetadata, RepriseWorkerMetadata, SavePlan
from reprise.vllm.metrics import Stats
from reprise.vllm.request_params import RequestParams
from reprise.vllm.unverified_loads import UnverifiedLoad

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from reprise.vllm.geometry import Geometry
    from reprise.vllm.options import Options

ANSWER_KEPT_S = 0.5
"""Seconds for which a match result is reused when vLLM schedules a request again because it had no space for it."""

ADAPTER_WAIT_S = 0.25
"""Seconds that a request waits for the identification of its LoRA adapter; then it continues without Reprise."""

SAVE_HOLDS_S = 0.25
"""Seconds after which the scheduler no longer waits for a save, and vLLM preempts a request instead. An agent without
space takes longer."""

PINNED_SHARE = 4
"""At most one in this number of vLLM's blocks may be pinned by saves. Further blocks are saved in a later step of their
request, or skipped."""


@dataclass
class MatchResult:
    """Sources of the leading blocks of a request that Reprise has, and the time of the match."""

    sources: Sequence[int]
    at: float


@dataclass
class RequestState:
    """State of one request."""

    request: Request
    params: RequestParams = field(default_factory=RequestParams)
    """What the request asks of the cache."""
    call: MatchCall | None = None
    call_blocks: int = 0
    """Number of blocks in the pending match call: a part of a long prompt."""
    polled: bool = False
    """Whether the pending match call was polled."""
    found: list[int] = field(default_factory=list)
    """Sources of the earlier parts, all of whose blocks were found."""
    result: MatchResult | None = None
    decision: LoadDecision | None = None
    """Decision about the blocks of the result."""
    decided_result: MatchResult | None = None
    """Result of that decision."""
    decided_blocks: int = 0
    """Number of vLLM's own blocks at that decision."""
    local_blocks: int = 0
    """Number of blocks in vLLM's own cache at the last match."""
    known: int | None = None
    """Number of leading blocks that need no save: Reprise has them, or their save is pending. None: unknown."""
    load_failed: bool = False
    """Whether a load has failed; loads are not retried."""
    skipped_blocks: int = 0
    """Number of full blocks that were not saved in the last step, because too many blocks are pinned."""
    adapter: bytes | None = None
    """Digest of the LoRA adapter, empty without one. None: not identified (yet), so blocks are neither loaded nor saved."""
    identification: AdapterIdentification | None = None
    """Pending identification of the adapter."""
    since: float = field(default_factory=time.monotonic)
    is_stale: bool = False
    """Whether the request has KV of weights that the engine no longer has."""
    keys_ahead: bytes = b""
    """Keys of the blocks to read ahead, block after block."""
    hinted_result: MatchResult | None = None
    """Match result from which they follow."""
    derivation: KeyDerivation | None = None
    """The next keys to read ahead, which are being derived."""
    derived_result: MatchResult | None = None
    """Match result from which those follow."""
    full_blocks: int = 0
    """Number of full blocks after the last step of the request."""
    has_hinted: bool = False
    """Whether the commands of its hints for the time of its arrival were queued."""


@dataclass
class SchedulerSide:
    """Scheduler side of the connector."""

    geometry: Geometry
    options: Options
    session: Session
    """Session with the agent, with the layout of one of the ranks."""
    may_load: bool
    may_save: bool
    ranks: int
    events: KvEvents | None = None
    """KV events, if vLLM publishes them."""
    steps_ahead: int = 0
    """Number of steps that vLLM schedules ahead of the one that computes."""
    by_priority: bool = False
    """Whether vLLM schedules requests by priority; otherwise by arrival."""
    stats: Stats = field(default_factory=Stats)
    pool: BlockPool | None = None
    _generation: bytes = b""
    """Suffix of every block hash: empty until the weights change at run time."""
    _mistrusts_cached: bool = False
    """Whether vLLM's own cache may have KV of earlier weights. Blocks computed from such KV are not saved."""
    _requests: dict[str, RequestState] = field(default_factory=dict)
    _loads: list[LoadPlan] = field(default_factory=list)
    _loading: dict[str, int] = field(default_factory=dict)
    """Requests with pending loads, with the number of ranks that have not finished."""
    _unverified: dict[str, UnverifiedLoad] = field(default_factory=dict)
    """Requests that compute with blocks that are still being loaded."""
    _verified_saves: list[SavePlan] = field(default_factory=list)
    """Saves of requests whose loads were verified since the last step; they are submitted with the next step."""
    _pinned: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    """Blocks of pending saves, with the number of ranks that have not finished; the oldest save first."""
    _pinned_at: dict[int, float] = field(default_factory=dict)
    _partial: set[int] = field(default_factory=set)
    """Pending saves with blocks that were not saved."""
    _pinned_blocks: int = 0
    _next_save: int = 0
    _adapters: Adapters = field(default_factory=Adapters)
    _computing: set[str] = field(default_factory=set)
    """Running requests of the last step; they are delayed while the scheduler waits."""
    _preempted: set[str] = field(default_factory=set)
    """Preempted requests that have not run since."""
    _matcher: Matcher = field(init=False)
    _commands: BlockCommands = field(init=False)
    """Commands of KV hints."""
    _ended: list[tuple[int, RequestState]] = field(default_factory=list)
    """Ended requests with KV hints for all of their blocks, and the first save that is not theirs."""
    _lookahead: Lookahead | None = None
    _chooser: LoadChooser | None = None

    def __post_init__(self) -> None:
        layout = self.geometry.layout
        # A step with layer-wise loads waits for them, so its time is not that of its computation.
        if self.may_load and not self.options.layerwise_loads:
            self._chooser = LoadChooser.create(
                self.options, self.geometry.block_tokens, layout.block_bytes, self.stats, self.steps_ahead
            )
        self._matcher = Matcher(self.session, self.options, self.stats, all_ranks=self.ranks > 1)
        self._commands = BlockCommands(self.session, self.ranks)
        if self.options.lookahead and self.may_load:
            self._lookahead = Lookahead(self.session, self._keys_ahead, ranks=self.ranks, blocks=self._blocks_begun)

    def begin(self, request: Request) -> None:
        """Starts the match of a new request, so that the answer arrives before the request is scheduled."""
        state = self._state(request)
        if self._lookahead is not None:
            rank = (request.priority, request.arrival_time) if self.by_priority else ()
            self._lookahead.arrived(request.request_id, rank)
        self._take_adapter(state, 0.0)
        self._hint_arrival(state)
        may_load = self.may_load and not request.skip_reading_prefix_cache and bool(state.params.sources)
        if may_load and state.adapter is not None and request.block_hashes:
            self._start_match(state)

    def finish(self, request: Request) -> None:
        """Records that a request no longer waits or computes."""
        self._computing.discard(request.request_id)
        if (state := self._requests.get(request.request_id)) is not None:
            self._hint_end(state)
        if self._chooser is not None and not self._computing:
            self._chooser.pause()
        if self._lookahead is not None:
            self._lookahead.finished(request.request_id)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Returns the number of loadable tokens beyond vLLM's own, and whether they are loaded between steps.

        The number is None while the match is pending.
        """
        state = self._state(request)
        if local_tokens == 0:
            state.is_stale = False
        elif self._mistrusts_cached:
            state.is_stale = True
        if not self.may_load or request.skip_reading_prefix_cache or not state.params.sources:
            return 0, False
        tokens = self.geometry.block_tokens
        state.local_blocks = local_tokens // tokens
        if not self._take_adapter(state, 0.0 if self._computing else math.inf):
            is_waited_for = time.monotonic() - state.since < ADAPTER_WAIT_S
            return (None if is_waited_for else 0), False
        self._hint_arrival(state)
        if state.load_failed or state.adapter is None or len(request.block_hashes) <= state.local_blocks:
            return 0, False
        result = self._match_result(state)
        if result is None:
            return None, False
        state.known = len(result.sources)
        external = state.params.loadable(result.sources) - state.local_blocks
        if self.options.layerwise_loads:
            # The step must compute at least one token, in a block that is not loaded.
            external = min(external, (request.num_tokens - 1) // tokens - state.local_blocks)
        if external > 0 and self._chooser is not None and not state.params.hints.fetches:
            external = self._decide(self._chooser, state, result, external).blocks
        if external <= 0:
            return 0, False
        return external * tokens, not self.options.layerwise_loads

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Plans the load of a request for which vLLM has allocated blocks."""
        if external_tokens == 0:
            return
        state = self._state(request)
        first = state.local_blocks
        count = external_tokens // self.geometry.block_tokens
        (block_ids,) = blocks.get_block_ids()
        limit = None if state.decision is None else state.decision.limit
        if state.params.hints.fetches and self._chooser is not None:
            limit = self._chooser.policy.limit(count, first * self.geometry.block_tokens)
        plan = LoadPlan(
            request_id=request.request_id,
            hashes=self._hashes(state, first, first + count),
            blocks=tuple(block_ids[first : first + count]),
            limit=limit,
        )
        if self._chooser is not None and state.decision is not None:
            self._chooser.started(request.request_id, state.decision.requested)
        if request.request_id in self._preempted:
            self.stats.add("swapped_in_blocks", count)
        self._loads.append(plan)
        self._loading[request.request_id] = self._loading.get(request.request_id, 0) + self.ranks
        if self.options.layerwise_loads:
            assert self.pool is not None
            self._unverified[request.request_id] = UnverifiedLoad.withdraw(self.pool, request, block_ids, first)

    def invalidate(self) -> None:
        """Invalidates all earlier saves, because the engine's weights have changed.

        From now on this engine does not share blocks with other engines: it cannot know which of them have the new
        weights.
        """
        self._generation = uuid.uuid4().bytes
        # vLLM calls this even if its own cache could not be reset because blocks were in use.
        self._mistrusts_cached = self.pool is not None and len(self.pool.cached_block_hash_to_block) > 0
        for state in self._requests.values():
            state.call = state.result = state.known = state.hinted_result = state.derivation = None
            state.found, state.keys_ahead = [], b""
            # KV computed so far is that of the old weights.
            state.is_stale = True

    def hit_sources(self, request: Request) -> Sequence[int]:
        """Returns the sources of the blocks that are loaded for a request, one number per block."""
        state = self._requests.get(request.request_id)
        if state is None or state.result is None:
            return ()
        return state.result.sources[state.local_blocks :]

    def step(self, output: SchedulerOutput) -> RepriseMetadata:
        """Returns the loads and saves of this step for the workers."""
        self._matcher.begin_step()
        self._computing = set(output.num_scheduled_tokens)
        self._preempted -= self._computing
        metadata = RepriseMetadata(
            loads=self._loads,
            saves=self._verified_saves,
            is_idle=not self._computing,
            computation=computation_of(output),
        )
        self._loads, self._verified_saves = [], []
        if self.may_save and self.session.connected:
            for new in output.scheduled_new_reqs:
                self._save(metadata, output, new.req_id, new.num_computed_tokens)
            cached = output.scheduled_cached_reqs
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                self._save(metadata, output, request_id, computed)
        for request_id in output.preempted_req_ids or ():
            if state := self._requests.get(request_id):
                self._preempted.add(request_id)
                self._swap_out(metadata, state)
        for request_id in output.finished_req_ids:
            self._preempted.discard(request_id)
            if state := self._requests.pop(request_id, None):
                self.stats.add("left_out_blocks", state.skipped_blocks)
        self._commands.take_counts(self.stats)
        if self._chooser is not None:
            self._chooser.step(prefill_of(output) if self._computing else None)
        if self._lookahead is not None:
            self._lookahead.preempted(output.preempted_req_ids or ())
            begun = [*self._computing, *(plan.request_id for plan in metadata.loads)]
            self._lookahead.step(begun, is_idle=metadata.is_idle)
        return metadata

    def handle_worker_output(self, output: KVConnectorOutput) -> None:
        """Processes the loads and saves that workers have finished."""
        results = output.kv_connector_worker_meta
        if not isinstance(results, RepriseWorkerMetadata):
            return
        for request_id in results.failed_loads:
            if state := self._requests.get(request_id):
                state.load_failed = True
                state.known = None
        for request_id in list(self._unverified):
            is_complete = results.whole_loads[request_id] == self.ranks
            self._finish_unverified(self._unverified.pop(request_id), is_complete=is_complete)
        for load in results.load_times if self._chooser is not None else ():
            self._chooser.measured(load.request_id, load.loaded, load.seconds)
        for request_id, ended in results.ended_loads.items():
            self._loading[request_id] -= ended
            if self._loading[request_id] == 0:
                del self._loading[request_id]
                if self._chooser is not None:
                    self._chooser.ended(request_id)
        self._partial |= results.partial_saves
        for save_id, ended in results.ended_saves.items():
            self._unpin(save_id, ended)
        self._hint_saved()

    def close(self) -> None:
        """Ends the thread of KV hints and the session."""
        self._commands.close()
        self.session.close()

    def has_pending_transfers(self) -> bool:
        """Returns whether a pending load or save keeps blocks from reuse, even if its request has ended."""
        return bool(self._pinned or self._loading)

    def saves_hold_blocks(self) -> bool:
        """Returns whether a pending save will soon free blocks, that is, blocks that no request references."""
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
            identification = self._adapters.identify(lora) if lora is not None else None
            adapter = b"" if lora is None else None
            params = RequestParams.of(request, self.stats, by_priority=self.by_priority)
            state = RequestState(request, params, adapter=adapter, identification=identification)
            self._requests[request.request_id] = state
        return state

    def _take_adapter(self, state: RequestState, wait_ms: float) -> bool:
        """Takes the identification of a request's adapter; returns False while it is pending.

        The wait is charged to the step's budget.
        """
        if state.identification is None:
            return True
        if not self._matcher.wait(state.identification.wait, wait_ms):
            return False
        state.adapter, state.identification = state.identification.digest, None
        return True

    def _match_result(self, state: RequestState) -> MatchResult | None:
        """Returns the match result of a request, and starts a match if needed; None while it is pending."""
        now = time.monotonic()
        if state.result is not None and now - state.result.at < ANSWER_KEPT_S:
            return state.result
        call = state.call
        # A match from the request's arrival may be outdated: earlier requests may have saved its prefix since.
        is_old = call is not None and not state.polled and now - call.started_at >= ANSWER_KEPT_S
        if call is None or is_old:
            self._start_match(state)
        wait_ms = self.options.match_busy_ms if self._computing else math.inf
        while state.call is not None:
            state.polled = True
            sources = self._matcher.poll(state.call, wait_ms)
            if sources is None:
                return None
            if self._add_part(state, sources):
                return state.result
            self._start_match(state)
        return None

    def _decide(self, chooser: LoadChooser, state: RequestState, result: MatchResult, count: int) -> LoadDecision:
        """Returns the decision about a number of blocks of a match result beyond vLLM's own."""
        if state.decision is None or state.decided_result is not result or state.decided_blocks != state.local_blocks:
            others = self._computing - {state.request.request_id}
            prefix = state.local_blocks * self.geometry.block_tokens
            sources = result.sources[state.local_blocks :][:count]
            state.decision = chooser.choose(sources, prefix, is_computing=bool(others))
            state.decided_result, state.decided_blocks = result, state.local_blocks
        return state.decision

    def _start_match(self, state: RequestState) -> None:
        """Starts a match of the blocks after those already found, if the step has time left."""
        state.polled = False
        first = len(state.found)
        end = min(first + KEYS_PER_MATCH // self.ranks, len(state.request.block_hashes))
        state.call_blocks = end - first
        state.call = self._matcher.start(lambda: self._keys(self._hashes(state, first, end)), lambda: first)

    def _keys_ahead(self, request_id: str, is_near: bool) -> bytes:
        """Returns the keys of the blocks that a waiting request will load from this node, block after block.

        They are empty if no block is on a device, or while the match is pending. Does not wait.

        Args:
            request_id: the request.
            is_near: whether the request runs soon; only then it is matched again.
        """
        state = self._requests.get(request_id)
        if state is None or state.adapter is None or state.load_failed or state.request.skip_reading_prefix_cache:
            return b""
        if not state.params.sources:
            return b""
        if state.call is not None and state.call.pending is not None:
            sources = self._matcher.peek(state.call)
            if sources is not None and not self._add_part(state, sources, state.call.started_at):
                self._start_match(state)
        elif is_near and (state.result is None or time.monotonic() - state.result.at > REMATCH_S):
            self._start_match(state)
        if state.result is not None and state.result is not state.hinted_result:
            self._derive_ahead(state, state.result)
        return state.keys_ahead

    def _blocks_begun(self, request_id: str, first: int) -> bytes:
        """Returns the keys of the blocks of a request that it has loaded or saves, block after block. Does not wait.

        Args:
            request_id: the request.
            first: number of the first key.
        """
        state = self._requests.get(request_id)
        if state is None or state.adapter is None or state.is_stale or state.known is None:
            return b""
        start = first // self.ranks
        end = min(state.known, len(state.request.block_hashes), start + KEYS_PER_PART)
        if end <= start:
            return b""
        return self._matcher.derive(lambda: self._keys_by_block(state, start, end)) or b""

    def _derive_ahead(self, state: RequestState, result: MatchResult) -> None:
        """Derives the keys to read ahead after a match, as far as the step has time; the next one continues."""
        if state.derivation is None or state.derived_result is not result:
            sources = result.sources[: state.params.loadable(result.sources)]
            state.derivation = self._matcher.derive(lambda: self._keys_on_devices(state, sources))
            state.derived_result = result
        if state.derivation is not None and state.derivation.advance(self._matcher):
            state.keys_ahead, state.hinted_result, state.derivation = state.derivation.packed, result, None

    def _keys_on_devices(self, state: RequestState, sources: Sequence[int]) -> KeyDerivation:
        """Returns the derivation of the keys of the blocks of this node beyond vLLM's own; none if all of them are in DRAM."""
        start = self._cached_by_vllm(state.request.block_hashes[: len(sources)])

        def keys(first: int, end: int) -> bytes:
            return self._keys_by_block(state, start + first, start + end)

        return KeyDerivation(keys, blocks_ahead(sources[start:]))

    def _keys_by_block(self, state: RequestState, first: int, end: int) -> bytes:
        """Returns the packed keys of a request's blocks, those of all ranks of a block together."""
        hashes = self._hashes(state, first, end)
        ranked = [block_keys(namespace, hashes) for namespace in self.geometry.namespaces]
        if len(ranked) == 1:
            return ranked[0]
        return b"".join(keys[at : at + KEY_BYTES] for at in range(0, len(ranked[0]), KEY_BYTES) for keys in ranked)

    def _cached_by_vllm(self, hashes: Sequence[BlockHash]) -> int:
        """Returns the number of leading blocks in vLLM's own cache, which evicts the end of a prompt first."""
        pool = self.pool
        if pool is None:
            return 0
        return bisect.bisect_left(hashes, True, key=lambda block: pool.get_cached_block(block, [0]) is None)

    def _add_part(self, state: RequestState, sources: Sequence[int], at: float | None = None) -> bool:
        """Adds the answer for one part of a request; returns whether the match is complete.

        The next part is matched only if all blocks of this one were found.

        Args:
            state: the request.
            sources: the answer.
            at: time of the answer, if it may have arrived long ago.
        """
        state.call = None
        state.found += sources
        if 0 < state.call_blocks == len(sources) and len(state.found) < len(state.request.block_hashes):
            return False
        state.result = MatchResult(sources=tuple(state.found), at=time.monotonic() if at is None else at)
        state.found = []
        return True

    def _hashes(self, state: RequestState, first: int, end: int) -> tuple[bytes, ...]:
        """Returns the hashes of a request's blocks: vLLM's block hash, generation and adapter digest."""
        assert state.adapter is not None, "blocks of an unidentified adapter have no keys"
        suffix = self._generation + state.adapter
        return tuple(block_hash + suffix for block_hash in state.request.block_hashes[first:end])

    def _keys(self, hashes: Sequence[bytes]) -> bytes:
        """Returns the packed keys of blocks, rank by rank."""
        return b"".join(block_keys(namespace, hashes) for namespace in self.geometry.namespaces)

    def _save(self, metadata: RepriseMetadata, output: SchedulerOutput, request_id: str, computed: int) -> None:
        """Plans the save of a request's blocks that are full after this step."""
        state = self._requests.get(request_id)
        if state is None or self.pool is None or state.is_stale or not state.params.stores:
            return
        self._take_adapter(state, 0.0)
        if state.adapter is None:
            return
        request = state.request
        tokens = computed + output.num_scheduled_tokens[request_id]
        state.full_blocks = min(tokens // self.geometry.block_tokens, len(request.block_hashes))
        full = state.full_blocks
        if not state.params.saves_generated(by_default=self.options.save_decode_blocks):
            full = min(full, request.num_prompt_tokens // self.geometry.block_tokens)
        first, end = self._unsaved(state, full)
        if end <= first:
            return
        assert output.kv_connector_block_state is not None
        block_ids = output.kv_connector_block_state.get_block_ids(request_id)
        if block_ids is not None:
            self._plan_saves(metadata, state, first, block_ids[0][first:end])

    def _unsaved(self, state: RequestState, full: int) -> tuple[int, int]:
        """Returns the first block of a request to save, and the one after the last, as far as blocks may be pinned."""
        assert self.pool is not None
        first = state.local_blocks if state.known is None else state.known
        unpinned = max(self.pool.num_gpu_blocks // PINNED_SHARE - self._pinned_blocks, 0)
        state.skipped_blocks = max(full - first - unpinned, 0)
        return first, min(full, first + unpinned)

    def _plan_saves(self, metadata: RepriseMetadata, state: RequestState, first: int, ids: Sequence[int]) -> None:
        """Plans the save of a request's blocks from a number on: one save for each run of one eviction priority."""
        request, unverified = state.request, self._unverified.get(state.request.request_id)
        blocks = range(first, first + len(ids))
        for run, priority in state.params.classes(blocks, self.geometry.block_tokens, request.num_prompt_tokens):
            before = self._hashes(state, run.start - 1, run.start) if run.start else ()
            physical = tuple(ids[run.start - first : run.stop - first])
            plan = SavePlan(
                self._pin(physical),
                self._hashes(state, run.start, run.stop),
                physical,
                run.start,
                parent=before[0] if before else None,
                priority=priority,
            )
            (metadata.saves if unverified is None else unverified.saves).append(plan)
            if self.events is not None:
                self.events.plan(plan.save_id, request, run.start, plan.hashes, before)
        state.known = blocks.stop

    def _swap_out(self, metadata: RepriseMetadata, state: RequestState) -> None:
        """Saves the full blocks of a preempted request that no step has saved, as far as vLLM has not reused them.

        vLLM has freed the blocks already, but its prefix cache still finds those that this step does not overwrite.
        When the request runs again, it is matched again and its blocks are loaded, generated tokens included.
        """
        state.call = state.result = None
        state.found = []
        # A block of the same contents may be one that another request loads in this step, and the load may fail.
        if not self.may_save or not self.session.connected or self.pool is None or self._unverified:
            return
        if state.is_stale or not state.params.stores or state.adapter is None:
            return
        first, end = self._unsaved(state, min(state.full_blocks, len(state.request.block_hashes)))
        ids: list[int] = []
        for block_hash in state.request.block_hashes[first:end]:
            cached = self.pool.get_cached_block(block_hash, [0])
            if cached is None:
                break
            ids.append(cached[0].block_id)
        if ids:
            self._plan_saves(metadata, state, first, ids)
            self.stats.add("swapped_out_blocks", len(ids))

    def _hint_arrival(self, state: RequestState) -> None:
        """Queues the commands of KV hints for blocks that may be on this node already."""
        if state.has_hinted or state.adapter is None:
            return
        state.has_hinted = True
        for command in state.params.hints.commands:
            if command.action != "demote":
                self._submit(state, command)

    def _hint_end(self, state: RequestState) -> None:
        """Queues the commands of KV hints for all blocks of an ended request, after its saves."""
        if state.adapter is not None and any(command.action != "prefetch" for command in state.params.hints.commands):
            self._ended.append((self._next_save, state))
            self._hint_saved()

    def _hint_saved(self) -> None:
        """Queues the commands of ended requests whose saves have ended."""
        while self._ended and next(iter(self._pinned), self._next_save) >= self._ended[0][0]:
            _, state = self._ended.pop(0)
            for command in state.params.hints.commands:
                if command.action != "prefetch":
                    self._submit(state, command)

    def _submit(self, state: RequestState, command: Command) -> None:
        request = state.request
        first, end = command.blocks(self.geometry.block_tokens, len(request.block_hashes), request.num_prompt_tokens)

        def keys(start: int, stop: int) -> bytes:
            return self._keys_by_block(state, start, stop)

        self._commands.submit(BlockCommand(command.action, keys, first, end, command.ttl))

    def _finish_unverified(self, unverified: UnverifiedLoad, *, is_complete: bool) -> None:
        """Publishes the blocks that a request has loaded and computed in one step, or drops its saves."""
        if is_complete:
            assert self.pool is not None
            unverified.restore(self.pool, self.geometry.block_tokens)
            self._verified_saves += unverified.saves
            return
        for plan in unverified.saves:
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
        # In reverse order, so that vLLM reuses the last block of a prompt first.
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(blocks)])
