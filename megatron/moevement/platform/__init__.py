"""Megatron on a machine without CUDA, in one place, and nowhere else.

``install()`` is called once in every process that Megatron's code runs in (ranks, checkpoint writers, spawned data
workers), before Megatron is used. Where a GPU is it does nothing. Where none is, :mod:`.torch_cpu` answers
``torch.cuda`` for the CPU and :mod:`.megatron_cpu` mends what Megatron does with the answers.
"""

from __future__ import annotations

import os

import torch

from moevement_core.errors import ConfigError

PLATFORM_ENV = "MOEVEMENT_PLATFORM"
"""``cpu`` forces the CPU on a machine that has a GPU; ``cuda`` refuses to start without one; unset decides itself."""


def is_cpu() -> bool:
    """Return whether this process runs Megatron on the CPU."""
    wanted = os.environ.get(PLATFORM_ENV, "")
    if wanted not in ("", "cpu", "cuda"):
        raise ConfigError(f"{PLATFORM_ENV}={wanted!r}: needs 'cpu' or 'cuda', or leave it unset")
    return wanted == "cpu" or (wanted == "" and not torch.cuda.is_available())


def install() -> bool:
    """Make Megatron usable in this process; idempotent.

    Returns:
        True if this is a machine without CUDA and the replacements are in place, False if there is nothing to do.
    """
    if not is_cpu():
        return False
    from megatron.moevement.platform import torch_cpu

    torch_cpu.install()
    # Importing Megatron binds names of torch.cuda, so torch's answers are replaced first.
    from megatron.moevement.platform import megatron_cpu

    megatron_cpu.install()
    return True
