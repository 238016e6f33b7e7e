"""Control of a vLLM engine in another process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import readme
from engine_model import VOCABULARY

READY_WITHIN_S = 600.0
ANSWER_WITHIN_S = 120.0
STOPPED_WITHIN_S = 60.0
CLEARED_WITHIN_S = 20.0
BLOCK_TOKENS = 32

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # By default, an engine without a connector gets one core fewer.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}


def connector(socket: Path, **extra: Any) -> dict[str, Any]:
    """Returns a configuration with the connector: the one in docs/vllm.md."""
    config = readme.vllm_transfer_config()
    assert config["kv_connector_extra_config"] == {"socket": readme.SOCKET}
    # Whether blocks are loaded must not depend on the speed of this machine.
    config["kv_connector_extra_config"] = {"socket": str(socket), "load_or_recompute": False, **extra}
    return config


def python_path() -> str:
    """Returns the module path of an engine's processes: this process' path and the replacement of ``sched_yield``."""
    return os.pathsep.join([str(Path(__file__).parent / "calm"), *filter(None, [os.environ.get("PYTHONPATH")])])


class EngineFailed(Exception):
    """The engine has ended or did not start; has vLLM's error message."""


class Engine:
    """An engine process."""

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer: dict[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        configuration = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": 2048,
            "max_num_seqs": 16,
            "disable_log_stats": False,
            "seed": 1,
            "prefix_caching_hash_algo": readme.vllm_hash_algorithm(),
            **settings,
        }
        if transfer is not None:
            configuration["kv_transfer_config"] = transfer
        self.log = log
        self.answers, write_end = os.pipe()
        os.set_blocking(self.answers, False)
        self._received = b""
        with log.open("a") as output:
            self.child = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "engine_process.py"), str(write_end)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                pass_fds=[write_end],
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path(), **(environment or {})},
                start_new_session=True,
            )
        os.close(write_end)
        try:
            self.ready_after = self._ask(configuration, READY_WITHIN_S)["ready"]
        except BaseException:
            self.kill()
            raise

    def generate(self, prompts: list[list[int]], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """Returns the greedy tokens of prompts, and the number of cached tokens of each prompt."""
        return self._ask({"do": "generate", "prompts": prompts, "max_tokens": max_tokens, **more})

    def clear_cache(self) -> None:
        """Clears the engine's own prefix cache after the end of all saves."""
        deadline = time.monotonic() + CLEARED_WITHIN_S
        while not self._ask({"do": "reset"})["reset"]:
            assert time.monotonic() < deadline, "blocks are still in use"

    def metrics(self) -> dict[str, float]:
        """Returns the connector's metrics, after a request that makes the engine collect them."""
        self.generate([[VOCABULARY - 1]], max_tokens=1)
        return dict(self._ask({"do": "metrics"})["metrics"])

    def stop(self) -> None:
        """Stops the engine; kills it if it does not end."""
        try:
            self._ask({"do": "stop"}, STOPPED_WITHIN_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills the engine and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        os.close(self.answers)

    def _ask(self, command: dict[str, Any], within: float = ANSWER_WITHIN_S) -> dict[str, Any]:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(command) + "\n")
        self.child.stdin.flush()
        deadline = time.monotonic() + within
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not self._listen(left):
                state = "has ended" if left > 0 else f"has not answered within {within} s"
                raise EngineFailed(f"the engine {state}:\n{self.log.read_text()[-4000:]}")
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{answer['error']}\n{self.log.read_text()[-4000:]}")
        return dict(answer)

    def _listen(self, seconds: float) -> bool:
        """Waits for more bytes of an answer; returns whether more can arrive."""
        readable, _, _ = select.select([self.answers], [], [], min(seconds, 1.0))
        if not readable:
            return self.child.poll() is None
        received = os.read(self.answers, 1 << 16)
        self._received += received
        return bool(received)
