"""Colors of runs in plots and pages; told apart also by those who see few colors (Okabe and Ito)."""

from __future__ import annotations

RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
