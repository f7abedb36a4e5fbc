"""Trainer of ``examples/plain_torch`` whose processes know the store with faults of ``tests/faulty_store.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.plain_torch.train import main
from moevement_core.storage import object_store
from tests.faulty_store import register

if __name__ == "__main__":
    register()
    object_store.PAUSE_S = 0.001
    main()
