"""A word that is no path is the name of a recipe of Megatron-Bridge, and unknown names are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.moevement.bridge import recipes
from moevement_core.errors import ConfigError


def bridge(folder: Path) -> Path:
    """Make a package with the layout of Bridge's recipes, and return its folder."""
    for family, text in {
        "qwen": '__all__ = ["qwen3_30b_a3b_pretrain_config", "qwen3_30b_a3b_sft_config"]',
        "deepseek": "from x import (\n    deepseek_v3_pretrain_config,\n    deepseek_v3_pretrain_32gpu_config,\n)",
    }.items():
        (folder / "recipes" / family).mkdir(parents=True)
        (folder / "recipes" / family / "__init__.py").write_text(text)
    return folder


def test_recipes_for_pre_training_have_a_family(tmp_path: Path) -> None:
    assert recipes.families([str(bridge(tmp_path))]) == {
        "qwen3_30b_a3b_pretrain_config": "qwen",
        "deepseek_v3_pretrain_config": "deepseek",
        "deepseek_v3_pretrain_32gpu_config": "deepseek",
    }


def test_an_unknown_name_is_refused_with_the_names_like_it(tmp_path: Path) -> None:
    known = recipes.families([str(bridge(tmp_path))])
    assert recipes.family_of("deepseek_v3_pretrain_config", known) == "deepseek"
    with pytest.raises(ConfigError, match=r"\bqwen3_30b_a3b\b.*\bqwen3_30b_a3b_pretrain_config\b"):
        recipes.family_of("qwen3_30b_a3b", known)
    with pytest.raises(ConfigError, match=r"\bSCRIPT\b"):
        recipes.family_of("zzz", known)


def test_a_path_is_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("")
    for word in (str(script), "missing.py", "folder/missing"):
        assert recipes.as_script([word, "--flag"]) == [word, "--flag"]
