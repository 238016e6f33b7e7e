"""A vLLM engine under measurement, in a process of its own, driven by lines of JSON.

Runs in an environment that has vLLM. First line on standard input: the model's size and the engine's settings; then one
command a line. Each is answered by one line on what was standard output; all else that is printed goes to standard
error. Ends with its input.

A time to first token is that from the submission of a request, alone in the engine, to the step that gave its first token; one to the
last token goes on to the step that gave that. Prompts that go back to back are submitted each in the moment in which the one before has
its last token: what is still done for that one is in the times of this one.
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
"""Generated for each prompt: the first one is timed, all are compared."""

FORGET_WITHIN_S = 60.0
"""A cache is reset only when no save holds blocks any more."""


class Engine:
    """One engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(**settings)
        self.params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        self.requests = 0

    def measure(self, seeds: list[int], tokens: int) -> dict[str, Any]:
        """Prompts one after the other, each with an empty cache of the engine's own."""
        answers = []
        for seed in seeds:
            self.forget()
            answers.append(self.answer(prompt(seed, tokens)))
        return {"answers": answers}

    def own_cache(self, seeds: list[int], tokens: int) -> dict[str, Any]:
        """Prompts one after the other, each with the engine's own cache empty, and at once again from that cache."""
        answers, again = [], []
        for seed in seeds:
            self.forget()
            answers.append(self.answer(prompt(seed, tokens)))
            again.append(self.answer(prompt(seed, tokens)))
        return {"answers": answers, "again": again}

    def back_to_back(self, seeds: list[int], tokens: int) -> dict[str, Any]:
        """Prompts one after the other without a pause, with whatever is in the engine's cache."""
        prompts = [prompt(seed, tokens) for seed in seeds]
        return {"answers": [self.answer(each) for each in prompts]}

    def settle(self, seeds: list[int], tokens: int, cached: int, within: float) -> dict[str, Any]:
        """Waits until prompts are found in a cache: asks for each until so many of its tokens are."""
        give_up = time.monotonic() + within
        found = []
        for seed in seeds:
            while True:
                self.forget()
                answer = self.answer(prompt(seed, tokens))
                if answer["cached"] >= cached or time.monotonic() > give_up:
                    break
                time.sleep(0.05)
            found.append(answer["cached"])
        return {"cached": found}

    def answer(self, tokens: list[int]) -> dict[str, Any]:
        """One request."""
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
            raise RuntimeError("the engine has answered without a token")
        said = list(output.outputs[0].token_ids)
        return {
            "ttft_ms": first * 1e3,
            "ttlt_ms": last * 1e3,
            "tokens": said,
            "cached": output.num_cached_tokens or 0,
        }

    def forget(self) -> None:
        """Empties the engine's own cache."""
        give_up = time.monotonic() + FORGET_WITHIN_S
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > give_up:
                raise TimeoutError(f"blocks are still in use {FORGET_WITHIN_S} s after the last request")
            time.sleep(0.005)

    def stop(self) -> None:
        """Ends the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()


def prompt(seed: int, tokens: int) -> list[int]:
    """A prompt that shares nothing with that of another seed."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(tokens)]


def written(folder: Path, **size: int) -> Path:
    """The model, written by the first engine that wants it: hundreds of megabytes. Several may start together."""
    if not folder.exists():
        own = folder.with_name(f"{folder.name}.{os.getpid()}")
        model(own, **size)
        try:
            own.rename(folder)
        except OSError:
            # Another engine was first; its model is the same.
            shutil.rmtree(own)
    return folder


def main() -> None:
    """Reads settings and commands until the end of its input."""
    # The library and its children print to standard output, too.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers)

    first = json.loads(sys.stdin.readline())
    started = time.monotonic()
    try:
        folder = written(Path(first["settings"]["model"]), **first["model"])
        engine = Engine({**first["settings"], "model": str(folder)})
    except Exception as error:  # vLLM's own words go to the log
        say(error=f"{type(error).__name__}: {error}")
        raise
    say(ready=time.monotonic() - started)
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "measure": engine.measure,
        "own_cache": engine.own_cache,
        "back_to_back": engine.back_to_back,
        "settle": engine.settle,
    }
    try:
        for line in sys.stdin:
            command: dict[str, Any] = json.loads(line)
            name = command.pop("do")
            if name == "stop":
                break
            say(**commands[name](**command))
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        raise
    finally:
        engine.stop()
    say(stopped=True)


if __name__ == "__main__":
    main()
