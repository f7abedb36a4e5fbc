"""Sizes of the code: the classes with the most public methods and fields, and the longest files.

``python scripts/house.py`` prints it; docs/design.md says what is aimed at.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("moevement_core", "megatron/moevement", "moevement_cli", "kernels")
LIVE = ("engine", "session", "restart", "launching", "replication", "rendezvous", "persistence", "runtime", "optimizer")
"""Folders of the live half: threads, processes, and state that changes."""


@dataclass(frozen=True)
class Class:
    """Size of one class."""

    name: str
    file: Path
    methods: int
    """Public ones, properties among them."""
    fields: int
    """Fields that its ``__init__`` sets, or its dataclass declares."""


def classes(folder: Path) -> Iterator[Class]:
    """Every class under ``folder``."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                functions = [one for one in node.body if isinstance(one, ast.FunctionDef)]
                public = {one.name for one in functions if not one.name.startswith("_")}
                yield Class(node.name, path.relative_to(ROOT), len(public), len(_fields(node, functions)))


def _fields(node: ast.ClassDef, functions: list[ast.FunctionDef]) -> set[str]:
    declared = {
        one.target.id
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and "ClassVar" not in ast.dump(one)
    }
    inits = [one for one in functions if one.name == "__init__"]
    assigned = {
        target.attr
        for init in inits
        for one in ast.walk(init)
        if isinstance(one, ast.Assign | ast.AnnAssign)
        for part in (one.targets if isinstance(one, ast.Assign) else [one.target])
        for target in ast.walk(part)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    return declared | assigned


def main() -> None:
    """Print the sizes of the code."""
    found = [one for room in ROOMS for one in classes(ROOT / room)]
    live = [one for one in found if any(part in one.file.parts for part in LIVE)]
    for what in ("methods", "fields"):
        print(f"live classes with the most {what}:")
        for one in sorted(live, key=lambda one: getattr(one, what), reverse=True)[:10]:
            print(f"  {getattr(one, what):3} {one.name} ({one.file})")
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    print(f"{len(files)} files, {sum(lengths.values())} lines; the longest:")
    for path in sorted(lengths, key=lambda path: lengths[path], reverse=True)[:12]:
        print(f"  {lengths[path]:4} {path}")


if __name__ == "__main__":
    main()
