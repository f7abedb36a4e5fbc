"""A process that runs a training script of Megatron with fault tolerance: a rank, or a process that a rank spawns.

The script runs in a main module whose origin is this module. So a spawned process (a checkpoint writer, a data worker),
which imports its parent's main module again under the name ``__mp_main__``, comes here first: it gets the platform
before anything else, and then the script's own definitions.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from moevement_core.launching.worker import Trainer, code_of, end_groups, run_script
from moevement_core.rendezvous.job_code import SCRIPT_ENV


def run_rank(argv: list[str]) -> None:
    """Run ``argv[0]`` with the rest as its arguments; see :func:`moevement_core.launching.worker.run_script`."""
    from megatron.moevement.activate import activate

    spec = sys.modules[__name__].__spec__ if __name__ != "__main__" else __spec__
    run_script(argv, spec, activate, ("transformers", "pydantic", r"megatron\.(core|training)"))


def preload() -> None:
    """Import everything that a rank without a GPU will need, so that ranks forked from here start at once."""
    from megatron.moevement.activate import activate
    from megatron.moevement.arguments import read_field_docstrings

    activate()
    read_field_docstrings()
    # What torch's optimizers import at their first step, and Megatron where it makes a tokenizer and a model.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "MimoModelConfig is experimental")  # nobody has asked for it
        for late in ("torch._dynamo", "megatron.core.tokenizers.text.libraries", "megatron.core.models.mimo"):
            import_module(late)


def _uses_gpus() -> bool:
    from megatron.moevement import platform

    return not platform.is_cpu()


def _refuse(argv: Sequence[str], ranks: int) -> None:
    from megatron.moevement.preflight.early import refuse_early

    refuse_early(argv, ranks)


MEGATRON = Trainer("megatron.moevement.worker", run_rank, preload, _uses_gpus, "--moevement-sparse-ckpt", _refuse)
"""Scripts that call Megatron's ``pretrain()``."""


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
