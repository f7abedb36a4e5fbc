"""Rules for assertions and imports of tests: tests assert values, and not the wording of messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.training import ROOT

MODULES = sorted((ROOT / "tests").rglob("*.py"))
_WORD = r"[A-Za-z']+[,;:.]?"
_SENTENCE = re.compile(rf"(?<![\w-]){_WORD} +{_WORD} +{_WORD}(?![\w-])")
"""Three words in a row. Flags, paths, values and names of fields are no words."""
_ESCAPE = re.compile(r"\\.")
"""Escape of a regular expression, which is neither a word nor a blank between two words."""
_MATCHERS = ("startswith", "endswith", "count", "match", "search", "fullmatch")


def asserted_sentences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each literal with three words in a row that an assertion compares output with."""
    for node in ast.walk(tree):
        compared: list[ast.AST] = []
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                is_call = isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)
                if isinstance(part, ast.Compare) or (is_call and part.func.attr in _MATCHERS):  # type: ignore[attr-defined]
                    compared.append(part)
        elif isinstance(node, ast.Call):
            compared = [keyword.value for keyword in node.keywords if keyword.arg == "match"]
        for part in compared:
            for literal in ast.walk(part):
                text = literal.value if isinstance(literal, ast.Constant) else None
                if isinstance(text, str) and _SENTENCE.search(_ESCAPE.sub("\\t", text)):
                    yield literal.lineno, text  # type: ignore[attr-defined]


def test_no_sentence_is_asserted() -> None:
    sentences_by_path = {
        str(path.relative_to(ROOT)): list(asserted_sentences(ast.parse(path.read_text()))) for path in MODULES
    }
    assert {path: sentences for path, sentences in sentences_by_path.items() if sentences} == {}


@pytest.mark.parametrize(
    "line",
    [
        "assert 'it went well' in out",
        "assert out.startswith('it went well')",
        "pytest.raises(ValueError, match='it went well')",
        "assert f'{rank} has gone away now' in out",
    ],
)
def test_a_sentence_is_found(line: str) -> None:
    assert [number for number, _ in asserted_sentences(ast.parse(line))] == [1]


@pytest.mark.parametrize(
    "line",
    [
        "assert '--lr nan; needs 0.5' in err",
        "assert code == 0, 'the job went on alone'",
        "assert event['kind'] == 'recovery_from_disk'",
        "pytest.raises(ValueError, match=r'rank 3\\b.*iteration 7')",
    ],
)
def test_values_are_no_sentences(line: str) -> None:
    assert list(asserted_sentences(ast.parse(line))) == []


def test_nothing_is_imported_from_a_test_module() -> None:
    imported = [
        (str(path.relative_to(ROOT)), node.module)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and re.search(r"^tests\..*\btest_\w+$", node.module or "")
    ]
    assert imported == []
