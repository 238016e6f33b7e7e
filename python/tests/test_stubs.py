"""The declared types match the native module."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import reprise
from reprise import _native

STUBS = ast.parse(Path(_native.__file__).with_name("_native.pyi").read_text())


def declared() -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """Returns the public classes and functions of the stubs by name."""
    found = (node for node in STUBS.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return {node.name: node for node in found if not node.name.startswith("_")}


def members(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Returns the public methods and properties that a stub declares."""
    found = (member for member in node.body if isinstance(member, ast.FunctionDef))
    return {member.name: member for member in found if not member.name.startswith("_")}


def parameters(node: ast.FunctionDef) -> list[str]:
    """Returns the names of a function's parameters without ``self`` and ``cls``."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]


def test_every_native_name_is_declared_and_exported() -> None:
    native = {name for name in vars(_native) if not name.startswith("_")}
    assert set(declared()) == native
    assert native | {"Source"} == set(reprise.__all__)
    assert all(hasattr(reprise, name) for name in reprise.__all__)


def test_every_native_method_is_documented_and_declared_with_its_parameters() -> None:
    for name, stub in declared().items():
        native = getattr(_native, name)
        assert inspect.getdoc(native), name
        if isinstance(stub, ast.FunctionDef):
            assert list(inspect.signature(native).parameters) == parameters(stub), name
            continue
        if issubclass(native, Exception):
            assert name == "RepriseError" or issubclass(native, reprise.RepriseError)
            continue
        there = {member for member in vars(native) if not member.startswith("_")}
        assert set(members(stub)) == there, name
        for member, declaration in members(stub).items():
            found = vars(native)[member]
            assert inspect.getdoc(found), f"{name}.{member}"
            if callable(found):
                names = [parameter for parameter in inspect.signature(found).parameters if parameter != "self"]
                assert names == parameters(declaration), f"{name}.{member}"
        constructors = [node for node in stub.body if isinstance(node, ast.FunctionDef) and node.name == "__new__"]
        for constructor in constructors:
            assert list(inspect.signature(native).parameters) == parameters(constructor), name
