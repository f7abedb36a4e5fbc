"""Valid values of the environment variables that the processes of a job read: Slurm's, torch's and MoEvement's."""

from __future__ import annotations

import os
from collections.abc import Mapping

from moevement_core.errors import VariableError
from moevement_core.util.environment import FIRST_TASK_ENV, MEMBER_ENV, PARENT_ENV, STORE_ENV, TASKS_ENV
from moevement_core.util.numbers import AT_LEAST_ONE, NOT_NEGATIVE, Range

PORTS = Range(1, 65535)
NUMBERS: dict[str, Range] = {
    "RANK": NOT_NEGATIVE, "WORLD_SIZE": AT_LEAST_ONE, "LOCAL_RANK": NOT_NEGATIVE, "LOCAL_WORLD_SIZE": AT_LEAST_ONE,
    "MASTER_PORT": PORTS, "OMP_NUM_THREADS": AT_LEAST_ONE,
    "SLURM_PROCID": NOT_NEGATIVE, "SLURM_NTASKS": AT_LEAST_ONE, "SLURM_LOCALID": NOT_NEGATIVE,
    "SLURM_CPUS_PER_TASK": AT_LEAST_ONE,
    MEMBER_ENV: NOT_NEGATIVE, FIRST_TASK_ENV: NOT_NEGATIVE, TASKS_ENV: AT_LEAST_ONE, PARENT_ENV: AT_LEAST_ONE,
}  # fmt: skip
"""Variables whose values are whole numbers, with the range of each."""
CHOICES: dict[str, tuple[str, ...]] = {"MOEVEMENT_LOG": ("text", "json"), "MOEVEMENT_PLATFORM": ("cpu", "cuda")}
RANKS = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""Pairs of variables: a number counted from 0, and a count. The number must be below the count."""
_SHOWN = 60


def check_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Raise an error for the first variable with an invalid value; unset and empty variables pass.

    Raises:
        VariableError: the value is invalid; the message has the name, the value and the valid range.
    """
    for name, allowed in NUMBERS.items():
        if (text := environment.get(name)) and not allowed.holds(value := _whole(name, text)):
            raise VariableError(f"{name}={value}: needs a whole number, {allowed}")
    for name, known in CHOICES.items():
        if (text := environment.get(name)) and text not in known:
            raise VariableError(f"{name}={text[:_SHOWN]!r}: needs one of {', '.join(known)}, or to be unset")
    # In a job with spares, a member without a rank has a number at or above the world size.
    for number, count in RANKS if MEMBER_ENV not in environment else ():
        position, total = environment.get(number), environment.get(count)
        if position and total and int(position) >= int(total):
            raise VariableError(f"{number}={position} and {count}={total}: the first must be less than the second")
    if text := environment.get(STORE_ENV):
        _check_address(STORE_ENV, text)


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise VariableError(f"{name}={text[:_SHOWN]!r}: needs a whole number, {NUMBERS[name]}") from None


def _check_address(name: str, text: str) -> None:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and PORTS.holds(int(port))):
        raise VariableError(f"{name}={text[:_SHOWN]!r}: needs HOST:PORT, as moevement coordinate prints it")
