"""Files of ``--config`` become Megatron's flags, before the flags of the command line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from moevement_core.errors import ConfigError
from moevement_core.launching import config_file
from tests.unit.models import PRESETS


def test_a_file_becomes_flags_before_those_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "num_layers: 4\nswiglu: true\nbf16: false\nload: null\nsplit: 1,2\n"
        '--recompute-modules: [moe, mlp]\nlr: 1.0e-3\ndata-path: ["a b"]\n'
    )
    assert config_file.expand(["--num-layers", "8", "--config", str(path)]) == [
        "--num-layers", "4", "--swiglu", "--split", "1,2", "--recompute-modules", "moe", "mlp", "--lr", "0.001",
        "--data-path", "a b", "--num-layers", "8",
    ]  # fmt: skip


def test_megatrons_functional_test_layout_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text("ENV_VARS:\n  A_VARIABLE: 1\nMODEL_ARGS:\n  --num-layers: 2\n  --bf16: true\nTEST_TYPE: regular\n")
    assert config_file.expand([f"--config={path}"]) == ["--num-layers", "2", "--bf16"]
    assert config_file.environment_of(["--config", str(path)]) == {"A_VARIABLE": "1"}


def test_lists_and_variables_are_what_megatrons_shell_makes_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_PATH", "/data")
    path = tmp_path / "model_config.yaml"
    path.write_text(
        "ENV_VARS:\n  CACHE: /cache\nMODEL_ARGS:\n  --recompute-modules: [moe_act layernorm]\n"
        "  --moe-layer-freq: ([0]*3+[1]*5)\n  --data-path: ${DATA_PATH}/pile\n  --data-cache-path: $CACHE\n"
    )
    assert config_file.flags_of(path) == [
        "--recompute-modules", "moe_act", "layernorm", "--moe-layer-freq", "([0]*3+[1]*5)", "--data-path", "/data/pile",
        "--data-cache-path", "/cache",
    ]  # fmt: skip
    monkeypatch.delenv("DATA_PATH")
    with pytest.raises(ConfigError, match=r"--data-path \$\{DATA_PATH\}/pile\b.*\bDATA_PATH\b.*\bENV_VARS\b"):
        config_file.flags_of(path)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (None, os.strerror(errno.ENOENT)),
        ("a: [", r"\bYAML\b"),
        ("- a\n- b", r"\blist\b.*\bmapping\b"),
        ("model: {num-layers: 2}", r"--model\b"),
        ("MODEL_ARGS: 3", r"\bMODEL_ARGS\b.*\bint\b"),
    ],
)
def test_a_file_that_cannot_be_flags_says_why(text: str | None, pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rf"\ba\.yaml\b.*{pattern}"):
        config_file.expand(["--config", str(path)])
    (tmp_path / "env.yaml").write_text("ENV_VARS: [A]")
    with pytest.raises(ConfigError, match=r"\benv\.yaml\b.*\bENV_VARS\b.*\blist\b"):
        config_file.environment_of(["--config", str(tmp_path / "env.yaml")])
    with pytest.raises(ConfigError, match=r"--config\b(?! /)"):
        config_file.expand(["--config"])


def test_there_are_presets() -> None:
    assert {path.stem for path in PRESETS} >= {"laptop", "gpt_moe", "qwen_moe", "deepseek_moe", "moe_llava"}
