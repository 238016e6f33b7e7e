"""Client for asyncio.

Each call runs on a thread of the client's pool. Native code waits without the GIL, so the event loop and other Python
threads keep running.

If a task is cancelled in a load or a save, the cancellation completes only when native code no longer uses the memory,
at most after the call's own timeout. Then the caller may reuse the blocks. Other cancelled calls finish in the
background, and their results are released.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from reprise import BlocksReport, Client, Durable, KvMemory, Layout, Loaded, Namespace, Saved

__all__ = ["AsyncClient"]

CALLS_MAX = 16
"""Maximum number of concurrent calls of one client; further calls wait for a thread."""

T = TypeVar("T")


class AsyncClient:
    """Asynchronous session with this node's agent; see :class:`reprise.Client`.

    Created by :meth:`connect`; can be used in ``async with``.
    """

    def __init__(self, client: Client, pool: ThreadPoolExecutor | None = None) -> None:
        """Wraps an open session."""
        self._client = client
        self._pool = pool or _new_pool()

    @classmethod
    async def connect(
        cls,
        socket: str | PathLike[str],
        namespace: Namespace,
        layout: Layout,
        *,
        token_file: str | PathLike[str] | None = None,
        name: str = "python",
        timeout: float = 5.0,
    ) -> Self:
        """Opens a session; see :class:`reprise.Client`."""
        pool = _new_pool()

        def connect() -> Client:
            return Client(socket, namespace, layout, token_file=token_file, name=name, timeout=timeout)

        try:
            client = await asyncio.get_running_loop().run_in_executor(pool, connect)
        except BaseException:
            pool.shutdown(wait=False)
            raise
        return cls(client, pool)

    @property
    def blocking(self) -> Client:
        """Blocking client of the same session."""
        return self._client

    async def match(
        self,
        keys: bytes | Iterable[bytes],
        *,
        local: bool = False,
        all_ranks: bool = False,
        position: int | None = None,
    ) -> list[int]:
        """See :meth:`reprise.Client.match`."""
        return await self._run(lambda: self._client.match(keys, local=local, all_ranks=all_ranks, position=position))

    async def save(
        self,
        keys: bytes | Iterable[bytes],
        memory: KvMemory,
        blocks: Sequence[int],
        *,
        parent: bytes | None = None,
        position: int | None = None,
        priority: Literal["low", "normal", "high"] = "normal",
        room_wait: float = 5.0,
    ) -> Saved:
        """See :meth:`reprise.Client.save`."""
        return await self._run_whole(
            lambda: self._client.save(
                keys, memory, blocks, parent=parent, position=position, priority=priority, room_wait=room_wait
            )
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

    async def pin(self, keys: bytes | Iterable[bytes], ttl: float) -> BlocksReport:
        """See :meth:`reprise.Client.pin`."""
        return await self._run(lambda: self._client.pin(keys, ttl))

    async def unpin(self, keys: bytes | Iterable[bytes]) -> BlocksReport:
        """See :meth:`reprise.Client.unpin`."""
        return await self._run(lambda: self._client.unpin(keys))

    async def start_prefetch(self, keys: bytes | Iterable[bytes]) -> BlocksReport:
        """See :meth:`reprise.Client.start_prefetch`."""
        return await self._run(lambda: self._client.start_prefetch(keys))

    async def demote(self, keys: bytes | Iterable[bytes]) -> BlocksReport:
        """See :meth:`reprise.Client.demote`."""
        return await self._run(lambda: self._client.demote(keys))

    async def delete(self, keys: bytes | Iterable[bytes]) -> BlocksReport:
        """See :meth:`reprise.Client.delete`."""
        return await self._run(lambda: self._client.delete(keys))

    async def trim(self) -> int:
        """See :meth:`reprise.Client.trim`."""
        return await self._run(self._client.trim)

    async def close(self) -> None:
        """Ends the session; running calls fail."""
        # Not on the pool: all its threads may be waiting for this session.
        await asyncio.to_thread(self._client.close)
        self._pool.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        """Returns the client; the session is already open."""
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
        """Runs a call that uses the caller's memory; returns only after the call has ended or was cancelled unstarted."""
        submitted = self._pool.submit(call)
        ended = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            if not submitted.cancel():
                await _end_of(ended)
            raise


async def _end_of(future: asyncio.Future[Any]) -> None:
    """Waits until the future is done, even if the task is cancelled again in the meantime."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    if not future.cancelled():
        # Retrieve the exception: otherwise asyncio logs that it was never retrieved.
        future.exception()


def _new_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=CALLS_MAX, thread_name_prefix="reprise-aio")
