"""Checks that find an incomplete dense checkpoint on disk, and name its defect, before Megatron loads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.moevement.runtime.checkpoint_metadata import RefusedClass, read_metadata

TRACKER = "latest_checkpointed_iteration.txt"


def complaints(folder: Path, step: int | None) -> Iterator[str]:
    """Yield the reasons why Megatron could not load the checkpoint that ``--load`` and ``--ckpt-step`` name.

    A folder without Megatron's tracker file (:data:`TRACKER`) gives no reason, because Megatron then starts from fresh
    weights.

    Args:
        folder: value of ``--load``.
        step: value of ``--ckpt-step``; None for the iteration that the tracker file names.
    """
    tracker = folder / TRACKER
    if folder.exists() and not folder.is_dir():
        yield f"--load {folder}: this is a file; give the folder of checkpoints that --save wrote"
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
    """Return what is missing from a dense checkpoint; None if nothing is.

    A checkpoint in Megatron's ``torch_dist`` format lists the bytes that it needs. Checkpoints in other formats do not,
    so only the existence of their files is checked.
    """
    if not checkpoint.is_dir():
        return f"no folder {checkpoint.name}"
    if not any(checkpoint.glob("*.distcp")) and not (checkpoint / "metadata.json").exists():
        return None if any(checkpoint.rglob("*.pt")) else f"{checkpoint.name} holds no checkpoint"
    for name in ("metadata.json", ".metadata"):
        if not (checkpoint / name).exists():
            return f"{name} is missing"
    try:
        metadata = read_metadata(checkpoint / ".metadata")
    except RefusedClass as error:
        return f".metadata {error}"
    except Exception as error:  # A damaged pickle raises almost any exception.
        return f".metadata cannot be read ({type(error).__name__})"
    for name, size in sorted(listed_bytes(metadata).items()):
        path = checkpoint / name
        nbytes = path.stat().st_size if path.exists() else None
        if nbytes is None:
            return f"{name} is missing"
        if nbytes < size:
            return f"{name} has {nbytes} bytes, needs {size}"
    return None


def mend_tracker(folder: Path) -> None:
    """Repair Megatron's tracker file, if a writer was interrupted before it wrote an iteration into the file.

    The function writes the iteration of the newest complete checkpoint in ``folder``. Without a complete checkpoint, it
    removes the tracker file.
    """
    tracker = folder / TRACKER
    if not tracker.exists():
        return
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == "release" or text.isdecimal():
        return
    if (step := _newest_whole(folder)) is not None:
        tracker.write_text(str(step), encoding="utf-8")
    else:
        tracker.unlink()


def listed_bytes(metadata: Any) -> dict[str, int]:
    """Return the least size in bytes of each file of a checkpoint, by file name, according to its ``.metadata``."""
    ends: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return ends


def _other(folder: Path, but: int | None) -> str:
    whole = _newest_whole(folder, but)
    return (
        f"; iteration {whole} is whole: add --ckpt-step {whole}"
        if whole is not None
        else "; no other checkpoint is whole"
    )


def _newest_whole(folder: Path, but: int | None = None) -> int | None:
    steps = sorted((int(path.name[5:]) for path in folder.glob("iter_*") if path.name[5:].isdigit()), reverse=True)
    return next((step for step in steps if step != but and torn(folder / f"iter_{step:07d}") is None), None)
