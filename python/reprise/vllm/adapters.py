"""Identification of LoRA adapters by their weights.

vLLM's block hash covers the name and path of an adapter only. A retrained adapter keeps both, and another node may have a
different adapter of the same name. So the keys of a request's blocks include a digest: of a sample of the adapter's files,
or of the commit of a hub snapshot. Blocks of an adapter that cannot be identified are neither loaded nor saved.

Files may be on a slow disk or a network, so a thread reads them, never the scheduler. The digest is computed once per
path; each request only checks whether the files are unchanged. vLLM may reload a changed adapter at any time, so blocks of
an adapter with changed files are no longer cached, until a request with ``load_inplace`` reloads it and its digest is
computed again.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reprise.adapters import AdapterFiles, Stamp
from reprise.repeated_log import RepeatedLog

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

PENDING_MAX = 256
"""Maximum number of queued identifications; further requests continue without Reprise."""


@dataclass
class AdapterIdentification:
    """Pending or finished identification of an adapter."""

    path: str
    is_reload: bool
    digest: bytes | None = None
    """Suffix of the block hashes of the adapter's requests, valid after the end; None: the adapter is not identified."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float) -> bool:
        """Waits for at most the given seconds; returns whether the identification has ended."""
        return self._ended.wait(seconds)

    def end(self) -> None:
        """Marks the end, with or without a digest."""
        self._ended.set()


@dataclass
class Adapters:
    """Digests of adapters, by path."""

    _known: dict[str, tuple[Stamp, bytes | None]] = field(default_factory=dict)
    """Stamps and digests by path, used only by the thread. No digest: the files changed while vLLM used them."""
    _pending: queue.Queue[AdapterIdentification] = field(default_factory=lambda: queue.Queue(PENDING_MAX))
    _thread: threading.Thread | None = None
    _errors: RepeatedLog = field(
        default_factory=lambda: RepeatedLog("KV of a LoRA adapter is neither loaded nor saved")
    )

    def identify(self, lora: LoRARequest) -> AdapterIdentification:
        """Starts to identify the adapter of a request."""
        identification = AdapterIdentification(lora.lora_path, lora.load_inplace)
        if self._thread is None:
            # A daemon thread: a hanging read must not keep the engine from exiting.
            self._thread = threading.Thread(target=self._run, name="reprise-adapters", daemon=True)
            self._thread.start()
        try:
            self._pending.put_nowait(identification)
        except queue.Full:
            identification.end()
        return identification

    def _run(self) -> None:
        while True:
            identification = self._pending.get()
            try:
                identification.digest = self._digest(identification)
                error = (
                    None
                    if identification.digest is not None
                    else "its files were not found, or changed while vLLM used them"
                )
            except Exception as exception:
                # The thread must survive any error: without it no adapter is identified.
                error = f"{type(exception).__name__}: {exception}"
            finally:
                identification.end()
            self._errors.note(None if error is None else f"{identification.path}: {error}")

    def _digest(self, identification: AdapterIdentification) -> bytes | None:
        path = identification.path
        files = AdapterFiles.find(path)
        if files is None:
            return None
        stamp = files.stamp()
        known = self._known.get(path)
        if known is not None and (known[0] == stamp or not identification.is_reload):
            if known[0] != stamp:
                self._known[path] = (known[0], None)
            return self._known[path][1]
        digest = files.digest()
        if files.stamp() != stamp:
            return None
        self._known[path] = (stamp, digest)
        return digest
