"""vLLM engine in its own process, controlled by lines of JSON.

Runs in vLLM's environment. The first line on standard input has the engine's settings, each further line a command.
Each command gets one line of answer on the descriptor of the command line (standard output is used by vLLM's log).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Reads settings and commands until the end of the input."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    settings = json.loads(sys.stdin.readline())
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    try:
        llm = LLM(**settings)
    except Exception as error:  # vLLM's message goes to the log; the test needs it too
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        raise
    print(json.dumps({"ready": time.monotonic() - started}), file=answers)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        print(json.dumps(run(llm, SamplingParams, command)), file=answers)
        if command["do"] == "stop":
            break


def lora_request(name: str, number: int, folder: str) -> Any:
    """Returns vLLM's request for an adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, folder)


def run(llm: Any, sampling: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Runs a command."""
    match command["do"]:
        case "generate":
            extra = {"kv_transfer_params": command["params"]} if command.get("params") else None
            params = sampling(temperature=0.0, max_tokens=command["max_tokens"], ignore_eos=True, extra_args=extra)
            prompts = []
            for tokens in command["prompts"]:
                prompt: dict[str, Any] = {"prompt_token_ids": tokens}
                if command.get("salt"):
                    prompt["cache_salt"] = command["salt"]
                prompts.append(prompt)
            lora = lora_request(*command["lora"]) if command.get("lora") else None
            started = time.monotonic()
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
            return {
                "seconds": time.monotonic() - started,
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "reasons": [output.outputs[0].finish_reason for output in outputs],
            }
        case "reset":
            return {"reset": llm.reset_prefix_cache()}
        case "metrics":
            metrics: dict[str, float] = {}
            for metric in llm.get_metrics():
                if any(part in metric.name for part in ("reprise", "external", "preemptions")):
                    metrics[metric.name] = getattr(metric, "value", None) or getattr(metric, "count", 0)
            return {"metrics": metrics}
        case "stop":
            llm.llm_engine.engine_core.shutdown()
            return {}
        case other:
            raise ValueError(f"unknown command {other}")


if __name__ == "__main__":
    main()
