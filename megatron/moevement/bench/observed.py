"""Runs the script that is measured, which follows on the command line, under an observer."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moevement_core.session import observer as observers

OUTPUT_ENV = "MOEVEMENT_BENCH_OUTPUT"
"""The folder in which rank 0, with which the others are in step, leaves ``samples.json``."""


def run_observed(observer: observers.Observer, samples: Callable[[], Any]) -> None:
    """Train; every rank calls it.

    Args:
        observer: is called before every iteration.
        samples: what rank 0 writes at the end, as JSON.
    """
    observers.observe(observer)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    if os.environ["RANK"] == "0":
        Path(os.environ[OUTPUT_ENV], "samples.json").write_text(json.dumps(samples()), encoding="utf-8")
