"""Runner of the training script that is named on the command line, with an observer that measures it."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moevement_core.trainer import observer as observers

OUTPUT_ENV = "MOEVEMENT_BENCH_OUTPUT"
"""Environment variable with the folder of ``samples.json``, which rank 0 writes."""


def run_observed(observer: observers.Observer, samples: Callable[[], Any]) -> None:
    """Run the training script on the command line with an observer. Collective.

    Args:
        observer: observer that the session calls before every iteration.
        samples: function whose result rank 0 writes to ``samples.json`` when the script has ended.
    """
    observers.observe(observer)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    if os.environ["RANK"] == "0":
        Path(os.environ[OUTPUT_ENV], "samples.json").write_text(json.dumps(samples()), encoding="utf-8")
