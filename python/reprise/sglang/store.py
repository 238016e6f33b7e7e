"""Pages of one of SGLang's host pools in Reprise: matches, saves and loads, each with its own timeout.

SGLang calls from its prefetch thread and its backup thread concurrently. Both wait without the GIL for native threads,
which end every transfer regardless of the agent's state. Each thread takes only its own ended transfers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reprise import (
    Finished,
    KvMemory,
    Layout,
    Namespace,
    RepriseError,
    TenantKeys,
    Transfers,
    block_keys,
    opaque_layout,
    tiers,
)
from reprise.recompute import LoadChooser, counts_of
from reprise.repeated_log import RepeatedLog
from reprise.sglang import pools
from reprise.sglang.options import StorageOptions

KEYS_PER_MATCH = 8192
"""Maximum number of keys of one match (docs/PROTOCOL.md, part 1)."""

MATCHES_MAX = 512
"""Maximum number of concurrent matches: a session allows 1,024 calls, and transfers also need some."""

STAGED_PAGES = 16
"""Number of pages staged at a time: enough for one call to the agent, and small compared with the pool."""

FOUND_MAX = 65_536
"""Number of pages whose sources are kept; beyond it all are dropped, and some loads are not measured."""

WAIT_ROUND_S = 5.0
"""Seconds of one native wait in a loop."""


@dataclass(frozen=True)
class Place:
    """Place of the first of some consecutive pages in their prompt."""

    before: bytes | None
    """Key of the page before it; None if it does not exist or is unknown."""
    position: int | None
    """Number of pages before it; None if it is unknown."""

    def after(self, keys: Sequence[bytes]) -> Place:
        """Returns the place of the page after these pages, of which the first has this place."""
        if not keys:
            return self
        return Place(keys[-1], None if self.position is None else self.position + len(keys))


UNKNOWN_PLACE = Place(None, None)


class Store:
    """Store for the pages of one pool.

    Args:
        pool: SGLang's host pool.
        direct: the pool's pages in place (:func:`pools.runs`); None: pages are copied through staging memory.
        options: options of the storage.
        described: model, revision, rank, ranks and shape, which identify the pages.

    Raises:
        ValueError: the pool's pages are not supported; the message has the remedy.
        Version, Forbidden, BadRequest: the agent rejects this engine; the message has the remedy.
    """

    def __init__(
        self, pool: Any, direct: list[torch.Tensor] | None, options: StorageOptions, described: dict[str, Any]
    ) -> None:
        self._pool = pool
        self._options = options
        self._allowed = options.sources()
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
            tenant=TenantKeys(options.tenant),
        )
        self.session = options.session(self._namespace, self.layout, "sglang")
        self._errors = RepeatedLog("some pages were not loaded or saved")
        self._refusals = RepeatedLog("a transfer of SGLang's pages was rejected")
        self._waits = RepeatedLog("SGLang waits for a transfer")
        self._direct = self._transfers(direct) if direct else None
        self._staged: Transfers | None = None
        self._stage: list[torch.Tensor] = []
        self._staging = threading.Lock()
        self._awaited: dict[tuple[int, int], Finished | None] = {}
        """Transfers with a waiting thread, and their results; None while pending."""
        self._ending = threading.Lock()
        self.chooser: LoadChooser | None = None
        """Decisions whether pages are loaded or computed; None: all are loaded."""
        self._found: dict[bytes, int] = {}
        """Sources of the pages that were chosen to be loaded."""
        self._next_load = 0

    @property
    def is_direct(self) -> bool:
        """Whether pages are copied directly between the pool and the agent's arena."""
        return self._direct is not None

    @property
    def page_bytes(self) -> int:
        """Number of bytes of a page."""
        return self._page_bytes

    def leading(self, keys: Sequence[bytes], position: int | None = None) -> int:
        """Returns the number of leading pages that are available.

        Args:
            keys: keys of consecutive pages of one prompt.
            position: number of pages before the first one; None if it is unknown.
        """
        return len(self._leading_sources(keys, position))

    def to_load(self, keys: Sequence[bytes], prefix_pages: int, position: int | None = None) -> int:
        """Returns the number of leading pages that are available and to be loaded; the others are computed.

        Args:
            keys: keys of the pages.
            prefix_pages: number of pages before the first one, as far as it is known.
            position: the same number; None if it is unknown.
        """
        sources = self._leading_sources(keys, position)
        if not sources or self.chooser is None:
            return len(sources)
        prefix = prefix_pages * self._page_tokens
        pages = self.chooser.choose(sources, prefix, is_computing=self.chooser.is_computing).blocks
        if len(self._found) > FOUND_MAX:
            self._found = {}
        self._found.update(zip(keys[:pages], sources, strict=False))
        return pages

    def each(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns for each page whether it is available."""
        if not self._allowed:
            return [False] * len(keys)
        return [tiers.loadable(matched, self._allowed) == 1 for matched in self._match([[key] for key in keys])]

    def save(self, keys: Sequence[bytes], host_indices: torch.Tensor, place: Place = UNKNOWN_PLACE) -> list[bool]:
        """Saves pages of the pool; returns for each page whether Reprise has it.

        Args:
            keys: keys of consecutive pages of one prompt.
            host_indices: token indices of the pages in the pool.
            place: place of the first one.
        """
        if self._direct is None:
            values = [self._pool.get_data_page(index, flat=True) for index in self._first_tokens(host_indices)]
            return self.save_flat(keys, values, place)
        return self._saved(self._direct, keys, self._pages(host_indices), place)

    def load(self, keys: Sequence[bytes], host_indices: torch.Tensor) -> list[bool]:
        """Loads pages into the pool; returns for each page whether it was loaded."""
        if self._direct is not None:
            return self._loaded(self._direct, keys, self._pages(host_indices))
        places = [self._pool.get_dummy_flat_data_page() for _ in keys]
        ok = self.load_flat(keys, places)
        for index, place, is_ok in zip(self._first_tokens(host_indices), places, ok, strict=True):
            if is_ok:
                self._pool.set_from_flat_data_page(index, place)
        return ok

    def save_flat(
        self, keys: Sequence[bytes], values: Sequence[torch.Tensor], place: Place = UNKNOWN_PLACE
    ) -> list[bool]:
        """Saves flat pages through staging memory; arguments as for :meth:`save`."""
        saved: list[bool] = []
        with self._staging:
            transfers = self._stage_transfers()
            for at in range(0, len(keys), STAGED_PAGES):
                part = values[at : at + STAGED_PAGES]
                for page, value in enumerate(part):
                    self._put(page, value)
                saved += self._saved(transfers, keys[at : at + STAGED_PAGES], range(len(part)), place.after(keys[:at]))
        return saved

    def load_flat(self, keys: Sequence[bytes], places: Sequence[torch.Tensor]) -> list[bool]:
        """Loads flat pages through staging memory; the places of pages that are not loaded remain unchanged."""
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
        """Ends threads and session; the pool's memory is not accessed afterwards."""
        for transfers in (self._direct, self._staged):
            if transfers is not None:
                transfers.close()
        self.session.close()

    def _layout(self, described: dict[str, Any]) -> Layout:
        try:
            return opaque_layout.layout(
                pieces=self._pieces,
                piece_bytes=self._page_bytes // self._pieces,
                tokens=self._page_tokens,
                tp_rank=described["rank"],
                tp_size=described["ranks"],
            )
        except ValueError as error:
            raise ValueError(
                f"RepriseStorage does not support pages of {self._page_tokens} tokens and {self._page_bytes} bytes: {error}. Set "
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
            raise ValueError(f"invalid value of {flat.numel()} bytes: a page has {self._page_bytes}")
        for run, piece in zip(self._stage, flat.chunk(self._pieces), strict=True):
            run[page] = piece

    def _get(self, page: int, place: torch.Tensor) -> None:
        flat = torch.cat([run[page] for run in self._stage])
        if place.numel() * place.element_size() != flat.numel():
            raise ValueError(
                f"invalid target of {place.numel() * place.element_size()} bytes: a page has {flat.numel()}"
            )
        place.copy_(flat.view(place.dtype).reshape(place.shape))

    def _first_tokens(self, host_indices: torch.Tensor) -> list[int]:
        return [int(index) for index in host_indices[:: self._page_tokens]]

    def _pages(self, host_indices: torch.Tensor) -> list[int]:
        return [index // self._page_tokens for index in self._first_tokens(host_indices)]

    def _leading_sources(self, keys: Sequence[bytes], position: int | None) -> list[int]:
        """Returns the sources of the leading pages that are available."""
        sources: list[int] = []
        while self._allowed and len(sources) < len(keys):
            part = keys[len(sources) : len(sources) + KEYS_PER_MATCH]
            (matched,) = self._match([part], None if position is None else position + len(sources))
            count = tiers.loadable(matched, self._allowed)
            sources += matched[:count]
            if count < len(part):
                break
        return sources

    def _match(self, groups: Sequence[Sequence[bytes]], position: int | None = None) -> list[Sequence[int]]:
        """Matches groups of keys within one deadline; returns the sources of the leading pages of each group.

        Args:
            groups: keys of consecutive pages.
            position: number of pages before the first one of each group; None if it is unknown.
        """
        deadline = time.monotonic() + self._options.match_deadline_ms / 1e3
        matched: list[Sequence[int]] = []
        for at in range(0, len(groups), MATCHES_MAX):
            pending = [
                self.session.start_match(self._keys(keys), position=position) for keys in groups[at : at + MATCHES_MAX]
            ]
            for match in pending:
                sources = () if match is None else match.poll(max(deadline - time.monotonic(), 0.0))
                if sources is None:
                    self.session.suspect()
                matched.append(sources or ())
        return matched

    def _saved(self, transfers: Transfers, keys: Sequence[bytes], pages: Sequence[int], place: Place) -> list[bool]:
        if self._options.no_store:
            return [False] * len(keys)
        before, priority = None if place.before is None else self._keys([place.before]), self._options.priority
        done = self._wait(
            transfers,
            lambda: transfers.save(self._keys(keys), list(pages), before, place.position, priority),  # type: ignore[arg-type]
        )
        self._errors.note(done and done.error)
        return [False] * len(keys) if done is None else [status != "unsaved" for status in done.statuses]

    def _loaded(self, transfers: Transfers, keys: Sequence[bytes], pages: Sequence[int]) -> list[bool]:
        chooser = self.chooser
        limit = None if chooser is None else chooser.policy.limit(len(keys), 0)
        name = self._started(keys)
        done = self._wait(transfers, lambda: transfers.load(self._keys(keys), list(pages), limit))
        self._errors.note(done and done.error)
        if chooser is not None:
            if done is not None:
                loaded = (source for source, is_ok in zip(done.sources, done.ok, strict=True) if is_ok)
                chooser.measured(name, counts_of(loaded), done.ran)
            chooser.ended(name)
        return [False] * len(keys) if done is None else list(done.ok)

    def _started(self, keys: Sequence[bytes]) -> str:
        """Counts a load of pages that begins; returns its name."""
        with self._ending:
            self._next_load += 1
            name = str(self._next_load)
        if self.chooser is not None:
            self.chooser.started(name, counts_of(self._found.get(key) for key in keys))
        return name

    def _wait(self, transfers: Transfers, submit: Any) -> Finished | None:
        """Submits a transfer and waits for its result; returns None if it was rejected or the storage is closed."""
        number: int | None = None
        try:
            with self._ending:
                number = submit()
                self._awaited[id(transfers), number] = None
            while not transfers.wait([number], WAIT_ROUND_S):
                self._waits.note(f"{self._page_bytes} bytes per page")
            self._refusals.note(None)
            self._waits.note(None)
        except (RepriseError, ValueError) as error:
            self._refusals.note(str(error))
        finally:
            done = self._taken(transfers, number)
        return done

    def _taken(self, transfers: Transfers, number: int | None) -> Finished | None:
        """Returns the result of a transfer and stops waiting for it.

        Results of transfers with other waiting threads are stored for them; all others are dropped.
        """
        with self._ending:
            for done in transfers.finished():
                if (id(transfers), done.id) in self._awaited:
                    self._awaited[id(transfers), done.id] = done
            return None if number is None else self._awaited.pop((id(transfers), number), None)

    def _keys(self, keys: Sequence[bytes]) -> bytes:
        return block_keys(self._namespace, keys)
