"""Recipes of Megatron-Bridge by name, for ``moevement launch --trainer bridge NAME``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron.moevement import platform
from megatron.moevement.bridge.preflight import refuse_without_wheel
from moevement_core.errors import ConfigError

SCRIPT = Path(__file__).with_name("recipe_script.py")
"""Script that trains by the recipe that its first argument names."""
_PACKAGE = "megatron.bridge.recipes"
_NAME = re.compile(r"\b\w+_pretrain_(?:\w+_)?config\b")


def as_script(argv: Sequence[str]) -> list[str]:
    """Return the script and arguments of a job whose command names a recipe in place of a script.

    Args:
        argv: first words of the command: a script or the name of a recipe, and its arguments.

    Returns:
        ``argv`` itself if the first word is a file or looks like a path.

    Raises:
        ConfigError: Bridge has no recipe of this name, or is not installed.
    """
    path = Path(argv[0])
    if path.is_file() or path.suffix or len(path.parts) > 1:
        return list(argv)
    refuse_without_wheel(argv, 0)
    family_of(argv[0], families())
    return [str(SCRIPT), *argv]


def load(name: str) -> Any:
    """Return a new configuration by the recipe ``name``; on a machine without a GPU, with settings for CPUs.

    Raises:
        ConfigError: Bridge has no recipe of this name.
    """
    package = f"{_PACKAGE}.{family_of(name, families())}"
    recipe = getattr(import_module(package), name, None)
    if recipe is None:
        raise ConfigError(f"{name}: {package} has no such recipe; give another name")
    config = recipe()
    if platform.is_cpu():
        use_cpu(config)
    return config


def use_cpu(config: Any) -> None:
    """Replace those settings of a recipe for GPT models that need a GPU or Transformer Engine."""
    from megatron.bridge.models.gpt_provider import local_layer_spec

    for name, value in {
        "transformer_layer_spec": local_layer_spec, "transformer_impl": "local", "moe_grouped_gemm": False,
        "moe_permute_fusion": False, "moe_router_fusion": False, "moe_token_dispatcher_type": "alltoall",
        "moe_flex_dispatcher_backend": None, "masked_softmax_fusion": False, "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False, "persist_layer_norm": False, "gradient_accumulation_fusion": False,
        "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None,
        "cuda_graph_impl": "none", "cuda_graph_modules": [], "cuda_graph_scope": None,
    }.items():  # fmt: skip
        setattr(config.model, name, value)
    config.dist.distributed_backend = "gloo"


def families(folders: Iterable[str] | None = None) -> dict[str, str]:
    """Return the family, a subpackage of Bridge's recipes, of each recipe for pre-training, by the recipe's name.

    The names come from Bridge's source text, because importing all recipes takes long.

    Args:
        folders: folders of the package ``megatron.bridge``; None: those of the installed package.
    """
    if folders is None:
        spec = find_spec("megatron.bridge")
        folders = (spec and spec.submodule_search_locations) or ()
    return {
        name: module.parent.name
        for folder in folders
        for module in sorted((Path(folder) / "recipes").glob("*/__init__.py"))
        for name in _NAME.findall(module.read_text(encoding="utf-8"))
    }


def family_of(name: str, known: Mapping[str, str]) -> str:
    """Return the family of a recipe.

    Args:
        name: name of the recipe.
        known: families by name, as :func:`families` returns them.

    Raises:
        ConfigError: no family has a recipe of this name.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        raise ConfigError(
            f"{name}: neither a script nor a recipe of Megatron-Bridge for pre-training; "
            + (f"did you mean {' or '.join(near)}?" if near else "give the path of a SCRIPT")
        )
    return known[name]
