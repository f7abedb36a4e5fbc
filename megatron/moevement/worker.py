"""Process that runs a training script of Megatron with fault tolerance: a rank, or a process that a rank spawns.

The script runs as the main module, and Python records this module as the origin of the main module. A spawned process
(a checkpoint writer, a data worker) imports its parent's main module again under the name ``__mp_main__``, and so
imports this module. In a spawned process, this module first installs the replacements for machines without a GPU
(:mod:`megatron.moevement.platform`), and then executes the script's definitions.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from moevement_core.launching.worker import TrainerKind, code_of, end_groups, run_script
from moevement_core.rendezvous.job_code import SCRIPT_ENV
from moevement_core.util.extras import require


def run_rank(argv: list[str]) -> None:
    """Run the script ``argv[0]`` with the other words as its arguments.

    See :func:`moevement_core.launching.worker.run_script`.
    """
    from megatron.moevement.activate import activate

    spec = sys.modules[__name__].__spec__ if __name__ != "__main__" else __spec__
    run_script(argv, spec, activate, ("transformers", "pydantic", r"megatron\.(core|training)"))


def preload() -> None:
    """Import everything that a rank without a GPU needs, so that ranks forked from this process start at once."""
    from megatron.moevement.activate import activate
    from megatron.moevement.arguments import read_field_docstrings

    activate()
    read_field_docstrings()
    # Torch's optimizers import ``torch._dynamo`` at their first step; Megatron imports the others later.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "MimoModelConfig is experimental")  # No script here asks for this model.
        for late in ("torch._dynamo", "megatron.core.tokenizers.text.libraries", "megatron.core.models.mimo"):
            import_module(late)


def _uses_gpus() -> bool:
    from megatron.moevement import platform

    return not platform.is_cpu()


def _refuse(argv: Sequence[str], ranks: int) -> None:
    require("megatron.core", argv[0])
    from megatron.moevement.preflight.early import refuse_early

    refuse_early(argv, ranks)


MEGATRON = TrainerKind(
    module="megatron.moevement.worker",
    run_rank=run_rank,
    preload=preload,
    uses_gpus=_uses_gpus,
    switch="--moevement-sparse-ckpt",
    refuse=_refuse,
)
"""Trainer for scripts that call Megatron's ``pretrain()``."""


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m megatron.moevement.worker SCRIPT [ARGS...]")
    run_rank(sys.argv[1:])
    end_groups()
elif __name__ == "__mp_main__" and SCRIPT_ENV in os.environ:
    from megatron.moevement import platform

    platform.install()
    __file__ = os.environ[SCRIPT_ENV]
    exec(code_of(__file__), globals())
