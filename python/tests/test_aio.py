"""A cancelled task ends only when native code no longer uses its memory."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from reprise.aio import CALLS_MAX, AsyncClient

LONG_S = 60.0


class SlowClient:
    """A client whose loads and saves end when the test allows it."""

    def __init__(self, error: Exception | None = None) -> None:
        """Creates a client whose calls raise this error, if given."""
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.ended = 0
        self._error = error

    def load(self, *_: Any, **__: Any) -> None:
        """Blocks until the call may end."""
        self.begun.set()
        assert self.may_end.wait(LONG_S)
        self.ended += 1
        if self._error is not None:
            raise self._error

    save = load


async def cancelled_while_at_work(client: SlowClient, call: str) -> asyncio.Task[Any]:
    """Returns a task that was cancelled twice during a native call."""
    wrapped = AsyncClient(client)  # type: ignore[arg-type]
    task = asyncio.ensure_future(getattr(wrapped, call)(b"", None, []))
    while not client.begun.is_set():
        await asyncio.sleep(0)
    for _ in range(2):
        task.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("call", ["load", "save"])
@pytest.mark.parametrize("error", [None, ValueError("no such block")])
def test_cancelled_call_ends_after_native_code(call: str, error: Exception | None) -> None:
    client = SlowClient(error)

    async def main() -> None:
        task = await cancelled_while_at_work(client, call)
        assert not task.done(), "the task ended during the native call"
        client.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.ended == 1

    asyncio.run(main())


def test_unstarted_call_is_cancelled_at_once() -> None:
    client = SlowClient()

    async def main() -> None:
        wrapped = AsyncClient(client)  # type: ignore[arg-type]
        busy = [asyncio.ensure_future(wrapped.load(b"", None, [])) for _ in range(CALLS_MAX)]  # type: ignore[arg-type]
        waiting = asyncio.ensure_future(wrapped.load(b"", None, []))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        client.may_end.set()
        await asyncio.gather(*busy)
        assert client.ended == CALLS_MAX

    asyncio.run(main())
