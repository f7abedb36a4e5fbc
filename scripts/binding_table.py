"""Generator of docs/binding.md, the reference of the methods that describe a trainer.

Run it with ``python scripts/binding_table.py``.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from moevement_core.trainer import binding

OUTPUT = Path(__file__).parents[1] / "docs" / "binding.md"
PURPOSE = """\
# Reference of `Binding`

This page is for people who write a binding for a trainer of their own; [own_trainer.md](own_trainer.md) comes first.
It has every method and attribute of `moevement_core.Binding` with its first sentence; arguments and the rest are in
the docstrings ([binding.py](../moevement_core/trainer/binding.py)). `python scripts/binding_table.py` writes this page,
and a test compares.
"""


def page() -> str:
    """Return the text of the page: methods that a binding must implement, then methods with a default."""
    methods = [node for node in _class().body if isinstance(node, ast.FunctionDef)]
    needed = [method for method in methods if _is_abstract(method)]
    others = [method for method in methods if method not in needed]
    return "\n".join([PURPOSE, "## To be written", "", *_rows(needed), "", "## With a default", "", *_rows(others), ""])


def _class() -> ast.ClassDef:
    tree = ast.parse(inspect.getsource(binding))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Binding")


def _is_abstract(method: ast.FunctionDef) -> bool:
    return any(isinstance(name, ast.Name) and name.id == "abstractmethod" for name in method.decorator_list)


def _rows(methods: list[ast.FunctionDef]) -> list[str]:
    rows = [f"| `{method.name}{_parameters(method)}` | {_first_sentence(method)} |" for method in methods]
    return ["| method | |", "|---|---|", *rows]


def _parameters(method: ast.FunctionDef) -> str:
    """Return the parameters in parentheses, or an empty string for an attribute."""
    if any("property" in ast.unparse(decorator) for decorator in method.decorator_list):
        return ""
    arguments = method.args
    names = [argument.arg for argument in arguments.args[1:]]
    return f"({', '.join([*names, *(f'{argument.arg}=' for argument in arguments.kwonlyargs)])})"


def _first_sentence(method: ast.FunctionDef) -> str:
    text = " ".join((ast.get_docstring(method) or "").split("\n\n")[0].split())
    return re.sub(r":\w+:`~?\.?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    OUTPUT.write_text(page(), encoding="utf-8")
