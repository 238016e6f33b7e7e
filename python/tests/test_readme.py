"""The examples of python/README.md do what they say, against a real cluster."""

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

QUICK = "question.poll(0.005)"
"""What an engine can afford to wait; a busy test machine may need longer for its answer."""

BLOCK_COUNT = 8
"""Of the example's prompt."""

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
"""What holds behind a block of the README, by what is in it."""

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
"""What has happened before: somebody has saved the first block, the engine computes the others."""


@pytest.fixture
def demo(built: None, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster with room for blocks of 2 MiB."""
    cluster = Cluster(tmp_path / "cluster", arena=128 * MIB, pool=256 * MIB)
    yield cluster
    cluster.stop()


def program(socket: Path, *, checked: bool) -> str:
    """All Python of the README as one program, with the agent's socket and a patience that a busy machine needs.

    Args:
        socket: of the agent.
        checked: whether what holds before and behind its blocks is made and asserted.
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
    return text.replace(readme.SOCKET, str(socket)).replace(QUICK, "question.poll(60.0)")


def run(text: str, folder: Path) -> str:
    """Runs a program; what it has printed."""
    script = folder / "example.py"
    script.write_text(text)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_block_of_python_is_part_of_the_program() -> None:
    fences = [line for line in readme.TEXT.splitlines() if line.lstrip().startswith("```") and line.strip() != "```"]
    assert {fence.strip() for fence in fences} == {"```python", "```sh"}, "write Python as Python: it is run"
    assert len(readme.blocks("python")) == fences.count("```python")
    text = program(Path("/nonexistent"), checked=False)
    lines = [line for block in readme.blocks("python") for line in block.splitlines() if "SOCKET =" not in line]
    assert all(line in text or QUICK in line for line in lines)


def test_the_examples_save_and_load_what_they_say(demo: Cluster, tmp_path: Path) -> None:
    said = run(program(demo.agents[0].socket, checked=True), tmp_path).splitlines()
    whole = [True] * BLOCK_COUNT
    assert said[0].split(" ", 1)[1] == f"load {whole} 0 None"
    assert sorted(line.split(" ", 1)[1] for line in said[1:]) == [f"load {whole} 0 None", "save [] 0 None"]


def test_the_examples_run_as_they_are_shown_twice(demo: Cluster, tmp_path: Path) -> None:
    text = program(demo.agents[0].socket, checked=False)
    for _ in range(2):
        assert len(run(text, tmp_path).splitlines()) == 3


def test_every_configuration_that_is_shown_is_json_and_names_the_agents_socket() -> None:
    shown = [config for command in readme.blocks("sh") for config in readme.configurations(command)]
    assert len(shown) == "".join(readme.blocks("sh")).count("-config '{") == 3
    assert all(f'"socket": "{readme.SOCKET}"' in json.dumps(config) for config in shown)
