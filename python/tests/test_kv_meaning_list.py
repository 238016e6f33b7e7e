"""Each entry of docs/KV-MEANING.md, the list of what changes the meaning of KV, names a test that exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LIST = TESTS.parents[1] / "docs" / "KV-MEANING.md"
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
ENTRIES_AT_LEAST = {"vLLM, connector": 20, "vLLM, tier": 5, "SGLang, storage": 30}
"""By the begin of a section's heading. An entry is removed together with the case that it is about."""


def entries(text: str) -> dict[str, list[list[str]]]:
    """Rows of the tables of a page, by the heading of their section."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("|"):
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    # The first rows of each table are its head and a rule.
    return {name: [row for row in rows if row[-1] != "Test" and set(row[-1]) != {"-"}] for name, rows in found.items()}


@functools.cache
def named_tests(file: Path) -> frozenset[str]:
    """Names of the tests of a file."""
    return frozenset(node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))


def without_test(rows: list[list[str]]) -> list[str]:
    """Entries that name no test, or one that does not exist."""
    missing = []
    for row in rows:
        named = NAMED.findall(row[-1])
        if len(row) != 3 or not all(row) or not named:
            missing.append(f"{row[0]}: no test")
        missing += [f"{file}::{test}" for file, test in named if not exists(TESTS / file, test)]
    return missing


def exists(file: Path, test: str) -> bool:
    """Whether a file has a test."""
    return file.is_file() and test in named_tests(file)


@pytest.mark.parametrize("heading", ENTRIES_AT_LEAST)
def test_each_entry_of_an_engine_names_a_test_that_exists(heading: str) -> None:
    (rows,) = (rows for name, rows in entries(LIST.read_text()).items() if name.startswith(heading))
    assert len(rows) >= ENTRIES_AT_LEAST[heading]
    assert without_test(rows) == []


def test_an_entry_without_a_test_or_with_one_that_does_not_exist_is_found() -> None:
    here = Path(__file__).name
    page = f"""## One
| What | How | Test |
|---|---|---|
| right | in the key | `{here}::test_each_entry_of_an_engine_names_a_test_that_exists` |
| none | in the key | |
| gone | in the key | `{here}::test_gone` |
| no file | in the key | `gone.py::test_gone` |
"""
    assert without_test(entries(page)["One"]) == ["none: no test", f"{here}::test_gone", "gone.py::test_gone"]
