"""Imports that the fork server of :mod:`tests.harness` makes once for all ranks."""

import moevement_cli.launch  # noqa: F401
from megatron.moevement.worker import preload
from moevement_core.launching.worker import TORCH

preload()
TORCH.preload()
