"""Generator of docs/binding.md, the reference of the methods that describe a trainer.

Run it with ``python scripts/binding_table.py``.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType

from moevement_core.trainer import binding, capabilities, interface

OUTPUT = Path(__file__).parents[1] / "docs" / "binding.md"
PURPOSE = """\
# Reference of `Binding`

This page is for people who write a binding for a trainer of their own; [own_binding.md](own_binding.md) comes first.
It has every method and attribute of `moevement_core.Binding` with its first sentence, and then the capabilities that a
trainer may have. Arguments and the rest are in the docstrings:
[binding.py](../moevement_core/trainer/binding.py), [interface.py](../moevement_core/trainer/interface.py),
[capabilities.py](../moevement_core/trainer/capabilities.py).
`python scripts/binding_table.py` writes this page, and a test compares.
"""
CAPABILITIES = """\
Your class defines the methods of a capability, and inherits nothing for it. It defines all of them or none.
"""


def page() -> str:
    """Return the text of the page: methods that a binding must implement, methods with a default, capabilities."""
    methods = {method.name: method for module in (binding, interface) for method in _methods(_classes(module))}
    needed = [methods[name] for name in methods if name in binding.Binding.__abstractmethods__]
    others = [methods[name] for name in sorted(methods) if methods[name] not in needed]
    lines = [PURPOSE, "## To be written", "", *_rows(needed), "", "## With a default", "", *_rows(others), ""]
    lines += ["## Capabilities", "", CAPABILITIES]
    for protocol in (*_protocols(capabilities), *_protocols(binding)):
        text = " ".join((ast.get_docstring(protocol) or "").split())
        own = _methods([protocol])
        items = [f"- `{method.name}{_parameters(method)}`: {_first_sentence(method)}" for method in own]
        lines += [f"**{protocol.name}**: {_plain(text)}", "", *items, ""]
    return "\n".join(lines)


def _classes(module: ModuleType) -> list[ast.ClassDef]:
    tree = ast.parse(inspect.getsource(module))
    return [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Binding")
            and node.name != "BindingReplay"]  # fmt: skip


def _protocols(module: ModuleType) -> list[ast.ClassDef]:
    tree = ast.parse(inspect.getsource(module))
    return [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Supports")]


def _methods(classes: list[ast.ClassDef]) -> list[ast.FunctionDef]:
    return [node for each in classes for node in each.body if isinstance(node, ast.FunctionDef)]


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
    return _plain(" ".join((ast.get_docstring(method) or "").split("\n\n")[0].split()))


def _plain(text: str) -> str:
    return re.sub(r":\w+:`~?\.?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    OUTPUT.write_text(page(), encoding="utf-8")
