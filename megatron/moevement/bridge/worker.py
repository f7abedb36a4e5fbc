"""Process that runs a script of Megatron-Bridge with fault tolerance: a rank, or a process that a rank spawns."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from moevement_core.launching.worker import TrainerKind, code_of, end_groups, run_script
from moevement_core.rendezvous.job_code import SCRIPT_ENV


def run_rank(argv: list[str]) -> None:
    """Run the script ``argv[0]`` with the other words as its arguments, without this project's flags.

    See :func:`moevement_core.launching.worker.run_script`.
    """
    spec = sys.modules[__name__].__spec__ if __name__ != "__main__" else __spec__
    run_script(argv, spec, _prepare, ("transformers", "pydantic", r"megatron\.(core|training|bridge)"))


def _prepare() -> None:
    from megatron.moevement.bridge.activate import activate_bridge
    from megatron.moevement.bridge.arguments import take_flags

    flags, sys.argv[1:] = take_flags(sys.argv[1:])
    activate_bridge(flags)


def preload() -> None:
    """Import everything that a rank without a GPU needs, so that ranks forked from this process start at once."""
    from megatron.moevement.activate import activate

    activate()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "MimoModelConfig is experimental")  # No script here asks for this model.
        for late in ("torch._dynamo", "megatron.moevement.bridge.activate", "megatron.bridge.training.pretrain"):
            import_module(late)


def _refuse(argv: Sequence[str], ranks: int) -> None:
    from megatron.moevement.bridge.preflight import refuse_without_wheel

    refuse_without_wheel(argv, ranks)


def _uses_gpus() -> bool:
    from megatron.moevement import platform

    return not platform.is_cpu()


BRIDGE = TrainerKind(
    module="megatron.moevement.bridge.worker",
    run_rank=run_rank,
    preload=preload,
    uses_gpus=_uses_gpus,
    switch="--moevement-sparse-ckpt",
    refuse=_refuse,
)
"""Trainer for scripts that call Megatron-Bridge's ``pretrain()``."""


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m megatron.moevement.bridge.worker SCRIPT [ARGS...]")
    run_rank(sys.argv[1:])
    end_groups()
elif __name__ == "__mp_main__" and SCRIPT_ENV in os.environ:
    from megatron.moevement import platform

    platform.install()
    __file__ = os.environ[SCRIPT_ENV]
    exec(code_of(__file__), globals())
