"""Calls of the project's own functions name their arguments where there are many."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training import ROOT

FOLDERS = ("moevement_core", "megatron/moevement", "moevement_cli", "examples", "scripts")
OWN = ("moevement_core", "megatron.moevement", "moevement_cli")
MOST = 4
"""Largest number of arguments without a name. A reader cannot tell more of them apart."""


def _variadic() -> frozenset[str]:
    """Return the names of own functions that take any number of arguments."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8")) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    ]
    return frozenset(
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.args.vararg is not None
    )


VARIADIC = _variadic()


def long_calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and callee of each call of an own function or class with more than :data:`MOST` unnamed arguments.

    Methods are found only if a class of the same module calls its own; calls with ``*arguments`` count as named.
    """
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(OWN):
            own |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > MOST:
            callee = node.func
            name = callee.id if isinstance(callee, ast.Name) else ""
            if isinstance(callee, ast.Attribute) and isinstance(callee.value, ast.Name) and callee.value.id == "self":
                name = callee.attr
            if name in own - VARIADIC and not any(isinstance(argument, ast.Starred) for argument in node.args):
                yield node.lineno, name


@pytest.mark.parametrize("folder", FOLDERS)
def test_arguments_have_names_where_there_are_many(folder: str) -> None:
    assert [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in long_calls(ast.parse(path.read_text(encoding="utf-8")))
    ] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def f(a, b, c, d, e): ...\nf(1, 2, 3, 4, 5)", 1),
        ("def f(a, b, c, d, e): ...\nf(1, 2, 3, 4, e=5)", 0),
        ("from moevement_core.x import Y\nY(1, 2, 3, 4, 5)", 1),
        ("min(1, 2, 3, 4, 5)", 0),
    ],
)
def test_a_long_call_is_found(text: str, count: int) -> None:
    assert len(list(long_calls(ast.parse(text)))) == count


def test_folders_exist() -> None:
    assert all(Path(ROOT / folder).is_dir() for folder in FOLDERS)
