"""A script beside a Megatron checkout gets a message that the checkout is not used, unless --megatron names it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.moevement import checkout
from moevement_core.errors import ConfigError


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
    assert "megatron-core 0.19" in message
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


@pytest.mark.parametrize(
    ("file", "named"),
    [("", r"\bmegatron/core\b"), ("megatron/__init__.py", r"\b__init__\.py\b.*\bmegatron\.moevement\b")],
)
def test_what_is_no_checkout_is_refused(file: str, named: str, tmp_path: Path) -> None:
    if file:
        (_checkout(tmp_path) / file).write_text("")
    with pytest.raises(ConfigError, match=f"--megatron .*{named}"):
        checkout.use(tmp_path)
