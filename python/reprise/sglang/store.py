"""Pages of one of SGLang's host pools in Reprise: asking, saving and loading, each waited for within its patience.

SGLang calls from its prefetch and its backup thread at once. Both wait without the GIL, on native threads that end every transfer
whatever becomes of the agent; each takes from the ended ones what is its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from reprise import Finished, KvMemory, Layout, Namespace, RepriseError, Transfers, block_keys, opaque
from reprise.repeated_log import RepeatedLog
from reprise.sglang import pools
from reprise.sglang.options import StorageOptions

KEYS_PER_MATCH = 8192
"""Keys of one question at the most (docs/PROTOCOL.md, part 1)."""

QUESTIONS_MAX = 512
"""Questions under way at the most: a session has room for 1,024 calls, and transfers make some as well."""

STAGED_PAGES = 16
"""Pages that are staged at a time: enough for one call of the agent, little memory beside the pool's."""

WAIT_ROUND_S = 5.0
"""How often a wait looks whether it still has a reason."""


class Store:
    """Pages of one pool.

    Args:
        pool: SGLang's.
        direct: its pages in place (:func:`pools.runs`); None: they go over a copy.
        options: of the storage.
        described: model, revision, rank, ranks, and what else tells its pages from others.

    Raises:
        ValueError: a pool whose pages cannot be kept, and what to do.
        Version, Forbidden, BadRequest: the agent is there and refuses this engine, and what to do.
    """

    def __init__(
        self, pool: Any, direct: list[torch.Tensor] | None, options: StorageOptions, described: dict[str, Any]
    ) -> None:
        self._pool = pool
        self._options = options
        self._page_tokens = int(pool.page_size)
        self._page_bytes = pools.flat_page_bytes(pool)
        self._pieces = len(direct) if direct else 1
        self.layout = self._layout(described)
        self._namespace = Namespace(
            model=options.model_id or described["model"],
            revision=described["revision"],
            layout=self.layout,
            hash_algorithm="sglang-sha256",
            hash_seed="",
            engine_format=f"sglang:{pool.layout}:{pool.dtype}:{getattr(pool, 'storage_format_tag', None)}:{described['shape']}",
            tenant_salt="" if options.tenant == "default" else options.tenant,
        )
        self.session = options.session(self._namespace, self.layout, "sglang")
        self._errors = RepeatedLog("pages were not loaded or saved whole")
        self._refusals = RepeatedLog("a transfer of SGLang's pages was refused")
        self._waits = RepeatedLog("SGLang waits for a transfer")
        self._direct = self._transfers(direct) if direct else None
        self._staged: Transfers | None = None
        self._stage: list[torch.Tensor] = []
        self._staging = threading.Lock()
        self._awaited: dict[tuple[int, int], Finished | None] = {}
        """Transfers that somebody waits for, with what has become of them: None, not known yet."""
        self._ending = threading.Lock()

    @property
    def is_direct(self) -> bool:
        """Whether pages are copied straight between the pool and the agent's arena."""
        return self._direct is not None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self._page_bytes

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many leading pages are there."""
        found = 0
        while found < len(keys):
            asked = keys[found : found + KEYS_PER_MATCH]
            (answer,) = self._answers([asked])
            found += answer
            if answer < len(asked):
                break
        return found

    def each(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are there."""
        return [answer == 1 for answer in self._answers([[key] for key in keys])]

    def save(self, keys: Sequence[bytes], host_indices: torch.Tensor, parent: bytes | None = None) -> list[bool]:
        """Saves pages of the pool. Those that are there already count as saved.

        Args:
            keys: of consecutive pages of one prompt.
            host_indices: where they are.
            parent: key of the page before the first one; None: there is none, or it is not known.
        """
        if self._direct is None:
            values = [self._pool.get_data_page(index, flat=True) for index in self._first_tokens(host_indices)]
            return self.save_flat(keys, values, parent)
        return self._saved(self._direct, keys, self._pages(host_indices), parent)

    def load(self, keys: Sequence[bytes], host_indices: torch.Tensor) -> list[bool]:
        """Loads pages to the pool."""
        if self._direct is not None:
            return self._loaded(self._direct, keys, self._pages(host_indices))
        places = [self._pool.get_dummy_flat_data_page() for _ in keys]
        ok = self.load_flat(keys, places)
        for index, place, is_ok in zip(self._first_tokens(host_indices), places, ok, strict=True):
            if is_ok:
                self._pool.set_from_flat_data_page(index, place)
        return ok

    def save_flat(
        self, keys: Sequence[bytes], values: Sequence[torch.Tensor], parent: bytes | None = None
    ) -> list[bool]:
        """Saves flat pages through memory of the storage; arguments as for :meth:`save`."""
        saved: list[bool] = []
        with self._staging:
            transfers = self._stage_transfers()
            for at in range(0, len(keys), STAGED_PAGES):
                part = values[at : at + STAGED_PAGES]
                for page, value in enumerate(part):
                    self._put(page, value)
                before = keys[at - 1] if at else parent
                saved += self._saved(transfers, keys[at : at + STAGED_PAGES], range(len(part)), before)
        return saved

    def load_flat(self, keys: Sequence[bytes], places: Sequence[torch.Tensor]) -> list[bool]:
        """Loads flat pages, over memory of our own; places of those that are not there are as they were."""
        loaded: list[bool] = []
        with self._staging:
            transfers = self._stage_transfers()
            for at in range(0, len(keys), STAGED_PAGES):
                part = places[at : at + STAGED_PAGES]
                ok = self._loaded(transfers, keys[at : at + STAGED_PAGES], range(len(part)))
                for page, (place, is_ok) in enumerate(zip(part, ok, strict=True)):
                    if is_ok:
                        self._get(page, place)
                loaded += ok
        return loaded

    def close(self) -> None:
        """Ends threads and session; the pool's memory is not touched after it."""
        for transfers in (self._direct, self._staged):
            if transfers is not None:
                transfers.close()
        self.session.close()

    def _layout(self, described: dict[str, Any]) -> Layout:
        try:
            return opaque.layout(
                pieces=self._pieces,
                piece_bytes=self._page_bytes // self._pieces,
                tokens=self._page_tokens,
                tp_rank=described["rank"],
                tp_size=described["ranks"],
            )
        except ValueError as error:
            raise ValueError(
                f"RepriseStorage cannot keep pages of {self._page_tokens} tokens and {self._page_bytes} bytes: {error}. Set "
                "another --page-size"
            ) from error

    def _transfers(self, tensors: list[torch.Tensor]) -> Transfers:
        return Transfers(
            self.session,
            KvMemory(tensors, self.layout),
            load_deadline=self._options.load_deadline_ms / 1e3,
            load_stall=self._options.load_stall_ms / 1e3,
            load_standstill=self._options.load_standstill_ms / 1e3,
            save_stall=self._options.save_stall_ms / 1e3,
        )

    def _stage_transfers(self) -> Transfers:
        if self._staged is None:
            self._stage = pools.staging(STAGED_PAGES, self._page_bytes, self._pieces)
            self._staged = self._transfers(self._stage)
        return self._staged

    def _put(self, page: int, value: torch.Tensor) -> None:
        flat = value.contiguous().reshape(-1).view(torch.int8)
        if flat.numel() != self._page_bytes:
            raise ValueError(f"a page has {self._page_bytes} bytes, this value {flat.numel()}")
        for run, piece in zip(self._stage, flat.chunk(self._pieces), strict=True):
            run[page] = piece

    def _get(self, page: int, place: torch.Tensor) -> None:
        flat = torch.cat([run[page] for run in self._stage])
        if place.numel() * place.element_size() != flat.numel():
            raise ValueError(f"a page has {flat.numel()} bytes, its place {place.numel() * place.element_size()}")
        place.copy_(flat.view(place.dtype).reshape(place.shape))

    def _first_tokens(self, host_indices: torch.Tensor) -> list[int]:
        return [int(index) for index in host_indices[:: self._page_tokens]]

    def _pages(self, host_indices: torch.Tensor) -> list[int]:
        return [index // self._page_tokens for index in self._first_tokens(host_indices)]

    def _answers(self, questions: Sequence[Sequence[bytes]]) -> list[int]:
        """How many leading pages of each question are there, all within one deadline."""
        give_up = time.monotonic() + self._options.match_deadline_ms / 1e3
        answers: list[int] = []
        for at in range(0, len(questions), QUESTIONS_MAX):
            pending = [self.session.start_match(self._keys(keys)) for keys in questions[at : at + QUESTIONS_MAX]]
            for question in pending:
                sources = () if question is None else question.poll(max(give_up - time.monotonic(), 0.0))
                if sources is None:
                    self.session.suspect()
                answers.append(len(sources or ()))
        return answers

    def _saved(
        self, transfers: Transfers, keys: Sequence[bytes], pages: Sequence[int], parent: bytes | None
    ) -> list[bool]:
        before = None if parent is None else self._keys([parent])
        done = self._wait(transfers, lambda: transfers.save(self._keys(keys), list(pages), before))
        self._errors.note(done and done.error)
        return [False] * len(keys) if done is None else [status != "unsaved" for status in done.statuses]

    def _loaded(self, transfers: Transfers, keys: Sequence[bytes], pages: Sequence[int]) -> list[bool]:
        done = self._wait(transfers, lambda: transfers.load(self._keys(keys), list(pages)))
        self._errors.note(done and done.error)
        return [False] * len(keys) if done is None else list(done.ok)

    def _wait(self, transfers: Transfers, submit: Any) -> Finished | None:
        """What became of a transfer; None: it was refused, or the storage is closed."""
        number: int | None = None
        try:
            with self._ending:
                number = submit()
                self._awaited[id(transfers), number] = None
            while not transfers.wait([number], WAIT_ROUND_S):
                self._waits.note(f"{self._page_bytes} bytes a page")
            self._refusals.note(None)
            self._waits.note(None)
        except (RepriseError, ValueError) as error:
            self._refusals.note(str(error))
        finally:
            done = self._taken(transfers, number)
        return done

    def _taken(self, transfers: Transfers, number: int | None) -> Finished | None:
        """What became of a transfer, which nobody waits for any more. What others wait for is kept for them, nothing else."""
        with self._ending:
            for done in transfers.finished():
                if (id(transfers), done.id) in self._awaited:
                    self._awaited[id(transfers), done.id] = done
            return None if number is None else self._awaited.pop((id(transfers), number), None)

    def _keys(self, keys: Sequence[bytes]) -> bytes:
        return block_keys(self._namespace, keys)
