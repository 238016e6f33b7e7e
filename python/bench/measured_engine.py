"""vLLM engine whose steps are measured, controlled by lines of JSON.

Runs in an environment with vLLM and, for a connector, with the package ``reprise``. The first line on standard input
has the engine's settings and, if the engine shall write its own model, the model's ``config.json``. Each further line
is a command. Each line gets one line of answer on standard output; all other output goes to standard error. Ends at
the end of the input.

The engine runs in this process, so the composition of each step is known: pairs of computed tokens and tokens before
them, one for each sequence. Times begin at the nominal arrival of a request and end at the return of the step with
its first or last token. A prompt is described by seeds, so that two prompts can share a prefix.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLEAR_WITHIN_S = 60.0
"""Timeout of a cache reset, which waits until no save uses blocks."""

LONGEST_NAP_S = 0.005
"""Longest sleep before the next arrival is checked again."""


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, settings: dict[str, Any], config: dict[str, Any] | None) -> None:
        from vllm import LLM, SamplingParams

        if config is not None:
            folder = Path(settings["model"])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(config))
        self.llm = LLM(**settings)
        self.engine = self.llm.llm_engine
        self.sampling = SamplingParams
        self.vocabulary = self.engine.model_config.get_vocab_size()
        self.requests = 0
        self.composition: list[tuple[int, int]] = []
        scheduler = self.core.scheduler
        schedule = scheduler.schedule

        def recorded(*arguments: Any) -> Any:
            output = schedule(*arguments)
            self.composition = [
                (tokens, scheduler.requests[name].num_computed_tokens - tokens)
                for name, tokens in output.num_scheduled_tokens.items()
            ]
            return output

        scheduler.schedule = recorded

    @property
    def core(self) -> Any:
        """The engine core, which this process runs."""
        return self.engine.engine_core.engine_core

    def describe(self) -> dict[str, Any]:
        """Describes model, cache and versions."""
        import torch
        import vllm

        model = self.engine.model_config
        text = model.hf_text_config
        parallel = self.engine.vllm_config.parallel_config
        cache = self.engine.vllm_config.cache_config
        return {
            "vllm": getattr(vllm, "__version__", "unknown"),
            "threads": torch.get_num_threads(),
            "parameters": parameters(model.hf_config),
            "layers": model.get_num_layers(parallel),
            "hidden": model.get_hidden_size(),
            "query_heads": text.num_attention_heads,
            "kv_heads": model.get_total_num_kv_heads(),
            "head_dim": model.get_head_size(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "context": model.max_model_len,
            "block_tokens": cache.block_size,
            "blocks": cache.num_gpu_blocks,
        }

    def steps(self, runs: list[dict[str, Any]]) -> dict[str, Any]:
        """Runs groups of requests that arrive at once, and measures each step: composition and seconds."""
        measured = []
        for run in runs:
            for request in run["requests"]:
                self.add(request)
            steps = []
            while self.engine.has_unfinished_requests():
                began = time.perf_counter()
                self.engine.step()
                steps.append({"chunks": self.composition, "seconds": time.perf_counter() - began})
            measured.append(steps)
        return {"runs": measured}

    def loads(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Serves requests one after another with an empty cache of the engine.

        ``wait`` is the time to first token without the last step, which computes the tokens that were not loaded.
        """
        prompts = [self.prompt(request) for request in requests]
        answers = []
        for request, prompt in zip(requests, prompts, strict=True):
            self.clear_cache()
            began = time.perf_counter()
            name = self.add(request, prompt)
            first = wait = cached = 0.0
            while self.engine.has_unfinished_requests():
                step = time.perf_counter()
                outputs = self.engine.step()
                if not first and any(output.request_id == name and output.outputs[0].token_ids for output in outputs):
                    first, wait = time.perf_counter() - began, step - began
                    cached = outputs[0].num_cached_tokens or 0
            answers.append({"ttft": first, "wait": wait, "cached": cached})
        return {"answers": answers}

    def serve(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Serves requests that arrive at given times, beginning with an empty cache of the engine."""
        self.clear_cache()
        prompts = [self.prompt(request) for request in requests]
        answers: dict[str, dict[str, Any]] = {}
        began, following = time.perf_counter(), 0
        while following < len(requests) or self.engine.has_unfinished_requests():
            now = time.perf_counter() - began
            while following < len(requests) and requests[following]["at"] <= now:
                request = requests[following]
                answers[self.add(request, prompts[following])] = {"at": request["at"], "ttft": None}
                following += 1
            if not self.engine.has_unfinished_requests():
                time.sleep(min(LONGEST_NAP_S, max(0.0, requests[following]["at"] - now)))
                continue
            outputs = self.engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                answer = answers[output.request_id]
                if answer["ttft"] is None and output.outputs[0].token_ids:
                    answer["ttft"] = now - answer["at"]
                    answer["cached"] = output.num_cached_tokens or 0
                if output.finished:
                    answer["end"] = now
        return {"answers": list(answers.values())}

    def prompt(self, request: dict[str, Any]) -> list[int]:
        """Returns the tokens of a prompt: first those of the prefix' seed, then others."""
        tokens: list[int] = []
        for seed, count in ((request["prefix_seed"], request["prefix"]), (request["seed"], request["own"])):
            source = random.Random(seed)
            tokens += [source.randrange(3, self.vocabulary) for _ in range(count)]
        return tokens

    def add(self, request: dict[str, Any], prompt: list[int] | None = None) -> str:
        """Submits a request; returns its name."""
        self.requests += 1
        name = f"measured-{self.requests}"
        extra = None if request["is_stored"] else {"kv_transfer_params": {"kv_no_store": True}}
        params = self.sampling(temperature=0.0, max_tokens=request["output"], ignore_eos=True, extra_args=extra)
        tokens = self.prompt(request) if prompt is None else prompt
        self.engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def clear_cache(self) -> None:
        """Clears the engine's own cache."""
        deadline = time.monotonic() + CLEAR_WITHIN_S
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise TimeoutError(f"blocks are still in use {CLEAR_WITHIN_S} s after the last request")
            # Steps without requests end saves.
            self.engine.step()
            time.sleep(0.002)

    def stop(self) -> None:
        """Ends the engine."""
        self.engine.engine_core.shutdown()


def parameters(config: Any) -> int:
    """Returns the number of weights of a model; shared weights count once.

    The engine's own model has most of its weights in packed form only.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(int(each.numel()) for each in model.parameters())


def main() -> None:
    """Reads settings and commands until the end of the input."""
    # The library also prints to standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**answer: Any) -> None:
        print(json.dumps(answer), file=answers)

    first = json.loads(sys.stdin.readline())
    try:
        engine = Engine(first["settings"], first["config"])
        send(**engine.describe())
    except Exception as error:  # vLLM's own message goes to the log
        send(error=f"{type(error).__name__}: {error}")
        raise
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "steps": engine.steps,
        "loads": engine.loads,
        "serve": engine.serve,
    }
    try:
        for line in sys.stdin:
            command: dict[str, Any] = json.loads(line)
            send(**commands[command.pop("do")](**command))
    except Exception as error:
        send(error=f"{type(error).__name__}: {error}")
        raise
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
