"""Choice of the experts in a checkpoint by the tokens that a failure would cost (MoEtion, section 4.3, Algorithm 1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moevement_core.operators import OperatorTable
from moevement_core.policy.partial_experts import Tokens

Chosen = npt.NDArray[np.bool_]
"""Mask of operators, bool ``[operators]``."""


def shares(risk: dict[int, int], experts: dict[int, int], total: int) -> dict[int, int]:
    """Return S[i], the number of saved experts of layer i, in proportion to the tokens at risk in the layer.

    MoEtion leaves two questions open, which this function decides. Shares are rounded down, so some of the ``total``
    experts may be left over. The layers that lost most by rounding then get one expert more each. If the share of a
    layer exceeds its number of experts, other layers get the excess.

    Args:
        risk: R[i], tokens at risk of each layer: the sum over its experts of the tokens that an expert processed since
            it was last saved.
        experts: number of experts of each layer.
        total: S_total, number of saved experts, all layers together.

    Returns:
        Number of saved experts by layer. The sum is ``total``, or the number of all experts if that is less.
    """
    total = min(total, sum(experts.values()))
    granted = dict.fromkeys(experts, 0)
    while (left := total - sum(granted.values())) > 0:
        open_ = [layer for layer in experts if granted[layer] < experts[layer]]
        weight = sum(risk[layer] for layer in open_)
        # If no layer has tokens at risk, all layers have the same claim.
        claim = {layer: left * risk[layer] / weight if weight else left / len(open_) for layer in open_}
        for layer in open_:
            granted[layer] += min(int(claim[layer]), experts[layer] - granted[layer])
        by_rest = sorted(open_, key=lambda layer: (int(claim[layer]) - claim[layer], layer))
        for layer in by_rest[: max(0, total - sum(granted.values()))]:
            granted[layer] += granted[layer] < experts[layer]
    return granted


def most_at_risk(table: OperatorTable, risk: Tokens, due: Chosen, total: int) -> Chosen:
    """Return a mask of the experts that the next checkpoint holds.

    Args:
        table: operators of the stage.
        risk: P, tokens that each expert processed since it was last saved.
        due: mask of the experts that the checkpoint holds in any case; ``total`` includes them.
        total: S_total, number of saved experts, all layers together.
    """
    places = {int(layer): np.flatnonzero(table.is_expert & (table.layers == layer)) for layer in _layers(table)}
    of_layer = {layer: int(risk[operators].sum()) for layer, operators in places.items()}
    wanted = shares(of_layer, {layer: len(operators) for layer, operators in places.items()}, total)
    return _most_of(places, wanted, risk, due)


def most_of_each_layer(table: OperatorTable, risk: Tokens, due: Chosen, experts: int) -> Chosen:
    """Return a mask of the ``experts`` experts of each layer with the most tokens at risk.

    This is the load-aware selection of MoC-System, section 3.2.

    Args:
        table: operators of the stage.
        risk: tokens that each expert processed since it was last saved.
        due: mask of the experts that the checkpoint holds in any case; ``experts`` includes them.
        experts: K, number of saved experts of each layer.
    """
    places = {int(layer): np.flatnonzero(table.is_expert & (table.layers == layer)) for layer in _layers(table)}
    return _most_of(places, dict.fromkeys(places, experts), risk, due)


def _most_of(places: dict[int, npt.NDArray[np.int64]], wanted: dict[int, int], risk: Tokens, due: Chosen) -> Chosen:
    chosen = np.zeros(len(risk), dtype=bool)
    for layer, operators in places.items():
        # Due experts come first, then experts by tokens at risk. The position in the table breaks ties.
        order = operators[np.lexsort((operators, -risk[operators], ~due[operators]))]
        chosen[order[: max(wanted[layer], int(due[operators].sum()))]] = True
    return chosen


def _layers(table: OperatorTable) -> list[int]:
    return sorted({int(layer) for layer in table.layers[table.is_expert]})
