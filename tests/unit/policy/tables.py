"""Tables of operators for the tests of the policy."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name


def equal_experts(count: int, compute: int = 2, full: int = 12) -> OperatorTable:
    """Return a table of ``count`` experts of one layer, all of the same size."""
    return table_of([(compute, full)] * count)


def table_of(sizes: list[tuple[int, int]]) -> OperatorTable:
    """Return a table of experts of one layer on one rank, with (compute, full) bytes each."""
    return OperatorTable(
        Operator(expert_name(0, index), OperatorKind.EXPERT, StateBytes(compute, full, 0))
        for index, (compute, full) in enumerate(sizes)
    )


@st.composite
def stages(draw: st.DrawFn, most: int = 12) -> OperatorTable:
    """Draw a random operator table of a stage of one to three ranks. A rank may hold no part of an operator."""
    ranks = draw(st.integers(1, 3))
    count = draw(st.integers(1, most))
    rows = []
    for _ in range(ranks):
        computes = draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
        extras = draw(st.lists(st.integers(0, 60), min_size=count, max_size=count))
        rows.append(
            [
                Operator(expert_name(0, index), OperatorKind.EXPERT, StateBytes(compute, compute + extra, 0))
                for index, (compute, extra) in enumerate(zip(computes, extras, strict=True))
            ]
        )
    return OperatorTable.of_ranks([OperatorTable(row) for row in rows])


@st.composite
def orders(draw: st.DrawFn, table: OperatorTable) -> np.ndarray:
    return np.array(draw(st.permutations(range(len(table)))), dtype=np.intp)
