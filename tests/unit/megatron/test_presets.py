"""Megatron accepts the flags of each preset, and their model has the parameters of the paper."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from moevement_core.launching import config_file
from tests.unit.models import PRESETS, TABLE_2


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_passes_megatrons_own_checks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = _parse(path, monkeypatch)
    _, total, active = TABLE_2[path.stem]
    if total is None or active is None:
        return
    assert _parameters(args, args.num_experts) == pytest.approx(total, rel=0.03)
    assert _parameters(args, args.moe_router_topk) == pytest.approx(active, rel=0.04)


def _parse(path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    from megatron.moevement.activate import activate

    activate()
    from megatron.training import arguments

    monkeypatch.setenv("WORLD_SIZE", str(TABLE_2[path.stem][0]))
    monkeypatch.setattr(
        "sys.argv",
        ["script", *config_file.expand(["--config", str(path)]), "--mock-data", "--tokenizer-type", "NullTokenizer"],
    )
    args = arguments.parse_args()
    arguments.validate_args(args, {})
    return args


def _parameters(args: Namespace, experts: int) -> float:
    """Return the parameters of a GPT-MoE with ``experts`` experts per layer, without norms and routers."""
    matrices = 3 if args.swiglu else 2
    pattern = (
        args.moe_layer_freq
        if isinstance(args.moe_layer_freq, list)
        else [int(layer % args.moe_layer_freq == 0) for layer in range(args.num_layers)]
    )
    expert = matrices * args.hidden_size * args.moe_ffn_hidden_size
    shared = matrices * args.hidden_size * (args.moe_shared_expert_intermediate_size or 0)
    dense = matrices * args.hidden_size * args.ffn_hidden_size
    layers = sum(experts * expert + shared if is_moe else dense for is_moe in pattern)
    attention = args.num_layers * 4 * args.hidden_size**2
    embeddings = args.vocab_size * args.hidden_size * (2 if args.untie_embeddings_and_output_weights else 1)
    return layers + attention + embeddings
