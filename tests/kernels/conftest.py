"""Tests of the kernels' code on the CPU under Triton's interpreter, which must be chosen before Triton is imported.

``tests/unit/kernels/test_kernels.py`` runs this folder in a process of its own.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
