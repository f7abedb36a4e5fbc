"""Which experts a checkpoint holds that holds not all of them (MoC-System, section 3.2), and what losing it costs.

Experts are taken in turn, in an order that comes by all expert-parallel ranks before it comes back to one, and each
layer begins with another of them: so the ranks save about equally much in every checkpoint.
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
    """The experts of each layer in the order in which they are saved, the first in the first checkpoint.

    Args:
        table: the operators of a stage, a row of bytes for each of its ranks.

    Returns:
        By layer, places in the table.
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
    """E: the experts of the layer that has the most; 1 without any."""
    return max(map(len, turns(table).values()), default=1)


def chosen(order: dict[int, list[int]], experts: int, turn: int) -> list[int]:
    """The experts that checkpoint number ``turn`` holds: K of each layer, beginning where the one before ended."""
    return [
        experts_of_layer[(turn * experts + place) % len(experts_of_layer)]
        for experts_of_layer in order.values()
        for place in range(min(experts, len(experts_of_layer)))
    ]


def persisted(order: dict[int, list[int]], experts: int, first: int, turns_: int, count: int) -> list[list[int]]:
    """Return those of the :func:`chosen` experts that are written to disk (persist-PEC, section 5.1): the ones that
    have waited longest.

    Args:
        order: as in :func:`chosen`.
        experts: likewise.
        first: the first turn.
        turns_: how many, one after the other.
        count: how many of each layer are written.

    Returns:
        Places in the table, by turn.
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
    """Tokens lost in a recovery whose experts are older than the rest of the state."""

    by_expert: Mapping[str, int] = field(default_factory=dict)
    """Routed tokens whose updates it lost, by operator; those that lost none are left out."""
    shares: Mapping[int, float] = field(default_factory=dict)
    """Share of all tokens so far that this and earlier recoveries lost, by layer with experts."""

    def __or__(self, other: LostTokens) -> LostTokens:
        """Return the losses of both stages, or of one that is reported twice."""
        return LostTokens({**self.by_expert, **other.by_expert}, {**self.shares, **other.shares})

    @property
    def total(self) -> int:
        """Number of routed tokens lost."""
        return sum(self.by_expert.values())

    @property
    def proportion(self) -> float:
        """PLT (equation 7): the share of tokens lost, averaged over layers with experts. Of the tokens so far."""
        return float(np.mean(list(self.shares.values()))) if self.shares else 0.0


@dataclass(frozen=True, eq=False)
class TokenAccount:
    """Account of the tokens that each expert has processed, and of those whose updates were lost."""

    routed: Tokens
    """Tokens that the state has processed; each routed copy of a token counts as one."""
    lost: Tokens
    """Tokens among them whose updates a recovery lost."""

    @classmethod
    def empty(cls, operators: int) -> TokenAccount:
        """Return the account before anything ran."""
        return cls(np.zeros(operators, dtype=np.int64), np.zeros(operators, dtype=np.int64))

    def with_routed(self, counts: npt.NDArray[np.float64]) -> TokenAccount:
        """Return the account after one or several iterations."""
        return TokenAccount(self.routed + np.rint(counts).astype(np.int64), self.lost)

    @property
    def kept(self) -> Tokens:
        """Tokens whose updates are in the state."""
        return self.routed - self.lost

    def back_to(self, versions: Tokens) -> TokenAccount:
        """This account, of the iteration that a job goes back to, with experts whose state has ``versions``.

        What an earlier recovery had lost already is not lost again.
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
    """Tokens whose updates each operator's version has.

    Args:
        versions: iterations, by operator.
        learned: of a strategy, by iteration, with its ``routed`` and ``lost``; None of a snapshot that another strategy
            took before this one counted.
    """
    known = (learned[int(at)] for at in versions)
    return np.array(
        [
            0 if account is None else int(account["routed"][place] - account["lost"][place])
            for place, account in enumerate(known)
        ],
        dtype=np.int64,
    )
