"""Measured pages whose numbers may be out of date, because the code that they measure has changed since.

``python scripts/page_ages.py`` prints a line for each such page, and ``make docs`` runs it. It needs a git checkout.
Pages that only compute are left out: a test makes them again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
JOB = ("moevement_core", "megatron/moevement", "kernels")
"""Code that runs in a job."""
NOT_IN_A_JOB = ("moevement_core/simulator", "moevement_core/planning", "moevement_core/monitoring")
COMPUTED = ("elastic", "reorders", "policy", "simulator")
"""Pages outside of ``papers/`` that only compute."""
MEASURED_PAPERS = ("imbalance", "ablation")
"""Pages in ``papers/`` that measure."""
_LAST = re.compile(r"^(20\d\d-\d\d-\d\d), .*cores", re.MULTILINE)
_COMMIT = re.compile(r", commit ([0-9a-f]{7,40})\b")


@dataclass(frozen=True)
class Page:
    """Page of measurements, and what it says about the code that it measured."""

    path: Path
    """Path in the project."""
    day: str
    """Day of the measurement, as in ``2026-11-27``."""
    commit: str | None
    """Commit that was measured; None for a page that does not name it."""

    def changes(self, root: Path) -> int:
        """Return how many commits since the measurement changed the code that the page measures.

        Raises:
            CalledProcessError: ``root`` is no git checkout, or lacks the commit.
        """
        since = [f"{self.commit}..HEAD"] if self.commit else [f"--since={self.day} 23:59:59"]
        paths = [*JOB, str(self.path.with_suffix(".py")), *(f":(exclude){path}" for path in NOT_IN_A_JOB)]
        command = ["git", "-C", str(root), "log", "--oneline", *since, "--", *paths]
        return len(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines())


def measured(root: Path) -> Iterator[Page]:
    """Yield the measured pages of the project in ``root``."""
    folder = root / "benchmarks"
    papers = (path for path in sorted(folder.glob("papers/*.md")) if path.stem in MEASURED_PAPERS)
    for path in (*(path for path in sorted(folder.glob("*.md")) if path.stem not in COMPUTED), *papers):
        text = path.read_text(encoding="utf-8")
        if last := _LAST.search(text):
            line = text[last.start() :].partition("\n")[0]
            commit = _COMMIT.search(line)
            yield Page(path.relative_to(root), last.group(1), commit.group(1) if commit else None)


def outdated(root: Path) -> Iterator[str]:
    """Yield a line for each measured page whose code has changed since."""
    for page in measured(root):
        if count := page.changes(root):
            yield f"{page.path}: measured on {page.day}; {count} commits since then changed the code that it measures"


def main() -> None:
    """Print a warning for each page that may be out of date."""
    try:
        for line in outdated(ROOT):
            print(f"warning: {line}", file=sys.stderr)
    except (OSError, subprocess.CalledProcessError):
        print("no git history: nobody can say which measured pages are out of date", file=sys.stderr)


if __name__ == "__main__":
    main()
