"""Division of a checkpoint over data-parallel ranks (MoC-System, sections 4.2 and 4.3).

Every data-parallel rank holds the same non-expert weights, so any rank can save them. A checkpoint that leaves experts
out gives some ranks more experts to save than others. Adaptive sharding gives the other ranks more non-expert modules.
The experts of each checkpoint are known from the start, and so is the division.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from moevement_core.operators import Bytes, OperatorTable
from moevement_core.policy.partial_experts import chosen, most_experts, turns


def expert_bytes(table: OperatorTable, experts: int) -> Bytes:
    """Return the bytes of experts that each rank saves in each checkpoint, int64 ``[turns, ranks]``.

    Checkpoints save the experts in turn (section 3.2). The rows are those until the choice repeats.

    Args:
        table: operators of a stage, with a row of bytes for each of its ranks.
        experts: K, number of experts of each layer in a checkpoint.
    """
    order, most = turns(table), most_experts(table)
    period = math.lcm(*(len(of_layer) // math.gcd(len(of_layer), experts) for of_layer in order.values()))
    selected = (chosen(order, min(experts, most), turn) for turn in range(period))
    return np.stack([table.full[:, list(places)].sum(axis=1) for places in selected])


def divide(modules: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the rank that saves each module.

    The function assigns the largest module first, and each module to the rank with the fewest bytes so far. Among equal
    ranks, the first one gets the module.

    Args:
        modules: bytes of each module. A module is not divided (section 4.2).
        loads: bytes that each rank saves without the modules. Equal loads give equal sharding (section 4.2); the bytes
            of experts in a checkpoint give adaptive sharding (section 4.3).
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    ranks = [0] * len(modules)
    for module in sorted(range(len(modules)), key=lambda module: -modules[module]):
        load, rank = heap[0]
        ranks[module] = rank
        heapq.heapreplace(heap, (load + modules[module], rank))
    return ranks


def equal_sharding(modules: Sequence[int], experts: Bytes) -> Bytes:
    """Return the bytes that ranks save if the modules are divided evenly, once for all checkpoints (section 4.2).

    Args:
        modules: bytes of each module.
        experts: bytes that ranks save without the modules, ``[turns, ranks]``.

    Returns:
        Bytes of each checkpoint and rank, int64 ``[turns, ranks]``.
    """
    return experts + _sums(modules, divide(modules, [0] * experts.shape[1]), experts.shape[1])


def adaptive_sharding(modules: Sequence[int], experts: Bytes) -> Bytes:
    """Return the bytes that ranks save if each checkpoint divides the modules by its experts (section 4.3).

    Arguments and result are those of :func:`equal_sharding`.
    """
    return np.stack([turn + _sums(modules, divide(modules, turn.tolist()), len(turn)) for turn in experts])


def _sums(modules: Sequence[int], ranks: Sequence[int], count: int) -> Bytes:
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, list(ranks), list(modules))
    return sums
