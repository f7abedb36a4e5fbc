"""Colors and dashes of runs in plots and pages. The colors suit color-blind readers (Okabe and Ito)."""

from __future__ import annotations

RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
RUN_DASHES = ("", "6 5", "2 3", "9 3 2 3")
"""SVG dash patterns: lengths of dashes and gaps. An empty string is a solid line.

Curves of equal runs lie on top of each other, and the gaps keep all of them visible.
"""
