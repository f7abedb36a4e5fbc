"""Folders that users give for runs: run directories, and folders of run directories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

FILES = ("config.yaml", "metrics.jsonl", "ranks.json", "job.json", "logs")
"""Names of files and folders that mark a run directory. A folder with at least one of them counts as a run."""
MOST_NAMED = 5


def is_run(folder: Path) -> bool:
    """Return True if a job has written to this folder."""
    return any((folder / name).exists() for name in FILES)


def runs_in(folder: Path) -> list[Path]:
    """Return the run directories directly below a folder, in the order in which the runs began."""
    try:
        return sorted((path for path in folder.iterdir() if path.is_dir() and is_run(path)), key=_begun)
    except OSError:
        return []


def expanded(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield run directories. A folder that is no run stands for the runs directly below it."""
    for folder in folders:
        yield from [folder] if is_run(folder) else runs_in(folder) or [folder]


def which_run(folder: Path) -> str:
    """Return the end of an error message for a folder that is no run directory: which run directory to give."""
    if not (runs := [str(path) for path in runs_in(folder)]):
        return "give the --run-dir of a run"
    more = f" or one of {len(runs) - MOST_NAMED} more" if len(runs) > MOST_NAMED else ""
    return f"give {' or '.join(runs[:MOST_NAMED])}{more}"


def _begun(folder: Path) -> tuple[float, str]:
    path = folder / "config.yaml"
    return (path.stat().st_mtime if path.exists() else 0.0), folder.name
