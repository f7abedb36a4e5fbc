"""Choice of experts for a checkpoint that leaves some out (MoC-System, section 3.2), and the tokens that this costs.

Experts take turns. The order visits every expert-parallel rank before it returns to one, and each layer begins with
another expert of it. So ranks save about equally much in every checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moevement_core.operators import OperatorTable

Tokens = npt.NDArray[np.int64]
"""Token counts by operator; 0 for an operator that is no expert."""


def turns(table: OperatorTable) -> dict[int, list[int]]:
    """Return the experts of each layer in the order in which checkpoints take them.

    Args:
        table: operators of a stage, with a row of bytes for each of its ranks.

    Returns:
        Positions in the table by layer; the first is in the first checkpoint.
    """
    layers: dict[int, list[int]] = {}
    for number, layer in enumerate(sorted({int(layer) for layer in table.layers[table.is_expert]})):
        experts = np.flatnonzero(table.is_expert & (table.layers == layer))
        by_ranks: dict[tuple[bool, ...], list[int]] = defaultdict(list)
        for place in experts:
            by_ranks[tuple((table.full[:, place] > 0).tolist())].append(int(place))
        groups = list(by_ranks.values())
        longest = max(map(len, groups))
        order = [group[turn] for turn in range(longest) for group in groups if turn < len(group)]
        first = number % len(order)
        layers[layer] = order[first:] + order[:first]
    return layers


def most_experts(table: OperatorTable) -> int:
    """Return E, the number of experts of the layer with the most; 1 without experts."""
    return max(map(len, turns(table).values()), default=1)


def chosen(order: dict[int, list[int]], experts: int, turn: int) -> list[int]:
    """Return the experts in checkpoint number ``turn``: K of each layer, from where the previous checkpoint ended."""
    return [
        experts_of_layer[(turn * experts + place) % len(experts_of_layer)]
        for experts_of_layer in order.values()
        for place in range(min(experts, len(experts_of_layer)))
    ]


def persisted(order: dict[int, list[int]], experts: int, first: int, turns_: int, count: int) -> list[list[int]]:
    """Return the :func:`chosen` experts that are written to disk (persist-PEC, section 5.1): those that waited longest.

    Args:
        order: experts of each layer, as in :func:`chosen`.
        experts: K, as in :func:`chosen`.
        first: number of the first checkpoint.
        turns_: number of consecutive checkpoints.
        count: number of experts of each layer that are written.

    Returns:
        Positions in the table, for each checkpoint.
    """
    written: dict[int, int] = {}
    turns = []
    for turn in range(first, first + turns_):
        of_turn = []
        for experts_of_layer in order.values():
            held = chosen({0: experts_of_layer}, experts, turn)
            of_turn += sorted(held, key=lambda expert: (written.get(expert, -1), expert))[:count]
        written |= dict.fromkeys(of_turn, turn)
        turns.append(of_turn)
    return turns


@dataclass(frozen=True)
class LostTokens:
    """Tokens that a recovery lost because its experts are older than the rest of the state."""

    by_expert: Mapping[str, int] = field(default_factory=dict)
    """Routed tokens whose updates were lost, by operator; operators without losses are left out."""
    shares: Mapping[int, float] = field(default_factory=dict)
    """Share of all tokens so far that this recovery and earlier ones lost, by layer with experts."""

    def __or__(self, other: LostTokens) -> LostTokens:
        """Return the losses of two stages, or of one stage that two ranks report."""
        return LostTokens({**self.by_expert, **other.by_expert}, {**self.shares, **other.shares})

    @property
    def total(self) -> int:
        """Number of routed tokens lost."""
        return sum(self.by_expert.values())

    @property
    def proportion(self) -> float:
        """PLT (equation 7): share of all tokens so far that were lost, a mean over layers with experts."""
        return float(np.mean(list(self.shares.values()))) if self.shares else 0.0


@dataclass(frozen=True, eq=False)
class TokenAccount:
    """Account of the tokens that each expert has processed, and of those whose updates were lost."""

    routed: Tokens
    """Tokens that the state has processed; each routed copy of a token counts as one."""
    lost: Tokens
    """Tokens among them whose updates recoveries lost."""

    @classmethod
    def empty(cls, operators: int) -> TokenAccount:
        """Return the account before the first iteration."""
        return cls(np.zeros(operators, dtype=np.int64), np.zeros(operators, dtype=np.int64))

    def with_routed(self, counts: npt.NDArray[np.float64]) -> TokenAccount:
        """Return the account after one or several iterations with ``counts`` tokens."""
        return TokenAccount(self.routed + np.rint(counts).astype(np.int64), self.lost)

    @property
    def kept(self) -> Tokens:
        """Tokens whose updates are in the state."""
        return self.routed - self.lost

    def rolled_back_to(self, versions: Tokens) -> TokenAccount:
        """Return this account after the job went back to its iteration with experts of ``versions``.

        Tokens that an earlier recovery lost are not lost again.

        Args:
            versions: tokens whose updates are in the restored version of each operator.
        """
        return TokenAccount(self.routed.copy(), self.routed - versions)

    def lost_since(self, before: TokenAccount, table: OperatorTable) -> LostTokens:
        """Return the tokens lost since ``before``, and the shares of all losses."""
        lost = self.lost - before.lost
        by_expert = {name: int(count) for name, count in zip(table.names, lost.tolist(), strict=True) if count}
        shares = {}
        for layer in np.unique(table.layers[table.is_expert]).tolist():
            experts = table.is_expert & (table.layers == layer)
            shares[layer] = float(self.lost[experts].sum() / max(1, self.routed[experts].sum()))
        return LostTokens(by_expert, shares)


def kept_at(versions: Sequence[int] | npt.NDArray[np.int64], learned: Mapping[int, Any]) -> Tokens:
    """Return the tokens whose updates are in each operator's version.

    Args:
        versions: iteration of each operator's version.
        learned: state of a strategy by iteration, with its ``routed`` and ``lost`` tokens. It is None for a snapshot
            that another strategy captured before this one began to count.
    """
    known = (learned[int(at)] for at in versions)
    return np.array(
        [
            0 if account is None else int(account["routed"][place] - account["lost"][place])
            for place, account in enumerate(known)
        ],
        dtype=np.int64,
    )
