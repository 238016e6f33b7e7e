"""What python/README.md shows: its Python, and the configuration of vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TEXT = (Path(__file__).parents[1] / "README.md").read_text()
SOCKET = "/run/reprise/agent.sock"
"""The agent's, wherever one is named."""


def blocks(language: str) -> list[str]:
    """What is shown of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def vllm_command() -> str:
    """The command line that names the connector."""
    (command,) = [shown for shown in blocks("sh") if "RepriseConnector" in shown]
    return command


def configurations(command: str) -> list[dict[str, Any]]:
    """What the options of a command line have in JSON."""
    return [dict(json.loads(quoted)) for quoted in re.findall(r"-config '(\{.*?\})'", command, re.DOTALL)]


def vllm_transfer_config() -> dict[str, Any]:
    """Its ``--kv-transfer-config``."""
    (config,) = configurations(vllm_command())
    return config


def vllm_hash_algorithm() -> str:
    """Its ``--prefix-caching-hash-algo``."""
    named = re.search(r"--prefix-caching-hash-algo (\S+)", vllm_command())
    assert named is not None
    return named[1]
