"""vLLM engine under measurement in its own process, controlled by lines of JSON.

Runs in an environment with vLLM. The first line on standard input has the model's size and the engine's settings, each
further line a command. Each command gets one line of answer on standard output; all other output goes to standard
error. Ends at the end of the input.

The time to first token is the time from the submission of a request, alone in the engine, to the step with its first
token; the time to last token ends at the step with the last token. With back-to-back prompts, each is submitted at the
last token of the previous one, so its times include the remaining work for the previous prompt.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_model import VOCABULARY, model

ANSWER_TOKENS = 4
"""Generated tokens per prompt: the first one is timed, all are compared."""

CLEAR_WITHIN_S = 60.0
"""Timeout of a cache reset, which waits until no save uses blocks."""


class Engine:
    """A vLLM engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(**settings)
        self.params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        self.requests = 0

    def measure(self, seeds: list[int], tokens: int) -> dict[str, Any]:
        """Measures prompts one after another, each with an empty cache of the engine."""
        answers = []
        for seed in seeds:
            self.clear_cache()
            answers.append(self.answer(prompt(seed, tokens)))
        return {"answers": answers}

    def own_cache(self, seeds: list[int], tokens: int) -> dict[str, Any]:
        """Measures prompts one after another, each with an empty cache of the engine and then again from that cache."""
        answers, again = [], []
        for seed in seeds:
            self.clear_cache()
            answers.append(self.answer(prompt(seed, tokens)))
            again.append(self.answer(prompt(seed, tokens)))
        return {"answers": answers, "again": again}

    def back_to_back(self, seeds: list[int], tokens: int) -> dict[str, Any]:
        """Measures prompts one after another without a pause, with the current contents of the engine's cache."""
        prompts = [prompt(seed, tokens) for seed in seeds]
        return {"answers": [self.answer(each) for each in prompts]}

    def await_cached(self, seeds: list[int], tokens: int, cached: int, within: float) -> dict[str, Any]:
        """Waits until prompts are found in a cache: serves each until at least `cached` of its tokens are cached."""
        deadline = time.monotonic() + within
        found = []
        for seed in seeds:
            while True:
                self.clear_cache()
                answer = self.answer(prompt(seed, tokens))
                if answer["cached"] >= cached or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            found.append(answer["cached"])
        return {"cached": found}

    def answer(self, tokens: list[int]) -> dict[str, Any]:
        """Serves and measures one request."""
        engine = self.llm.llm_engine
        self.requests += 1
        started = time.perf_counter()
        engine.add_request(f"bench-{self.requests}", {"prompt_token_ids": tokens}, self.params)
        first, last, output = None, 0.0, None
        while engine.has_unfinished_requests():
            for output in engine.step():
                if first is None and output.outputs[0].token_ids:
                    first = time.perf_counter() - started
                last = time.perf_counter() - started
        if first is None or output is None:
            raise RuntimeError("the engine answered without a token")
        generated = list(output.outputs[0].token_ids)
        return {
            "ttft_ms": first * 1e3,
            "ttlt_ms": last * 1e3,
            "tokens": generated,
            "cached": output.num_cached_tokens or 0,
        }

    def clear_cache(self) -> None:
        """Clears the engine's own cache."""
        deadline = time.monotonic() + CLEAR_WITHIN_S
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise TimeoutError(f"blocks are still in use {CLEAR_WITHIN_S} s after the last request")
            time.sleep(0.005)

    def stop(self) -> None:
        """Ends the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()


def prompt(seed: int, tokens: int) -> list[int]:
    """Returns a prompt that shares no block with prompts of other seeds."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(tokens)]


def write_model(folder: Path, **size: int) -> Path:
    """Returns the model's folder, written by the first engine (hundreds of MB). Engines may start concurrently."""
    if not folder.exists():
        own = folder.with_name(f"{folder.name}.{os.getpid()}")
        model(own, **size)
        try:
            own.rename(folder)
        except OSError:
            # Another engine was first; its model is equal.
            shutil.rmtree(own)
    return folder


def main() -> None:
    """Reads settings and commands until the end of the input."""
    # The library and its child processes also print to standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**answer: Any) -> None:
        print(json.dumps(answer), file=answers)

    first = json.loads(sys.stdin.readline())
    started = time.monotonic()
    try:
        folder = write_model(Path(first["settings"]["model"]), **first["model"])
        engine = Engine({**first["settings"], "model": str(folder)})
    except Exception as error:  # vLLM's own message goes to the log
        send(error=f"{type(error).__name__}: {error}")
        raise
    send(ready=time.monotonic() - started)
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "measure": engine.measure,
        "own_cache": engine.own_cache,
        "back_to_back": engine.back_to_back,
        "settle": engine.await_cached,
    }
    try:
        for line in sys.stdin:
            command: dict[str, Any] = json.loads(line)
            name = command.pop("do")
            if name == "stop":
                break
            send(**commands[name](**command))
    except Exception as error:
        send(error=f"{type(error).__name__}: {error}")
        raise
    finally:
        engine.stop()
    send(stopped=True)


if __name__ == "__main__":
    main()
