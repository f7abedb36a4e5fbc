"""pyproject.toml declares what the packages import, and the environment that tests run in has it."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.training import ROOT

PACKAGES = ("megatron/moevement", "moevement_core", "moevement_cli", "kernels/moevement_kernels")
OWN = {"megatron.moevement", "moevement_core", "moevement_cli", "moevement_kernels"}
IN_THE_CONTAINER = {"transformer_engine", "transformer_engine_torch", "apex"}
"""Modules that the product finds at run time, and never installs."""


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of other packages that a file imports, at its top or later."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            top = ".".join(name.split(".")[: 2 if name.startswith("megatron.") else 1])
            if top not in OWN and top.split(".")[0] not in sys.stdlib_module_names | IN_THE_CONTAINER:
                yield "megatron" if top.startswith("megatron") else top


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    return [Requirement(text) for text in texts]


def test_what_is_imported_is_declared() -> None:
    modules = {name for folder in PACKAGES for path in (ROOT / folder).rglob("*.py") for name in imported(path)}
    assert {"torch", "megatron", "yaml"} <= modules
    providers = importlib.metadata.packages_distributions()
    names = {canonicalize_name(requirement.name) for requirement in declared()}
    for module in sorted(modules):
        providing = {canonicalize_name(name) for name in providers.get(module, [module])}
        assert providing & names, f"{module} is imported; pyproject.toml does not declare it"


def test_what_is_declared_is_what_was_tested() -> None:
    for requirement in declared():
        installed = importlib.metadata.version(requirement.name)
        assert requirement.specifier.contains(installed, prereleases=True), f"{requirement}: {installed} is installed"


@pytest.mark.parametrize("name", ["lock.txt", "nvidia-resiliency-ext.txt"])
def test_what_is_pinned_has_a_hash(name: str) -> None:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    pins = [number for number, line in enumerate(lines) if "==" in line]
    assert pins
    assert not [lines[number] for number in pins if not lines[number + 1].strip().startswith("--hash=sha256:")]


def test_what_is_declared_is_pinned() -> None:
    pinned = {
        canonicalize_name(line.split("==")[0])
        for file in ("lock.txt", "nvidia-resiliency-ext.txt")
        for line in (ROOT / "requirements" / file).read_text(encoding="utf-8").split()
    }
    names = {canonicalize_name(requirement.name) for requirement in declared()} - {"moevement-megatron"}
    assert names <= pinned, names - pinned
