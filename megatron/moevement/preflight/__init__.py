"""Checks of a job's flags before anything is built; each error is one line with the flag, its value, and what to do.

Megatron answers most of these cases with an assertion on every rank, some of them after the model is built. Here every
rank runs the same checks on the same flags and gets the same result; rank 0 prints it. Each check is a small function
that yields complaints about the parsed, not yet validated flags. The first complaint ends the job.
"""

from __future__ import annotations

import linecache
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.moevement.elastic.setup import put_experts_in_slots
from megatron.moevement.preflight import elastic, files, machine, ranges, sizes, spares, sparse
from moevement_core import log
from moevement_core.errors import ConfigError

Check = Callable[[Namespace], Iterator[str]]
CHECKS: tuple[Check, ...] = (
    files.empty_paths, ranges.ranges, sizes.missing, sizes.world_size, sizes.experts, sizes.initialization,
    sizes.layers, sizes.widths, sizes.batch_schedule, sizes.lengths_and_batches, sizes.learning_rate,
    machine.without_gpu, machine.attention, machine.reruns, machine.optimizer, machine.fp8, machine.shared_memory,
    files.data, files.written_folders, files.metrics_endpoint, files.checkpoints, sparse.sparse_checkpoints,
    spares.spares, elastic.elastic,
)  # fmt: skip
"""Checks in the order in which they run."""


def validate_args_after_preflight(
    original: Callable[..., Any], args: Namespace, defaults: dict[str, Any] | None = None
) -> Any:
    """Run :func:`check` before ``validate_args``, and report Megatron's own assertions in one line."""
    from megatron.moevement.arguments import describe_filled_in

    check(args)
    if args.rank == 0:
        for line in describe_filled_in(args):
            log.info(line)
    try:
        validated = original(args, defaults or {})
    except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(_one_line(error)) from error
    put_experts_in_slots(args)
    return validated


def one_line_errors(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Report errors of ``original``, which builds or validates Megatron's configuration, in one line."""
    try:
        return original(*args, **kwargs)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise ConfigError(_one_line(error)) from error


def check(args: Namespace) -> None:
    """Run all checks of ``args``, and raise the first complaint as a :class:`ConfigError`."""
    for complaints in CHECKS:
        refuse(complaints(args))


def refuse(complaints: Iterator[str]) -> None:
    """Raise the first complaint, if there is one, as a :class:`ConfigError`."""
    for complaint in complaints:
        raise ConfigError(complaint)


def _one_line(error: Exception) -> str:
    """Return the message of Megatron's error in one line; without a message, the source of the failed assertion."""
    if words := " ".join(str(error).split()):
        return f"Megatron refuses these flags: {words}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    condition = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"Megatron refuses these flags: {condition} ({Path(frame.filename).name}:{frame.lineno})"
