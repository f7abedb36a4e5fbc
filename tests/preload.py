"""What this project server of :mod:`tests.harness` imports once for all ranks."""

from megatron.moevement.worker import preload

preload()
