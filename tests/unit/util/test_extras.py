"""Features whose package is missing are refused by an error that names the extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moevement_core.util.extras import is_installed, require
from tests.training import ROOT

ASK = """
import sys
sys.path.insert(0, sys.argv[1])
from moevement_core.errors import ConfigError
from moevement_core.util.extras import require
try:
    require(sys.argv[2], "--flag 3", "leave --flag out")
except ConfigError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("module", "extra"), [("megatron.core", "megatron"), ("nvidia_resiliency_ext", "restart"), ("matplotlib", "report")]
)
def test_a_missing_package_is_named_with_its_extra(module: str, extra: str) -> None:
    """Ask an interpreter that sees only the standard library and this project."""
    asked = [sys.executable, "-S", "-c", ASK, str(ROOT), module]
    printed = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    assert printed.startswith("MissingPackage --flag 3: ")
    assert f"extra {extra} " in printed
    assert printed.count("\n") == 1
    require(module, "--flag 3")  # In this environment the package is installed.


def test_a_module_of_a_missing_package_is_not_installed() -> None:
    assert not is_installed("no_such_package.module")
    assert not is_installed("torch.no_such_module")
    assert is_installed("torch.distributed")
