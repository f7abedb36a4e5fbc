"""Recipes of known models, shrunk to this machine, keep their golden values, and keep their bits when ranks die.

Golden values are rounded to five decimals and compared with Megatron's relative tolerance of 5%, since arithmetic
differs from processor to processor; two runs on one machine are compared by their digests.
``python -m tests.functional.test_golden_values [NAME ...]`` writes new golden values.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.functional.recipes import FROZEN, Recipe, Run, freeze, kill, recipes, resume_dense, resume_frozen, train

TOLERANCE = 0.05
ZEROS = 20
"""Tolerance of num-zeros: last bits decide which of some ten thousand gradients are exactly 0."""
ONLY_IN_FULL = (
    "mixtral_8x7b_tp2_pp2_etp2", "mixtral_8x7b_ep4_overlap", "deepseek_v2_lite_ep4_resume", "qwen2_moe_ep2_pp2",
    "qwen3_30b_a3b_ep2_two_optimizer_instances", "gpt_oss_20b_ep4_redo", "gpt3_tp2_pp2_resume", "llama3_pp2_vpp2",
    "gpt3_pp2_dp2_local", "deepseek_v3_ep2_pp2_per_token_loss", "qwen3_30b_a3b_pp2_ep2", "mixtral_8x7b_pp2_ep2",
    "gpt_oss_20b_pp2_ep2", "gpt3_pp4", "deepseek_v3_pp2_ep2", "mixtral_8x22b_pp2_vpp2_fp16",
)  # fmt: skip
"""Recipes similar to others here, for ``make test-full``."""
CASES = [
    pytest.param(recipe, id=recipe.name, marks=[pytest.mark.full] if recipe.name in ONLY_IN_FULL else [])
    for recipe in recipes()
]


def run(recipe: Recipe, folder: Path) -> Run:
    """Run a recipe as its type says; check that runs which must have equal bits have them."""
    match recipe.kind:
        case "regular":
            return train(recipe, folder)
        case "ckpt-resume":
            whole, again = resume_dense(recipe, folder)
            assert again.digest == whole.digest
            return whole
        case "frozen-resume":
            return resume_frozen(recipe, folder)
        case "kill-resume":
            whole, killed = train(recipe, folder / "whole"), kill(recipe, folder / "killed")
            failures = [event for event in killed.record.events() if event["event"] == "failure"]
            assert failures
            assert killed.digest == whole.digest
            assert killed.series() == whole.series()
            return killed
        case other:
            raise ValueError(f"{recipe.path}: TEST_TYPE {other}")


@pytest.mark.parametrize("recipe", CASES)
@pytest.mark.slow("two jobs of four ranks")
def test_a_recipe_has_its_golden_values(recipe: Recipe, tmp_path: Path) -> None:
    golden = json.loads(recipe.golden.read_text())
    series = run(recipe, tmp_path).series()
    assert series.keys() == golden.keys()
    for metric, wanted in golden.items():
        few = ZEROS if metric == "num-zeros" else None
        assert series[metric]["values"] == pytest.approx(wanted["values"], rel=TOLERANCE, abs=few), metric


def _make(recipe: Recipe) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if recipe.kind == "frozen-resume" and not recipe.path.with_name(FROZEN).exists():
            freeze(recipe, Path(folder) / "first")
        series = run(recipe, Path(folder) / "run").series()
    recipe.golden.write_text(json.dumps(series, indent=4) + "\n")
    print(recipe.golden, flush=True)


if __name__ == "__main__":
    for recipe in recipes():
        if not sys.argv[1:] or recipe.name in sys.argv[1:]:
            _make(recipe)
