"""Which experts a checkpoint holds by the tokens that a failure would cost (MoEtion, section 4.3, Algorithm 1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moevement_core.operators import OperatorTable
from moevement_core.policy.partial_experts import Tokens

Chosen = npt.NDArray[np.bool_]
"""Operators, bool ``[operators]``."""


def shares(risk: dict[int, int], experts: dict[int, int], total: int) -> dict[int, int]:
    """S[i]: how many experts of each layer are saved, in proportion to the tokens at risk there.

    What rounding down leaves over goes to the layers that it took the most from, and what a layer has no experts for to
    the others; both are open in the paper.

    Args:
        risk: R[i], tokens that the experts of a layer got since each of them was saved.
        experts: how many a layer has.
        total: S_total.

    Returns:
        By layer; the sum is ``total``, or all experts.
    """
    total = min(total, sum(experts.values()))
    granted = dict.fromkeys(experts, 0)
    while (left := total - sum(granted.values())) > 0:
        open_ = [layer for layer in experts if granted[layer] < experts[layer]]
        weight = sum(risk[layer] for layer in open_)
        # Without a token anywhere every layer has the same claim.
        claim = {layer: left * risk[layer] / weight if weight else left / len(open_) for layer in open_}
        for layer in open_:
            granted[layer] += min(int(claim[layer]), experts[layer] - granted[layer])
        by_rest = sorted(open_, key=lambda layer: (int(claim[layer]) - claim[layer], layer))
        for layer in by_rest[: max(0, total - sum(granted.values()))]:
            granted[layer] += granted[layer] < experts[layer]
    return granted


def most_at_risk(table: OperatorTable, risk: Tokens, due: Chosen, total: int) -> Chosen:
    """The experts that the next checkpoint holds.

    Args:
        table: the operators of the stage.
        risk: P, tokens that each expert got since it was saved.
        due: those that it holds in any case; they count for ``total``.
        total: S_total, experts of all layers together.
    """
    places = {int(layer): np.flatnonzero(table.is_expert & (table.layers == layer)) for layer in _layers(table)}
    of_layer = {layer: int(risk[operators].sum()) for layer, operators in places.items()}
    wanted = shares(of_layer, {layer: len(operators) for layer, operators in places.items()}, total)
    return _most_of(places, wanted, risk, due)


def most_of_each_layer(table: OperatorTable, risk: Tokens, due: Chosen, experts: int) -> Chosen:
    """Return a mask of as many experts of each layer, those with the most tokens at risk (MoC-System, section 3.2,
    load-aware selection).

    Args:
        table: as in :func:`most_at_risk`.
        risk: likewise.
        due: likewise.
        experts: K, of each layer.
    """
    places = {int(layer): np.flatnonzero(table.is_expert & (table.layers == layer)) for layer in _layers(table)}
    return _most_of(places, dict.fromkeys(places, experts), risk, due)


def _most_of(places: dict[int, npt.NDArray[np.int64]], wanted: dict[int, int], risk: Tokens, due: Chosen) -> Chosen:
    chosen = np.zeros(len(risk), dtype=bool)
    for layer, operators in places.items():
        # The due ones first, then by tokens; the place in the table decides between equals.
        order = operators[np.lexsort((operators, -risk[operators], ~due[operators]))]
        chosen[order[: max(wanted[layer], int(due[operators].sum()))]] = True
    return chosen


def _layers(table: OperatorTable) -> list[int]:
    return sorted({int(layer) for layer in table.layers[table.is_expert]})
