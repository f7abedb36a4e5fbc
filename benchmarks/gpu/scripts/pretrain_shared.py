"""Megatron's pretraining script of ``examples``, with all processes of the job on one GPU."""

from __future__ import annotations

import runpy

from benchmarks.gpu.launched import MEGATRON
from benchmarks.gpu.shared import share_device

if __name__ == "__main__":
    share_device()
    runpy.run_path(str(MEGATRON), run_name="__main__")
