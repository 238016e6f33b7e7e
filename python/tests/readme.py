"""Examples of python/README.md and of the guides to engines: Python code and the engines' configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGES = ("python/README.md", "docs/vllm.md", "docs/sglang.md")
"""Pages with examples."""

TEXT = "".join((Path(__file__).parents[2] / page).read_text() for page in PAGES)
"""Text of all pages."""

SOCKET = "/run/reprise/agent.sock"
"""Agent's socket in all examples."""


def blocks(language: str) -> list[str]:
    """Returns the code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def vllm_command() -> str:
    """Returns the command line with the connector."""
    (command,) = [shown for shown in blocks("sh") if "RepriseConnector" in shown]
    return command


def configurations(command: str) -> list[dict[str, Any]]:
    """Returns the JSON values of a command line's options."""
    return [dict(json.loads(quoted)) for quoted in re.findall(r"-config '(\{.*?\})'", command, re.DOTALL)]


def vllm_transfer_config() -> dict[str, Any]:
    """Returns the ``--kv-transfer-config`` of the command line."""
    (config,) = configurations(vllm_command())
    return config


def vllm_hash_algorithm() -> str:
    """Returns the ``--prefix-caching-hash-algo`` of the command line."""
    named = re.search(r"--prefix-caching-hash-algo (\S+)", vllm_command())
    assert named is not None
    return named[1]


def hinted_request() -> str:
    """Returns the body of the HTTP request with KV hints."""
    (command,) = [shown for shown in blocks("sh") if "kv_hints" in shown]
    body = re.search(r"-d '(\{.*\})'", command, re.DOTALL)
    assert body is not None
    return body[1]
