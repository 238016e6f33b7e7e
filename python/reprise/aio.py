"""The client for asyncio.

Each call runs on a thread of the client's own pool: the native half waits without the GIL, so the event loop and other
Python threads go on meanwhile. A task that is cancelled in a load or a save ends when native code has let go of the memory, within the
call's own patience: its blocks are the caller's again then. Other calls run on to their end by themselves; what they bring is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from reprise import Client, Durable, KvMemory, Layout, Loaded, Namespace, Saved

__all__ = ["AsyncClient"]

CALLS_MAX = 16
"""Calls of one client that run at a time; further ones wait for a thread."""

T = TypeVar("T")


class AsyncClient:
    """A session with this node's agent, as :class:`reprise.Client`; every call is awaited.

    Made by :meth:`connect`, usable in ``async with``.
    """

    def __init__(self, client: Client, pool: ThreadPoolExecutor | None = None) -> None:
        """Takes a session that is open."""
        self._client = client
        self._pool = pool or _new_pool()

    @classmethod
    async def connect(
        cls,
        socket: str | PathLike[str],
        namespace: Namespace,
        layout: Layout,
        *,
        tenant: str = "default",
        token_file: str | PathLike[str] | None = None,
        name: str = "python",
        timeout: float = 5.0,
    ) -> Self:
        """Opens a session; see :class:`reprise.Client`."""
        pool = _new_pool()

        def connect() -> Client:
            return Client(socket, namespace, layout, tenant=tenant, token_file=token_file, name=name, timeout=timeout)

        try:
            client = await asyncio.get_running_loop().run_in_executor(pool, connect)
        except BaseException:
            pool.shutdown(wait=False)
            raise
        return cls(client, pool)

    @property
    def blocking(self) -> Client:
        """The blocking client of the same session."""
        return self._client

    async def match(self, keys: bytes | Iterable[bytes], *, local: bool = False) -> list[int]:
        """See :meth:`reprise.Client.match`."""
        return await self._run(lambda: self._client.match(keys, local=local))

    async def save(
        self,
        keys: bytes | Iterable[bytes],
        memory: KvMemory,
        blocks: Sequence[int],
        *,
        parent: bytes | None = None,
        priority: Literal["low", "normal", "high"] = "normal",
        room_wait: float = 5.0,
    ) -> Saved:
        """See :meth:`reprise.Client.save`."""
        return await self._run_whole(
            lambda: self._client.save(keys, memory, blocks, parent=parent, priority=priority, room_wait=room_wait)
        )

    async def load(
        self,
        keys: bytes | Iterable[bytes],
        memory: KvMemory,
        blocks: Sequence[int],
        *,
        deadline: float = 5.0,
        local: bool = False,
    ) -> Loaded:
        """See :meth:`reprise.Client.load`."""
        return await self._run_whole(lambda: self._client.load(keys, memory, blocks, deadline=deadline, local=local))

    async def prefetch(self, keys: bytes | Iterable[bytes], *, deadline: float = 5.0, local: bool = False) -> int:
        """See :meth:`reprise.Client.prefetch`."""
        return await self._run(lambda: self._client.prefetch(keys, deadline=deadline, local=local))

    async def wait_durable(self, ticket: int, timeout: float = 30.0) -> Durable:
        """See :meth:`reprise.Client.wait_durable`."""
        return await self._run(lambda: self._client.wait_durable(ticket, timeout))

    async def stats(self) -> dict[str, int]:
        """See :meth:`reprise.Client.stats`."""
        return await self._run(self._client.stats)

    async def trim(self) -> int:
        """See :meth:`reprise.Client.trim`."""
        return await self._run(self._client.trim)

    async def close(self) -> None:
        """Ends the session; calls under way fail."""
        # Not on the pool, whose threads may all wait for this session.
        await asyncio.to_thread(self._client.close)
        self._pool.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        """Does nothing: the session is open."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the session."""
        await self.close()

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def _run_whole(self, call: Callable[[], T]) -> T:
        """Runs a call that touches the caller's memory: does not return before it has ended, or was never begun."""
        submitted = self._pool.submit(call)
        ended = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            if not submitted.cancel():
                await _end_of(ended)
            raise


async def _end_of(future: asyncio.Future[Any]) -> None:
    """Waits until there is a result, whatever it is and however often the task is cancelled meanwhile."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    if not future.cancelled():
        # Looked at, so that asyncio does not report an error that nobody was to hear of.
        future.exception()


def _new_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=CALLS_MAX, thread_name_prefix="reprise-aio")
