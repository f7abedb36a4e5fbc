"""Looks of runs in plots and pages: colors that those who see few colors tell apart (Okabe and Ito), and dashes."""

from __future__ import annotations

RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
RUN_DASHES = ("", "6 5", "2 3", "9 3 2 3")
"""Lengths of dashes and gaps; empty: none. Equal runs lie on each other, and all are seen through the gaps."""
