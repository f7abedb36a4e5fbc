"""Script that fails on purpose under the real in-process restarts. It does not train.

The first process of the rank breaks its device, or makes one long C call during set-up. Each generation adds a line to
a file.

moevement launch --trainer torch --nproc 1 --spares 1 benchmarks/gpu/scripts/troubled.py broken-device LINES
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, override

import torch
import torch.distributed as dist

from moevement_core.device import visible_devices
from moevement_core.restart.generation import generation, waiting_for_others
from moevement_core.restart.in_process import run_through_failures
from moevement_core.restart.training import GuardSettings, Training
from moevement_core.util.environment import MEMBER_ENV

HANG_S = {"broken-device": 30.0, "long-call": 4.0}
CALL_S = 7.0
"""Seconds of the long C call, longer than the limit for a hang."""
LIMIT = 8
"""Generation from which the script no longer breaks the device, so that the check ends."""


class Troubled(Training):
    """Training of one rank, whose first process fails or hangs on purpose.

    Args:
        trouble: ``broken-device`` or ``long-call``.
        lines: file that gets a line in each generation.
    """

    def __init__(self, trouble: str, lines: Path) -> None:
        self._trouble, self._lines = trouble, lines
        self._is_first = False
        self._resumed_in = -1

    @property
    @override
    def watching(self) -> GuardSettings:
        return GuardSettings(HANG_S[self._trouble], devices=visible_devices())

    @override
    def take_rank(self, rank: int, world: int, device: int | None) -> None:
        if device is not None:
            os.environ["LOCAL_RANK"] = str(device)

    @override
    def enter(self, store: Any) -> Any:
        now = generation()
        assert now is not None
        number = now.roster.generation
        self._is_first |= number == 0
        self._write("entered", number)
        if self._trouble == "long-call" and number == 0:
            # On GPUs the limit for a hang is longer until the first commit. On CPUs this context lengthens it.
            with nullcontext() if self.watching.devices else waiting_for_others():
                ctypes.CDLL(None).usleep(int(CALL_S * 1e6))  # releases the GIL, and runs no Python code
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=now.rank, world_size=now.roster.world)
        if self._trouble == "broken-device" and self._is_first and number < LIMIT:
            break_device()
        total = torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu")
        dist.all_reduce(total)
        self._resumed_in = number
        self._write("ended", number, total=float(total))

    def _write(self, what: str, number: int, **more: float) -> None:
        with self._lines.open("a", encoding="utf-8") as file:
            line = {"what": what, "generation": number, "pid": os.getpid(), "member": os.environ[MEMBER_ENV], **more}
            file.write(json.dumps(line) + "\n")

    @override
    def interrupted(self) -> None:
        """Do nothing, because this training leaves no work half done."""

    @property
    @override
    def has_begun(self) -> bool:
        return self._trouble == "broken-device" and self._is_first

    @property
    @override
    def iteration(self) -> int:
        return 0

    @property
    @override
    def resumed_in(self) -> int:
        return self._resumed_in


def break_device() -> None:
    """Read far out of bounds on the device, which breaks the CUDA context. Without a device, raise the same error.

    Raises:
        torch.AcceleratorError: always.
    """
    if not torch.cuda.is_available():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered (rehearsed on a CPU)")
    from benchmarks.gpu.scripts.wild_read import wild_read

    wild_read()
    torch.cuda.synchronize()
    raise RuntimeError("the device did not report a read far out of bounds")


def main() -> None:
    """Run the rank until the end of the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trouble", choices=list(HANG_S))
    parser.add_argument("lines", type=Path)
    arguments = parser.parse_args()
    run_through_failures(Troubled(arguments.trouble, arguments.lines))


if __name__ == "__main__":
    main()
