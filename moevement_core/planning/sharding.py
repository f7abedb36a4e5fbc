"""Division of a checkpoint over data-parallel ranks (MoC-System, sections 4.2 and 4.3).

Every data-parallel rank holds the same non-expert weights, so any rank can save them. If a checkpoint holds only some
experts, some ranks save more experts than other ranks. Adaptive sharding makes up for this: ranks with fewer experts
save more non-expert modules. Each checkpoint's experts are known before training, so ranks need not agree on the
division at run time.
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

    Checkpoints save the experts in turn (MoC-System, section 3.2). The result has a row for each checkpoint until the
    same experts come again.

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

    The function goes through the modules from the largest to the smallest. It gives each module to the rank with the
    fewest bytes so far; among equal ranks, to the first one.

    Args:
        modules: bytes of each non-expert module. A module is never split: one rank saves all of it.
        loads: bytes that each rank saves besides the modules. Zeros give equal sharding. The bytes of the experts in a
            checkpoint give adaptive sharding.
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
    """Return the bytes that ranks save with equal sharding (MoC-System, section 4.2).

    All checkpoints divide the modules among ranks in the same way, as evenly as possible.

    Args:
        modules: bytes of each non-expert module.
        experts: result of :func:`expert_bytes`: bytes of experts that each rank saves in each checkpoint,
            ``[turns, ranks]``.

    Returns:
        Bytes that each rank saves in each checkpoint, int64 ``[turns, ranks]``.
    """
    return experts + _sums(modules, divide(modules, [0] * experts.shape[1]), experts.shape[1])


def adaptive_sharding(modules: Sequence[int], experts: Bytes) -> Bytes:
    """Return the bytes that ranks save with adaptive sharding (MoC-System, section 4.3).

    Each checkpoint divides the modules anew, so that ranks with few bytes of experts save more modules. Arguments and
    result are those of :func:`equal_sharding`.
    """
    return np.stack([turn + _sums(modules, divide(modules, turn.tolist()), len(turn)) for turn in experts])


def _sums(modules: Sequence[int], ranks: Sequence[int], count: int) -> Bytes:
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, list(ranks), list(modules))
    return sums
