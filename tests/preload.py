"""What fork server of :mod:`tests.harness` imports once for all ranks."""

from megatron.moevement.worker import preload

preload()
