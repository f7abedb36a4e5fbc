"""Docstrings begin with sentences, and names say what they hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training import ROOT

FOLDERS = (
    "moevement_core", "megatron/moevement", "moevement_cli", "kernels", "examples", "benchmarks", "scripts", "tests",
)  # fmt: skip
CONTINUATIONS = frozenset(
    re.findall(
        r"\w+",
        "of what whether those that its whom who whose where how within from in at by for with so again both if when "
        "while until as to on after before beside between not no none all each also like than only up one same such it "
        "they he she is are was were has had may can there inside without since over likewise whoever nobody somebody",
    )
)
"""Words with which a docstring continues a name instead of beginning a sentence."""
FEWEST_WORDS = 4


def docstrings(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the line, the text, and whether it is of a module, class or function rather than of an attribute."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    owned = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if (text := ast.get_docstring(node)) is not None:
                owned.add(node.body[0])
                yield node.body[0].lineno, text, True
        elif node in owned or not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        elif isinstance(node.value.value, str):
            yield node.lineno, node.value.value, False


def complaint(text: str, *, is_owned: bool) -> str | None:
    """Return what is wrong with the first line of a docstring; None if nothing is."""
    words = re.findall(r"[A-Za-z']+", text.strip().splitlines()[0] if text.strip() else "")
    if words and words[0].lower() in CONTINUATIONS:
        return f"begins with {words[0]!r}"
    if is_owned and len(words) < FEWEST_WORDS:
        return f"has {len(words)} words"
    return None


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_sentences(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {problem}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text, is_owned in docstrings(path)
        if (problem := complaint(text, is_owned=is_owned)) is not None
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("Return the digest of one tensor.", False), ("Of one rank.", True), ("Whether it is there at all.", True),
        ("Close it.", True), ("Bytes acknowledged by the peer.", False),
    ],
)  # fmt: skip
def test_fragments_are_found(text: str, is_wrong: bool) -> None:
    assert (complaint(text, is_owned=True) is not None) is is_wrong


PRONOUNS = frozenset(
    re.findall(
        r"\w+",
        "one its told found made came said theirs ours mine who whom thing things stuff given gone somebody everyones "
        "their his he",
    )
)
"""Names that say nothing of what they hold."""


def bound_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every parameter and every variable that is assigned."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_say_what_they_hold(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in bound_names(path)
        if name in PRONOUNS
    ]
    assert not wrong
