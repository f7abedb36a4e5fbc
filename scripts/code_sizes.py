"""Sizes of the code: the classes with the most public methods and fields, and the longest files.

``python scripts/code_sizes.py`` prints them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("moevement_core", "megatron/moevement", "moevement_cli", "kernels")
LIVE = ("engine", "session", "restart", "launching", "replication", "rendezvous", "persistence", "runtime", "optimizer")
"""Packages that run in a job and have threads, processes or changing state. The script calls their classes live."""


@dataclass(frozen=True)
class Class:
    """Size of one class."""

    name: str
    file: Path
    methods: int
    """Number of public methods, properties included."""
    fields: int
    """Number of fields that ``__init__`` sets or the dataclass declares."""


def classes(folder: Path) -> Iterator[Class]:
    """Yield every class under ``folder``."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                functions = [statement for statement in node.body if isinstance(statement, ast.FunctionDef)]
                public = {function.name for function in functions if not function.name.startswith("_")}
                yield Class(node.name, path.relative_to(ROOT), len(public), len(_fields(node, functions)))


def _fields(node: ast.ClassDef, functions: list[ast.FunctionDef]) -> set[str]:
    declared = {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.dump(statement)
    }
    inits = [function for function in functions if function.name == "__init__"]
    assigned = {
        target.attr
        for init in inits
        for node_of_init in ast.walk(init)
        if isinstance(node_of_init, ast.Assign | ast.AnnAssign)
        for part in (node_of_init.targets if isinstance(node_of_init, ast.Assign) else [node_of_init.target])
        for target in ast.walk(part)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    return declared | assigned


def main() -> None:
    """Print the sizes of the code."""
    sizes = [size for package in PACKAGES for size in classes(ROOT / package)]
    live = [size for size in sizes if any(part in size.file.parts for part in LIVE)]
    for what in ("methods", "fields"):
        print(f"live classes with the most {what}:")
        for size in sorted(live, key=lambda size: getattr(size, what), reverse=True)[:10]:
            print(f"  {getattr(size, what):3} {size.name} ({size.file})")
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    print(f"{len(files)} files, {sum(lengths.values())} lines; the longest:")
    for path in sorted(lengths, key=lambda path: lengths[path], reverse=True)[:12]:
        print(f"  {lengths[path]:4} {path}")


if __name__ == "__main__":
    main()
