"""Comparison of the environments that two runs recorded, which must be equal for the runs to have equal bits.

``moevement verify --fixed-environment`` checks it, as the first gate of docs/determinism.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moevement_core.run.run_record import RunRecord
from moevement_core.util.arithmetic import DETERMINISTIC, REQUIRED, YES


def environment_complaint(a: RunRecord, b: RunRecord) -> str | None:
    """Return why the environments of two finished runs do not guarantee equal bits; None if they do.

    Every rank of both runs must have computed deterministically, with the variables of ``REQUIRED``, and both runs must
    record the same environments.

    Args:
        a: first run.
        b: second run.

    Raises:
        RunRecordError: a run is unfinished, or its summary is damaged.
    """
    recorded = [run.summary().get("environment") for run in (a, b)]
    for run, environments in zip((a, b), recorded, strict=True):
        if not environments:
            return f"{run.folder} records no environment; train it with Megatron and this version"
        for environment in environments:
            if complaint := _complaint(environment):
                return f"{run.folder}: {complaint}"
    return _difference(*recorded)


def _complaint(environment: Mapping[str, str]) -> str | None:
    """Return why an environment is not fixed; None if it is."""
    if environment.get(DETERMINISTIC) != YES:
        return "kernels add in no fixed order; train with --deterministic-mode"
    for name in REQUIRED:
        if not environment.get(name):
            return f"{name} was not set; train with --deterministic-mode, which sets it"
    return None


def _difference(a: Any, b: Any) -> str | None:
    """Return the first difference between the environments of two runs; None if they are equal."""
    if len(a) != len(b):
        return f"numbers of different environments among the ranks are {len(a)} and {len(b)}"
    for left, right in zip(a, b, strict=True):
        for name in sorted(left.keys() | right.keys()):
            if left.get(name) != right.get(name):
                return f"values of {name} are {left.get(name)} and {right.get(name)}"
    return None
