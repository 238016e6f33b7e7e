"""Driving a vLLM engine from a test."""

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
FORGOTTEN_WITHIN_S = 20.0
BLOCK_TOKENS = 32

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Otherwise an engine without a connector gets one core fewer.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}


def connector(socket: Path, **extra: Any) -> dict[str, Any]:
    """The configuration that names the connector: the one that python/README.md shows."""
    config = readme.vllm_transfer_config()
    assert config["kv_connector_extra_config"] == {"socket": readme.SOCKET}
    config["kv_connector_extra_config"] = {"socket": str(socket), **extra}
    return config


def python_path() -> str:
    """Where an engine's processes find modules: as this one, and what lets others run while they wait."""
    return os.pathsep.join([str(Path(__file__).parent / "calm"), *filter(None, [os.environ.get("PYTHONPATH")])])


class EngineFailed(Exception):
    """The engine ended, or did not start; in vLLM's words."""


class Engine:
    """One engine."""

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer: dict[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        everything = {
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
            everything["kv_transfer_config"] = transfer
        self.log = log
        self.answers, write_end = os.pipe()
        os.set_blocking(self.answers, False)
        self._heard = b""
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
            self.ready_after = self._ask(everything, READY_WITHIN_S)["ready"]
        except BaseException:
            self.kill()
            raise

    def generate(self, prompts: list[list[int]], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """Greedy tokens of prompts, with how many of each prompt came from a cache."""
        return self._ask({"do": "generate", "prompts": prompts, "max_tokens": max_tokens, **more})

    def forget(self) -> None:
        """Empties the engine's own prefix cache, as soon as no save holds blocks."""
        give_up = time.monotonic() + FORGOTTEN_WITHIN_S
        while not self._ask({"do": "reset"})["reset"]:
            assert time.monotonic() < give_up, "requests still hold blocks"

    def metrics(self) -> dict[str, float]:
        """The connector's metrics. A request makes the engine collect what has happened since the last."""
        self.generate([[VOCABULARY - 1]], max_tokens=1)
        return dict(self._ask({"do": "metrics"})["metrics"])

    def stop(self) -> None:
        """Ends the engine in good order, or else."""
        try:
            self._ask({"do": "stop"}, STOPPED_WITHIN_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the engine and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        os.close(self.answers)

    def _ask(self, command: dict[str, Any], within: float = ANSWER_WITHIN_S) -> dict[str, Any]:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(command) + "\n")
        self.child.stdin.flush()
        give_up = time.monotonic() + within
        while b"\n" not in self._heard:
            left = give_up - time.monotonic()
            if left <= 0 or not self._listen(left):
                how = "has ended" if left > 0 else f"has not answered within {within} s"
                raise EngineFailed(f"the engine {how}:\n{self.log.read_text()[-4000:]}")
        line, _, self._heard = self._heard.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{answer['error']}\n{self.log.read_text()[-4000:]}")
        return dict(answer)

    def _listen(self, seconds: float) -> bool:
        """Waits for more of an answer; False: there will be none."""
        readable, _, _ = select.select([self.answers], [], [], min(seconds, 1.0))
        if not readable:
            return self.child.poll() is None
        heard = os.read(self.answers, 1 << 16)
        self._heard += heard
        return bool(heard)
