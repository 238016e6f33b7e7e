"""Tests that each entry of docs/KV-MEANING.md names an existing test."""

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
"""Minimum number of entries per section, by the start of its heading. An entry is removed together with its case."""


def entries(text: str) -> dict[str, list[list[str]]]:
    """Returns the rows of a page's tables, by the heading of their section."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("|"):
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    # The first two rows of each table are its header and the separator.
    return {name: [row for row in rows if row[-1] != "Test" and set(row[-1]) != {"-"}] for name, rows in found.items()}


@functools.cache
def named_tests(file: Path) -> frozenset[str]:
    """Returns the names of the tests in a file."""
    return frozenset(node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))


def without_test(rows: list[list[str]]) -> list[str]:
    """Returns the entries without a test, and the named tests that do not exist."""
    missing = []
    for row in rows:
        named = NAMED.findall(row[-1])
        if len(row) != 3 or not all(row) or not named:
            missing.append(f"{row[0]}: no test")
        missing += [f"{file}::{test}" for file, test in named if not exists(TESTS / file, test)]
    return missing


def exists(file: Path, test: str) -> bool:
    """Returns whether a file has a test."""
    return file.is_file() and test in named_tests(file)


@pytest.mark.parametrize("heading", ENTRIES_AT_LEAST)
def test_each_entry_of_an_engine_names_an_existing_test(heading: str) -> None:
    (rows,) = (rows for name, rows in entries(LIST.read_text()).items() if name.startswith(heading))
    assert len(rows) >= ENTRIES_AT_LEAST[heading]
    assert without_test(rows) == []


def test_entries_without_an_existing_test_are_found() -> None:
    here = Path(__file__).name
    page = f"""## One
| What | How | Test |
|---|---|---|
| valid | in the key | `{here}::test_each_entry_of_an_engine_names_an_existing_test` |
| none | in the key | |
| gone | in the key | `{here}::test_gone` |
| no file | in the key | `gone.py::test_gone` |
"""
    assert without_test(entries(page)["One"]) == ["none: no test", f"{here}::test_gone", "gone.py::test_gone"]
