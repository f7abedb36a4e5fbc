"""Megatron's own dense checkpoints: a torn one is named before it is loaded, a failed save is reported and not fatal.

The saving, loading and resharding is all Megatron's. Here stand only the two answers that it lacks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.moevement.restart import injection
from megatron.moevement.runtime.job import current_job
from moevement_core.injection import Phase

TRACKER = "latest_checkpointed_iteration.txt"


def complaints(folder: Path, step: int | None) -> Iterator[str]:
    """Why the checkpoint that ``--load folder`` (with ``--ckpt-step``) means cannot be loaded; nothing if it can.

    A folder without a tracker file is no complaint: Megatron then starts from fresh weights, as at a first start.
    """
    tracker = folder / TRACKER
    if folder.exists() and not folder.is_dir():
        yield f"--load {folder}: a file; needs the folder of checkpoints that --save wrote"
        return
    if step is None:
        if not tracker.exists():
            return
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if text == "release":
            return
        if not text.isdigit():
            yield f"--load {folder}: {TRACKER} holds {text[:40]!r}; needs an iteration number" + _other(folder, None)
            return
        step = int(text)
    if (fault := torn(folder / f"iter_{step:07d}")) is not None:
        yield f"--load {folder}: the checkpoint of iteration {step} is torn: {fault}{_other(folder, step)}"


def torn(checkpoint: Path) -> str | None:
    """What is missing from a checkpoint in Megatron's ``torch_dist`` format, or None if all its bytes are there.

    Other formats have no list of their bytes to compare with; of them only the folder is asked for.
    """
    if not checkpoint.is_dir():
        return f"no folder {checkpoint.name}"
    if not any(checkpoint.glob("*.distcp")) and not (checkpoint / "metadata.json").exists():
        return None if any(checkpoint.rglob("*.pt")) else f"{checkpoint.name} holds no checkpoint"
    for name in ("metadata.json", ".metadata"):
        if not (checkpoint / name).exists():
            return f"{name} is missing"
    from torch.distributed.checkpoint import FileSystemReader

    try:
        metadata = FileSystemReader(checkpoint).read_metadata()
    except Exception as error:  # a damaged pickle raises almost anything
        return f".metadata cannot be read ({type(error).__name__})"
    needed: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        end = place.offset + place.length
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
    for name, size in sorted(needed.items()):
        path = checkpoint / name
        found = path.stat().st_size if path.exists() else None
        if found is None:
            return f"{name} is missing"
        if found < size:
            return f"{name} has {found} bytes, needs {size}"
    return None


def _other(folder: Path, but: int | None) -> str:
    steps = sorted((int(path.name[5:]) for path in folder.glob("iter_*") if path.name[5:].isdigit()), reverse=True)
    whole = next((step for step in steps if step != but and torn(folder / f"iter_{step:07d}") is None), None)
    return f"; iteration {whole} is whole: add --ckpt-step {whole}" if whole is not None else "; no other one is whole"


def save_or_report(original: Callable[..., Any]) -> Callable[..., Any]:
    """``save_checkpoint`` that reports a failed save on every rank and lets training go on."""

    @functools.wraps(original)
    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        save = get_args().save
        # Non-persistent checkpoints may have folders of their own and no --save.
        if save and (problem := _from_rank_zero(lambda: _unwritable(Path(save)))):
            _report(iteration, problem)
            return None
        injection.at(Phase.SAVE, iteration)
        with _Reported(iteration) as outcome:
            original(iteration, *args, **kwargs)
            if save and torch.distributed.get_rank() == 0:
                _mark(Path(save), iteration)
        if outcome.succeeded and not get_args().async_save:
            current_job().event("checkpoint", iteration=iteration, folder=str(save))
        return None

    return save_checkpoint


def _mark(save: Path, iteration: int) -> None:
    from megatron.training import get_args

    from megatron.moevement.restart import origin

    try:
        origin.mark_saved(save, iteration, current_job().name, get_args())
    except OSError as error:  # a restart within the job will not use it, which is all
        print(f"moevement: the checkpoint of iteration {iteration} is not marked: {error.strerror}", flush=True)


def finalize_or_report(original: Callable[..., Any]) -> Callable[..., Any]:
    """``maybe_finalize_async_save``, likewise; an asynchronous save shows its failure here."""

    @functools.wraps(original)
    def maybe_finalize_async_save(*args: Any, **kwargs: Any) -> Any:
        with _Reported(None):
            return original(*args, **kwargs)

    return maybe_finalize_async_save


class _Reported:
    """Swallow Megatron's verdict on a failed save, which all ranks have agreed on, and report it once."""

    def __init__(self, iteration: int | None) -> None:
        self.iteration = iteration
        self.succeeded = False

    def __enter__(self) -> _Reported:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        from torch.distributed.checkpoint.api import CheckpointException

        self.succeeded = kind is None
        if not isinstance(error, CheckpointException):
            return False
        reasons = {f"rank {rank}: {wrapped[0]}" for rank, wrapped in error.failures.items()}
        _report(self.iteration, "; ".join(sorted(reasons)) or "a rank could not write its part")
        return True


def _report(iteration: int | None, reason: str) -> None:
    which = "" if iteration is None else f" of iteration {iteration}"
    if torch.distributed.get_rank() == 0:
        print(f"moevement: the checkpoint{which} was NOT saved: {reason}; training goes on", flush=True)
    current_job().event("checkpoint_failed", iteration=iteration, reason=reason)


def _unwritable(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"\0")
        probe.unlink()
    except OSError as error:
        return f"--save {folder}: {error.strerror}"
    return None


def _from_rank_zero(answer: Callable[[], str | None]) -> str | None:
    answers = [answer() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(answers, src=0)
    return answers[0]
