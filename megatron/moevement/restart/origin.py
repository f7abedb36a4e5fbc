"""Choice of the checkpoint from which a job restarts after it lost the state in memory.

The job loads the newest dense checkpoint that it has saved itself, with all of its state. Flags such as ``--load``,
``--finetune`` and ``--no-load-optim`` do not count then, because they say how the job was to start the first time.
Without such a checkpoint, the job starts as it did the first time, from the same checkpoint, even if ``--load`` has
newer checkpoints by now. If a window on disk is newer than the chosen checkpoint, the job loads the window instead
(:mod:`moevement_core.saving.window_start`).
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.moevement.runtime.dense_checkpoint import TRACKER, mend_tracker, torn
from moevement_core.comms.exchange import broadcast_object
from moevement_core.errors import RecoveryError
from moevement_core.saving.identity import JobNames, remember

MARKER = ".moevement-job"
"""Name of the file in a checkpoint's folder that names the job that saved it, and says whether all state was saved."""
_FIRST = "job/first_checkpoint"
RELEASE = "release"


@dataclass(frozen=True)
class Origin:
    """Checkpoint or seed from which a job starts, unless a window on disk is newer."""

    sentence: str
    """Description of the origin for the log."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Values of Megatron's flags that replace the user's values while Megatron loads."""
    is_resumed: bool = False
    """True if the origin is a checkpoint that the job saved itself."""


def mark_saved(save: Path, iteration: int, job: str, args: Namespace) -> None:
    """Write the file :data:`MARKER` into a checkpoint's folder. Rank 0 calls it during or after the save.

    Raises:
        OSError: the folder is not writable.
    """
    folder = save / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    is_all = not (args.no_save_optim or args.no_save_rng)
    (folder / MARKER).write_text(json.dumps({"job": job, "all": is_all}), encoding="utf-8")


def newest_saved(save: str | None, job: str, bad: Collection[int] = ()) -> int | None:
    """Return the iteration of the newest complete checkpoint in ``save`` that ``job`` saved with all of its state.

    Args:
        save: folder of ``--save``; None without one.
        job: name of the job.
        bad: iterations whose checkpoints do not count, because the job goes back from them.

    Returns:
        The iteration; None if there is no such checkpoint.
    """
    if save is None or (finished := _tracker(Path(save))) is None or not finished.isdigit():
        return None
    steps = sorted((int(path.name[5:]) for path in Path(save).glob("iter_*") if path.name[5:].isdigit()), reverse=True)
    for step in steps:
        folder = Path(save) / f"iter_{step:07d}"
        with suppress(OSError, ValueError):
            marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
            if (
                step <= int(finished)
                and step not in bad
                and marker == {"job": job, "all": True}
                and torn(folder) is None
            ):
                return step
    return None


def checkpoint_meant(args: Namespace) -> str:
    """Return the checkpoint that Megatron would load now: its iteration, ``release``, or an empty string for none."""
    if not args.load:
        return ""
    return str(args.ckpt_step) if args.ckpt_step is not None else _tracker(Path(args.load)) or ""


def resumed(save: str, step: int) -> Origin:
    """Return the origin of a resume from the checkpoint of iteration ``step`` that the job saved itself."""
    return Origin(
        f"the checkpoint of iteration {step} that the job saved in --save {save}, with optimizer and random states",
        {
            "load": save, "ckpt_step": step, "finetune": False, "no_load_optim": False, "no_load_rng": False,
            "pretrained_checkpoint": None,
        },
        is_resumed=True,
    )  # fmt: skip


def as_at_first(args: Namespace, first: str) -> Origin:
    """Return the origin from which the job started the first time.

    Args:
        args: Megatron's arguments as the user gave them.
        first: result of :func:`checkpoint_meant` at the first start.

    Raises:
        RecoveryError: the checkpoint of the first start no longer exists.
    """
    if not first:
        weights = f"--pretrained-checkpoint {args.pretrained_checkpoint}" if args.pretrained_checkpoint else "the seed"
        return Origin(f"{weights}, as at the job's first start", {"load": None, "ckpt_step": None})
    if first == RELEASE:
        if checkpoint_meant(args) != RELEASE:
            raise RecoveryError(
                f"--load {args.load}: this job began from the checkpoint 'release' there, but {TRACKER} now names "
                "another checkpoint, so a recovery cannot load 'release'; start anew, and give --save another folder "
                "than --load"
            )
        return Origin(f"the release in --load {args.load}, as at the job's first start")
    if (fault := torn(Path(args.load) / f"iter_{int(first):07d}")) is not None:
        raise RecoveryError(
            f"--load {args.load}: the checkpoint of iteration {first}, from which the job first started, is missing or "
            f"torn: {fault}; start the job again from another checkpoint"
        )
    return Origin(
        f"the checkpoint of iteration {first} in --load {args.load}, under the same flags as at the job's first start",
        {"ckpt_step": int(first)},
    )


@contextmanager
def loading(names: JobNames, args: Namespace) -> Iterator[Origin]:
    """Choose the origin of this start, and set its flags in ``args`` while Megatron builds and loads. Collective.

    Raises:
        RecoveryError: the job restarts, but the checkpoint of its first start no longer exists; raised on all ranks.
    """
    decided: tuple[Origin | None, str] = None, ""
    if dist.get_rank() == 0:
        first = remember(_FIRST, checkpoint_meant(args))
        try:
            decided = _decide(names, args, first), ""
        except RecoveryError as error:
            decided = None, str(error)
    origin, refused = broadcast_object(decided, tuple[Origin | None, str])
    if origin is None:
        raise RecoveryError(refused)
    before = {name: getattr(args, name) for name in origin.flags}
    try:
        vars(args).update(origin.flags)
        yield origin
    finally:
        vars(args).update(before)


def _decide(names: JobNames, args: Namespace, first: str) -> Origin:
    if not names.is_restart:
        return Origin("the state that the flags name")
    if args.save:
        with suppress(OSError):  # The folder may be read-only, and still hold a checkpoint.
            mend_tracker(Path(args.save))
        bad = names.rollback.bad_checkpoints if names.rollback is not None else ()
        if (step := newest_saved(args.save, names.name, bad)) is not None:
            return resumed(args.save, step)
    return as_at_first(args, first)


def _tracker(folder: Path) -> str | None:
    try:
        return (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
