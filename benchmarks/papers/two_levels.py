"""Computation of MoC-System's figures 15a and 15b: lost tokens over K_snapshot, and over the number of faults."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.papers.checkpoint_sizes import CASES, GPT_350M_16E, Case, expert_table
from benchmarks.papers.common import table
from moevement_core.operators import OperatorTable
from moevement_core.policy.dynamic_k import PLT_LIMIT
from moevement_core.simulator.two_levels import NodeFault, TwoLevels

INTERVAL = 2
"""Iterations between checkpoints."""
CHECKPOINTS = 1000
"""Checkpoints of the training."""
TOKENS = 1 << 16
"""Tokens of each expert between two checkpoints. All experts are equally popular, so the number has no influence."""
GPUS_PER_NODE = 8
EXPERTS = GPT_350M_16E.num_experts
KS = (1, 2, 4, 8, 16)
PERSISTED = (1, 2, 4)
FAULTS = (1, 2, 4, 8, 16, 32)


def training(case: Case, experts: int, persisted: int | None, limit: float = 1.0) -> TwoLevels:
    """Return a training of GPT-350M-16E in a case of the paper's table 2."""
    shape = expert_table(GPT_350M_16E, case.expert)
    full = np.tile(shape.full, (case.groups, 1)) // case.groups
    zero = np.zeros_like(full)
    ranks = OperatorTable.of_matrices(shape.names, shape.kinds, full=full, compute=zero, gradient=zero)
    return TwoLevels(
        table=ranks,
        nodes=[rank // GPUS_PER_NODE for rank in range(case.data)],
        tokens=np.full(len(ranks), TOKENS),
        checkpoints=CHECKPOINTS,
        experts=experts,
        persisted=persisted,
        limit=limit,
    )


@cache
def share_lost(case: Case, experts: int, persisted: int) -> float:
    """Return PLT after one fault of one node, a mean over its nodes and over the checkpoints of a whole turn.

    Args:
        case: parallel layout on two nodes.
        experts: K_snapshot.
        persisted: K_persist.
    """
    run = training(case, experts, persisted)
    shares = []
    for node in sorted(set(run.nodes)):
        # After two turns, memory and disk have every expert as old as later on.
        for number in range(2 * EXPERTS, 3 * EXPERTS):
            # What follows a single fault loses nothing, so the simulation ends there.
            begun = replace(run, checkpoints=number + 1)
            (restored,) = begun.recoveries([NodeFault(number, frozenset({node}))])
            shares.append(restored.lost.total / (run.tokens.sum() * CHECKPOINTS))
    return statistics.fmean(shares)


@cache
def after_faults(count: int, limit: float) -> tuple[int, float]:
    """Return K and PLT after ``count`` faults of both nodes, evenly spread over the training, from K = 1 on."""
    faults = [NodeFault(round(CHECKPOINTS * (number + 1) / (count + 1)), frozenset({0, 1})) for number in range(count)]
    last = training(CASES[1], 1, None, limit).recoveries(faults)[-1]
    return last.experts, last.lost.proportion


def draw(axes: Sequence[Any]) -> None:
    """Draw figure 15a on the first axes, and figure 15b on the second ones."""
    for persisted in PERSISTED:
        ks = [experts for experts in KS if experts >= persisted]
        shares = [share_lost(CASES[1], experts, persisted) for experts in ks]
        axes[0].plot(list(map(str, ks)), shares, marker="o", label=f"K_persist {persisted}")
    axes[0].set(title="15a: PLT of one fault, case 2", xlabel="K_snapshot", ylim=(0, None))
    for label, limit in (("K = 1", 1.0), ("dynamic K", PLT_LIMIT)):
        axes[1].plot(FAULTS, [after_faults(count, limit)[1] for count in FAULTS], marker="o", label=label)
    axes[1].axhline(PLT_LIMIT, color="grey", linewidth=1)
    axes[1].set(title="15b: PLT over faults; the line is the limit", xlabel="faults")


def section() -> str:
    """Return the text about both figures."""
    first = share_lost(CASES[1], 1, 1)
    by_snapshot = []
    for experts in KS:
        shares = [share_lost(CASES[1], experts, persisted) for persisted in PERSISTED if persisted <= experts]
        cells = [f"{share:.3%} ({share / first:.0%})" for share in shares] + [""] * (len(PERSISTED) - len(shares))
        by_snapshot.append([str(experts), *cells, f"{share_lost(CASES[2], experts, 1):.3%}"])
    by_faults = []
    for count in FAULTS:
        experts, share = after_faults(count, PLT_LIMIT)
        by_faults.append([str(count), f"{after_faults(count, 1.0)[1]:.2%}", str(experts), f"{share:.2%}"])
    header = ("K_snapshot", *(f"K_persist {persisted}" for persisted in PERSISTED), "case 3, K_persist 1")
    return f"""## Lost tokens of two levels (figures 15a and 15b)

GPT-350M-16E, a checkpoint every {INTERVAL} iterations (assumed; in section 6.2.3 a checkpoint can follow the last after 1.2), {CHECKPOINTS * INTERVAL} iterations
(assumed), equally popular experts. PLT is proportional to the interval, and falls with the length of the training. Schedule, account
of tokens and growth of K are those of a live job.

**15a**: PLT of a single fault of one of two nodes, a mean over both nodes and over {EXPERTS} checkpoints. In case 2 a node holds half of the
experts; those of the other node come from memory. In brackets: compared with K_snapshot = K_persist = 1.

{table(header, by_snapshot)}

The paper's text says that a larger K_snapshot reduces PLT markedly, without numbers. At K_persist = 1 it falls by a half at most here,
because the lost node's experts come from disk. In case 3 each node has half of every expert (section 4.1), so no expert is whole in memory.

**15b**: faults that are evenly spread and take the memory of both nodes (assumed). K doubles by a live job's policy, from 1.

{table(("faults", "PLT, K = 1", "dynamic K", "PLT, dynamic K"), by_faults)}

The paper says that K goes from 1 to 4 and that PLT stays low, while it grows linearly with K = 1. It does not say how many faults there
are. The policy gives each doubling an equal part of {PLT_LIMIT:.2%}, so a single fault can exceed the limit by the tokens that it loses."""
