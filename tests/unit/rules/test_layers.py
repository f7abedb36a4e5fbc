"""Packages import only packages below them, and no imports form a cycle. The tests only read the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOP_PACKAGES = {
    "moevement_kernels": ROOT / "kernels" / "moevement_kernels",
    "moevement_core": ROOT / "moevement_core",
    "megatron.moevement": ROOT / "megatron" / "moevement",
    "moevement_cli": ROOT / "moevement_cli",
}
MAY_KNOW = {
    "moevement_kernels": set(),
    "moevement_core": set(),
    "megatron.moevement": {"moevement_core", "moevement_kernels", "megatron"},
    "moevement_cli": {"moevement_core", "megatron.moevement"},
}
"""Other top-level packages that each may import, of this project and of Megatron."""
WITHOUT_CYCLES = tuple(TOP_PACKAGES)
PACKAGES = (
    "", "util", "policy", "overhead", "speed", "run", "comms", "snapshot", "replication", "strategies", "storage",
    "engine", "elastic", "rendezvous", "restart", "audit", "recovery", "planning", "simulator", "monitoring", "trainer",
    "topology", "rebuild", "saving", "session", "launching",
)  # fmt: skip
"""Packages of the engine, the lowest first; the empty name stands for the modules that belong to no package."""
BESIDE = frozenset({"__init__", "device", "errors", "log", "operators", "precision"})
"""Modules of the engine that belong to no package."""


@cache
def modules(package: str) -> dict[str, Path]:
    """Return the paths of all modules of a top-level package, by the name of the module."""
    paths = {}
    for path in TOP_PACKAGES[package].rglob("*.py"):
        parts = path.relative_to(TOP_PACKAGES[package]).with_suffix("").parts
        name = ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
        paths[name] = path
    return paths


def imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, also in functions; ``from a import b`` yields ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_package_of(name: str) -> str | None:
    for package in (*TOP_PACKAGES, "megatron"):
        if name == package or name.startswith(f"{package}."):
            return package
    return None


@pytest.mark.parametrize("package", TOP_PACKAGES)
def test_a_room_knows_only_those_below_it(package: str) -> None:
    wrong = {
        f"{module} imports {name}"
        for module, path in modules(package).items()
        for name in imported(path)
        if top_package_of(name) not in (None, package, *MAY_KNOW[package])
    }
    assert not wrong


@pytest.mark.parametrize("package", WITHOUT_CYCLES)
def test_no_imports_go_round_in_a_circle(package: str) -> None:
    known = modules(package)
    graph = {name: {target for target in imported(path) if target in known} - {name} for name, path in known.items()}
    graph[package] = set()  # a package imports its modules to export their names, which is no dependency between them
    assert not list(cycles(graph))


def package_of(module: str) -> str:
    """Return the package of a module of the engine; empty for a module beside the packages."""
    _, package, *inner = module.split(".")
    return package if inner or package in PACKAGES else ""


def test_a_package_of_the_engine_imports_only_packages_below_it() -> None:
    known = modules("moevement_core")
    wrong = {
        f"{module} imports {name}"
        for module, path in known.items()
        if module != "moevement_core"
        for name in imported(path)
        if name in known and name != "moevement_core"
        if PACKAGES.index(package_of(name)) > PACKAGES.index(package_of(module))
    }
    assert not wrong


def test_every_package_of_the_engine_has_its_place() -> None:
    known = [name for name in modules("moevement_core") if name != "moevement_core"]
    assert {package_of(name) for name in known} == set(PACKAGES)
    beside = {path.stem for path in TOP_PACKAGES["moevement_core"].glob("*.py")}
    assert beside == BESIDE


def test_every_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for package in TOP_PACKAGES:
        for module, path in modules(package).items():
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(module)
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_folders_of_unit_tests_have_the_names_of_packages() -> None:
    """The unit tests of a package are in the folder with its name; those of a file are in ``test_<file>.py``."""
    folders = {path.name for path in (ROOT / "tests" / "unit").iterdir() if (path / "__init__.py").is_file()}
    beside_the_engine = {"megatron", "cli", "kernels", "benchmarks"}
    without_product = {"rules", "harness"}
    assert folders <= {*PACKAGES, *beside_the_engine, *without_product}


def cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield the groups of modules that all reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                yield from visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = []
            while name not in group:
                group.append(stack.pop())
            if len(group) > 1:
                yield sorted(group)

    for name in sorted(graph):
        if name not in index:
            yield from visit(name)


def test_circles_are_found() -> None:
    assert list(cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == [["a", "b", "c"]]
    assert not list(cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}))
