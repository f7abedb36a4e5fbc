"""Choice of experts for checkpoints that leave experts out (MoC-System, section 3.2), and count of the lost tokens.

Checkpoints save the experts of a layer in a fixed order that repeats. In this order, one expert of every
expert-parallel rank comes before a second expert of any rank. The order of each layer begins one expert further on than
that of the layer before. So ranks save about equal bytes in every checkpoint.
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
    """Return the experts of each layer in the order in which checkpoints save them.

    Args:
        table: operators of a stage, with a row of bytes for each of its ranks.

    Returns:
        Positions of the experts in the table, by layer. The first checkpoint saves those at the beginning of each list.
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
    """Return E, the largest number of experts in a layer; 1 if the table has no experts."""
    return max(map(len, turns(table).values()), default=1)


def chosen(order: dict[int, list[int]], experts: int, turn: int) -> list[int]:
    """Return the experts in checkpoint number ``turn``: of each layer, the next ``experts`` ones in ``order``.

    Args:
        order: experts of each layer, from :func:`turns`.
        experts: K, number of experts of each layer in a checkpoint.
        turn: number of the checkpoint, counted from 0.

    Returns:
        Positions of the experts in the table.
    """
    return [
        experts_of_layer[(turn * experts + place) % len(experts_of_layer)]
        for experts_of_layer in order.values()
        for place in range(min(experts, len(experts_of_layer)))
    ]


def persisted(order: dict[int, list[int]], experts: int, first: int, turns_: int, count: int) -> list[list[int]]:
    """Return the experts that each checkpoint writes to disk (MoC-System, section 5.1).

    Of the :func:`chosen` experts, a checkpoint writes those that have waited longest since they were last written.

    Args:
        order: experts of each layer, as in :func:`chosen`.
        experts: K, as in :func:`chosen`.
        first: number of the first checkpoint.
        turns_: number of consecutive checkpoints.
        count: number of experts of each layer that are written.

    Returns:
        Positions of the written experts in the table, for each checkpoint.
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
    """Tokens that a recovery lost, because it restored some experts in an older state than the rest."""

    by_expert: Mapping[str, int] = field(default_factory=dict)
    """Number of routed tokens whose updates were lost, by operator; operators without losses are left out."""
    shares: Mapping[int, float] = field(default_factory=dict)
    """Lost tokens of this recovery and all earlier ones, as a share of the tokens processed so far.

    The keys are layers with experts, as in :attr:`shares_of_run`.
    """
    shares_of_run: Mapping[int, float] = field(default_factory=dict)
    """Lost tokens of this recovery and all earlier ones, as a share of the tokens of the whole run, by layer."""

    def __or__(self, other: LostTokens) -> LostTokens:
        """Return the union of the losses of two stages, or of two reports about one stage."""
        return LostTokens(
            {**self.by_expert, **other.by_expert},
            {**self.shares, **other.shares},
            {**self.shares_of_run, **other.shares_of_run},
        )

    @property
    def total(self) -> int:
        """Number of routed tokens lost."""
        return sum(self.by_expert.values())

    @property
    def proportion(self) -> float:
        """PLT (MoC-System, equation 7): lost share of the tokens of the run, as a mean over layers with experts."""
        return _mean(self.shares_of_run)

    @property
    def proportion_so_far(self) -> float:
        """Lost share of the tokens processed so far, as a mean over layers with experts."""
        return _mean(self.shares)


@dataclass(frozen=True, eq=False)
class TokenAccount:
    """Account of the tokens that each expert has processed, and of the tokens whose updates were lost."""

    routed: Tokens
    """Tokens that each expert has processed, including lost ones. A token that goes to two experts counts for each."""
    lost: Tokens
    """Part of :attr:`routed` whose updates recoveries have lost."""

    @classmethod
    def empty(cls, operators: int) -> TokenAccount:
        """Return the account before the first iteration, with all counts 0."""
        return cls(np.zeros(operators, dtype=np.int64), np.zeros(operators, dtype=np.int64))

    @classmethod
    def of(cls, learned: Mapping[str, Any]) -> TokenAccount:
        """Return the account whose counts ``learned`` holds; later changes of ``learned`` do not change it."""
        return cls(learned["routed"].copy(), learned["lost"].copy())

    def with_routed(self, counts: npt.NDArray[np.float64]) -> TokenAccount:
        """Return the account after further iterations in which ``counts`` tokens were routed to each operator."""
        return TokenAccount(self.routed + np.rint(counts).astype(np.int64), self.lost)

    @property
    def kept(self) -> Tokens:
        """Tokens that each expert has processed (:attr:`routed`), less those whose updates were :attr:`lost`."""
        return self.routed - self.lost

    def rolled_back_to(self, versions: Tokens) -> TokenAccount:
        """Return the account after a recovery that goes back to the iteration at which this account was recorded.

        The recovery restores some experts from older snapshots. Tokens that an earlier recovery lost are not counted as
        lost twice.

        Args:
            versions: tokens whose updates the restored state of each operator contains.
        """
        return TokenAccount(self.routed.copy(), self.routed - versions)

    def lost_since(self, before: TokenAccount, table: OperatorTable, tokens_of_run: int | None = None) -> LostTokens:
        """Return the tokens lost since the account ``before``, and the share of tokens that all recoveries have lost.

        Args:
            before: account before the recovery.
            table: operators of the stage.
            tokens_of_run: tokens that each layer routes in the whole run, counting a token once for each of its
                experts. None if the length of the run is unknown; then the tokens processed so far take its place.
        """
        lost = self.lost - before.lost
        by_expert = {name: int(count) for name, count in zip(table.names, lost.tolist(), strict=True) if count}
        shares, shares_of_run = {}, {}
        for layer in np.unique(table.layers[table.is_expert]).tolist():
            experts = table.is_expert & (table.layers == layer)
            lost_tokens, routed = int(self.lost[experts].sum()), int(self.routed[experts].sum())
            shares[layer] = lost_tokens / max(1, routed)
            shares_of_run[layer] = lost_tokens / max(1, routed, tokens_of_run or 0)
        return LostTokens(by_expert, shares, shares_of_run)


def _mean(shares: Mapping[int, float]) -> float:
    return float(np.mean(list(shares.values()))) if shares else 0.0


def kept_at(versions: Sequence[int] | npt.NDArray[np.int64], learned: Mapping[int, Any]) -> Tokens:
    """Return the tokens whose updates the restored state of each operator contains.

    Args:
        versions: iteration to which each operator is restored.
        learned: ``routed`` and ``lost`` tokens that the strategy had counted, by iteration. None for a snapshot that
            another strategy captured, before this strategy began to count.
    """
    known = (learned[int(at)] for at in versions)
    return np.array(
        [
            0 if account is None else int(account["routed"][place] - account["lost"][place])
            for place, account in enumerate(known)
        ],
        dtype=np.int64,
    )
