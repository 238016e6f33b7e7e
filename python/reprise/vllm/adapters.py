"""What tells LoRA adapters apart besides their name and path, which are in vLLM's block hash: their weights.

An adapter that was trained again lies where it lay before, and another node has another one of the same name: so a digest of a sample of its
files goes into the keys of its requests' blocks. An adapter of the hub has the commit of its snapshot. What cannot be told apart is neither
loaded nor saved.

Files may lie on a slow disk or a network, so a thread reads them, never the scheduler. The sample is taken once a path; for each
request it is looked whether the files are still those. vLLM reads an adapter again when it has forgotten it meanwhile, so blocks of one whose files
have changed are not kept any more, until it is to be read anew (``load_inplace``), which is sampled again.
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

LOOKS_MAX = 256
"""Looks that wait for the thread; a request beyond that goes on without Reprise."""


@dataclass
class AdapterLook:
    """A look at an adapter, which a thread takes."""

    path: str
    is_anew: bool
    digest: bytes | None = None
    """What goes behind the block hashes of its requests, once it is known; None: it cannot be told from others."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def wait(self, patience_s: float) -> bool:
        """Whether it has ended, after so many seconds at the most."""
        return self._ended.wait(patience_s)

    def end(self) -> None:
        """The digest is there, or there is none."""
        self._ended.set()


@dataclass
class Adapters:
    """Digests of adapters by their path."""

    _known: dict[str, tuple[Stamp, bytes | None]] = field(default_factory=dict)
    """The thread's alone. Without a digest: its files have changed under vLLM."""
    _looks: queue.Queue[AdapterLook] = field(default_factory=lambda: queue.Queue(LOOKS_MAX))
    _thread: threading.Thread | None = None
    _errors: RepeatedLog = field(
        default_factory=lambda: RepeatedLog("KV of a LoRA adapter is neither loaded nor saved")
    )

    def look(self, lora: LoRARequest) -> AdapterLook:
        """Begins a look at the adapter of a request, as it is from now on."""
        look = AdapterLook(lora.lora_path, lora.load_inplace)
        if self._thread is None:
            # A daemon: one that hangs in a read keeps no engine from ending.
            self._thread = threading.Thread(target=self._run, name="reprise-adapters", daemon=True)
            self._thread.start()
        try:
            self._looks.put_nowait(look)
        except queue.Full:
            look.end()
        return look

    def _run(self) -> None:
        while True:
            look = self._looks.get()
            try:
                look.digest = self._digest(look)
                why = None if look.digest is not None else "no files of it are found, or they have changed under vLLM"
            except Exception as error:
                # Whatever it is: without this thread no adapter would be told from others any more.
                why = f"{type(error).__name__}: {error}"
            finally:
                look.end()
            self._errors.note(None if why is None else f"{look.path}: {why}")

    def _digest(self, look: AdapterLook) -> bytes | None:
        files = AdapterFiles.find(look.path)
        if files is None:
            return None
        stamp = files.stamp()
        known = self._known.get(look.path)
        if known is not None and (known[0] == stamp or not look.is_anew):
            if known[0] != stamp:
                self._known[look.path] = (known[0], None)
            return self._known[look.path][1]
        digest = files.digest()
        if files.stamp() != stamp:
            return None
        self._known[look.path] = (stamp, digest)
        return digest
