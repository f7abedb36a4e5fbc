"""Generator of docs/megatron_versions.md, the differences of other Megatron-Core versions from the pinned one.

    python scripts/megatron_versions.py        (installs each wheel into a separate folder; takes a minute)

The script examines each version in a separate process, whose path has that wheel before the installed one.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "docs" / "megatron_versions.md"
PINNED = ROOT / "tests" / "unit" / "megatron" / "replaced_signatures.yaml"
VERSIONS = ("0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.1", "0.19.2")
"""Versions from the package index: the newest of each series, and all versions of the supported one."""
INTRODUCTION = """\
# Versions of Megatron-Core

This page is for people who want to use this project with another version of megatron-core. This project is written for
one version, which is pinned (0.19.2). It replaces functions of Megatron, and reads attributes of Megatron's objects.
For each version, the page lists those functions and attributes that differ from the pinned version. A version without
differences has the same names, but tests run jobs only with the pinned version, and with the revision d98e8a64ddf3 of
Megatron-LM's main branch (0.20.0, 2026-08-22). This revision has no differences either. `python
scripts/megatron_versions.py` writes this page, and `tests/packaging/test_megatron_versions.py` compares it with the
wheels.

| megatron-core | differences |
| --- | --- |
"""
Differences = dict[str, str]
"""Descriptions of differences, by the name of the attribute that this project replaces or reads."""


def differences_of(version: str) -> Differences:
    """Return the differences of a version. The function installs the version into a temporary folder.

    Raises:
        subprocess.CalledProcessError: the version cannot be installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Byte code is off, because compiling would take longer than the examination.
        install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*install, f"megatron-core=={version}"], check=True, capture_output=True)
        environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        looked = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, "--look"],
            env=environment, cwd=folder, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return dict(json.loads(looked.stdout.splitlines()[-1]))


def look() -> Differences:
    """Return the differences of the version that this process imports."""
    from megatron.moevement import platform
    from megatron.moevement.patches import LOOKED_UP

    differences: Differences = {}
    try:
        platform.install()
    except ImportError as error:
        differences["megatron.moevement.platform"] = f"cannot be installed: {error.msg.partition(' (')[0]}"
    for name, pinned in yaml.safe_load(PINNED.read_text()).items():
        try:
            parameters = inspect.signature(inspect.unwrap(_resolve(name))).parameters.values()
        except (ImportError, AttributeError):
            differences[name] = "is not there"
            continue
        here = [str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters]
        versions = pinned if isinstance(pinned, list) else [pinned]  # The versions of torch, oldest first.
        if ", ".join(here) not in versions:
            differences[name] = _changed(versions[0], here)
    for module, names in LOOKED_UP.items():
        try:
            words = set(re.findall(r"\w+", inspect.getsource(import_module(module))))
        except ImportError:
            differences[module] = "is not there"
            continue
        differences |= {f"{module}: {name}": "is not there" for name in names if name not in words}
    return differences


def _changed(pinned: str, here: list[str]) -> str:
    """Return the difference between actual and pinned parameters, in words."""
    more = [parameter for parameter in here if parameter not in pinned]
    fewer = [
        name
        for name in re.findall(r"(?<![=\w])\w+(?=[=,]|$)", pinned)
        if not any(name in parameter for parameter in here)
    ]
    parts = [f"takes `{', '.join(more)}`"] * bool(more) + [f"does not take `{', '.join(fewer)}`"] * bool(fewer)
    return " and ".join(parts) or f"takes its parameters in another order: `{', '.join(here)}`"


def _resolve(name: str) -> Any:
    """Return the object that ``module:Class.attribute`` or ``module.attribute`` names."""
    module, _, path = name.partition(":")
    if not path:
        module, _, path = name.rpartition(".")
    owner = import_module(module)
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


def page(by_version: dict[str, Differences]) -> str:
    """Return the text of the page."""
    rows = [f"| {version} | {len(differences) or 'nothing'} |" for version, differences in by_version.items()]
    details = [
        f"## {version}\n\n" + "\n".join(f"- `{name}` {what}" for name, what in sorted(differences.items())) + "\n"
        for version, differences in by_version.items()
        if differences
    ]
    return INTRODUCTION + "\n".join([*rows, "", *details])


def main() -> None:
    """Examine all versions and write the page, or with ``--look`` print the differences of the imported one."""
    if sys.argv[1:] == ["--look"]:
        print(json.dumps(look()))
        return
    OUTPUT.write_text(page({version: differences_of(version) for version in VERSIONS}), encoding="utf-8")


if __name__ == "__main__":
    main()
