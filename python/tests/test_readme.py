"""Runs the examples of python/README.md and of the guides to engines on a real cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import readme
from cluster import MIB, Cluster

QUICK = "match.poll(0.005)"
"""Wait that suits an engine; a busy test machine may need longer."""

BLOCK_COUNT = 8
"""Blocks of the example's prompt."""

CHECKS = {
    "with Client(": f"""
assert saved.committed == {BLOCK_COUNT - 1} and usable == 1, (usable, saved.statuses)
assert all(np.all(layer[block] == block) for layer in layers for block in range(1, {BLOCK_COUNT}))
""",
    "= Session(": f"""
assert (ended.id, ended.kind, ended.ok, ended.error) == (load, "load", [True] * {BLOCK_COUNT}, None), ended.error
assert all(np.all(layer[32 + block] == layer[block]) for layer in layers for block in range({BLOCK_COUNT}))
assert transfers.finished() == []
""",
    "load_by_layers(": f"""
assert all(np.all(layer[32 + block] == layer[block]) for layer in layers for block in range({BLOCK_COUNT}))
with Client(SOCKET, namespace, layout) as client:
    assert client.load(new_keys, memory, [41]).leading == 1
assert all(np.all(layer[41] == 7) for layer in layers)
""",
}
"""Assertions after a code block of the pages, by a text in the block."""

BEFORE = {
    "with Client(": """
with Client(SOCKET, namespace, layout) as client:
    client.save(keys[:16], memory, [0])
for block in range(1, 8):
    for layer in layers:
        layer[block] = block
""",
    "load_by_layers(": """
for layer in layers:
    layer[32:40] = 0
    layer[40] = 7
""",
}
"""Code before a code block: the first block is already saved, the engine computes the others."""


@pytest.fixture
def demo(built: None, tmp_path: Path) -> Iterator[Cluster]:
    """Cluster with memory for blocks of 2 MiB."""
    cluster = Cluster(tmp_path / "cluster", arena=128 * MIB, pool=256 * MIB)
    yield cluster
    cluster.stop()


def program(socket: Path, *, checked: bool) -> str:
    """Returns all Python of the pages as one program, with the agent's socket and a long wait.

    Args:
        socket: socket of the agent.
        checked: whether to add `BEFORE` and `CHECKS`.
    """
    parts = []
    for block in readme.blocks("python"):
        before = next((text for name, text in BEFORE.items() if name in block), "")
        imports = re.match(r"(from reprise import .*\n)?", block)
        assert imports is not None
        parts += [imports[0], before if checked else "", block[imports.end() :]]
        parts += [text for name, text in CHECKS.items() if checked and name in block]
    text = "\n".join(parts)
    assert text.count(readme.SOCKET) == text.count(QUICK) == 1
    return text.replace(readme.SOCKET, str(socket)).replace(QUICK, "match.poll(60.0)")


def run(text: str, folder: Path) -> str:
    """Runs a program and returns its output."""
    script = folder / "example.py"
    script.write_text(text)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_python_block_is_part_of_the_program() -> None:
    fences = [line for line in readme.TEXT.splitlines() if line.lstrip().startswith("```") and line.strip() != "```"]
    assert {fence.strip() for fence in fences} == {"```python", "```sh"}, (
        "mark Python as `python`, so that it is tested"
    )
    assert len(readme.blocks("python")) == fences.count("```python")
    text = program(Path("/nonexistent"), checked=False)
    lines = [line for block in readme.blocks("python") for line in block.splitlines() if "SOCKET =" not in line]
    assert all(line in text or QUICK in line for line in lines)


def test_the_examples_save_and_load_their_blocks(demo: Cluster, tmp_path: Path) -> None:
    output = run(program(demo.agents[0].socket, checked=True), tmp_path).splitlines()
    all_ok = [True] * BLOCK_COUNT
    assert output[0].split(" ", 1)[1] == f"load {all_ok} 0 None"
    assert sorted(line.split(" ", 1)[1] for line in output[1:]) == [f"load {all_ok} 0 None", "save [] 0 None"]


def test_the_examples_run_unchanged_twice(demo: Cluster, tmp_path: Path) -> None:
    text = program(demo.agents[0].socket, checked=False)
    for _ in range(2):
        assert len(run(text, tmp_path).splitlines()) == 3


def test_every_configuration_is_json_with_the_agent_s_socket() -> None:
    configs = [config for command in readme.blocks("sh") for config in readme.configurations(command)]
    assert len(configs) == "".join(readme.blocks("sh")).count("-config '{") == 3
    assert all(f'"socket": "{readme.SOCKET}"' in json.dumps(config) for config in configs)
