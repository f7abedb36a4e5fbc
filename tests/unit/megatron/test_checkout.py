"""A script beside a Megatron checkout gets a message that the checkout is not used, unless --megatron names it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.moevement import checkout
from moevement_core.errors import ConfigError
from moevement_core.util.environment import MEGATRON_ENV


def _checkout(tmp_path: Path) -> Path:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("HERE = True\n")
    (tmp_path / "pretrain_gpt.py").write_text("")
    return tmp_path


def test_a_megatron_beside_the_script_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    script = str(_checkout(tmp_path) / "pretrain_gpt.py")
    message = checkout.passed_over(script)
    assert message is not None
    assert os.environ.get(MEGATRON_ENV, "megatron-core 0.19") in message
    assert f"--megatron {tmp_path}" in message
    (tmp_path / "elsewhere").mkdir()
    assert checkout.passed_over(str(tmp_path / "elsewhere" / "pretrain_gpt.py")) is None


def test_a_checkout_is_used_where_it_is_asked_for(tmp_path: Path) -> None:
    folder = _checkout(tmp_path)
    program = (
        "from pathlib import Path\nfrom megatron.moevement import checkout\n"
        f"checkout.use(Path({str(folder)!r}))\nimport megatron.core, os\nassert megatron.core.HERE\n"
        f"assert os.environ['PYTHONPATH'].split(os.pathsep)[0] == {str(folder)!r}\n"
        f"assert checkout.passed_over({str(folder / 'pretrain_gpt.py')!r}) is None\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)


def test_a_checkout_that_no_test_has_run_with_is_noted(tmp_path: Path) -> None:
    """The note names the version and the folder; the installed version has no note and leaves no variable."""
    folder = _checkout(tmp_path)
    (folder / "megatron" / "core" / "package_info.py").write_text("MAJOR = 7\nMINOR = 8\nPATCH = 9\n")
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom megatron.moevement import checkout\n"
        f"os.environ[{MEGATRON_ENV!r}] = 'before'\n"
        "checkout.note_checkout()\n"
        f"assert {MEGATRON_ENV!r} not in os.environ\n"
        "assert checkout.untested() is None\n"
        f"checkout.use(Path({str(folder)!r}))\n"
        "checkout.note_checkout()\n"
        f"assert os.environ[{MEGATRON_ENV!r}] == {str(folder)!r}\n"
        "print(checkout.untested())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    root = Path(checkout.__file__).parents[2]
    command = [sys.executable, "-c", program]
    note = subprocess.run(command, check=True, cwd=root, env=environment, capture_output=True, text=True).stdout
    for part in ("7.8.9", str(folder), checkout.TESTED_VERSION, checkout.TESTED_REVISION):
        assert part in note


@pytest.mark.parametrize(
    ("file", "named"),
    [("", r"\bmegatron/core\b"), ("megatron/__init__.py", r"\b__init__\.py\b.*\bmegatron\.moevement\b")],
)
def test_what_is_no_checkout_is_refused(file: str, named: str, tmp_path: Path) -> None:
    if file:
        (_checkout(tmp_path) / file).write_text("")
    with pytest.raises(ConfigError, match=f"--megatron .*{named}"):
        checkout.use(tmp_path)


@pytest.mark.builds
def test_the_helpers_of_a_checkout_are_compiled(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("megatron.core.datasets")
    assert spec is not None
    assert spec.origin is not None
    shutil.copy(Path(spec.origin).with_name("helpers.cpp"), tmp_path)
    checkout.compile_helpers(tmp_path)
    (compiled,) = tmp_path.glob("*.so")
    compiled_spec = importlib.util.spec_from_file_location("helpers_cpp", compiled)
    assert compiled_spec is not None
    assert compiled_spec.loader is not None
    module = importlib.util.module_from_spec(compiled_spec)
    compiled_spec.loader.exec_module(module)
    assert callable(module.build_blending_indices)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_helpers_that_cannot_be_compiled_are_named(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ConfigError, match=r"\bhelpers\.cpp\b.*\bmake\b"):
        checkout.compile_helpers(tmp_path)
    assert not list(tmp_path.iterdir())
