"""Requests to drain a node or a rank, as files in the run directory.

``moevement drain`` writes a file, and the coordinator reads the folder. A file stays until the drained rank has left
its process, or, for a node, until the user takes the request back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

LOOK_S = 0.5
"""Seconds between two looks at the folder."""


class DrainRequests:
    """Requests in one run directory. Any process that may write there can add requests.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "drains"
        """Folder with a file for each request. The name of the file is the target, its content the reason."""

    def add(self, target: str, reason: str) -> None:
        """Ask to drain ``target``: the name of a node, or the number of a rank.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(exist_ok=True)
        path = self._path(target)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(reason, encoding="utf-8")
        unfinished.replace(path)

    def remove(self, target: str) -> bool:
        """Take a request back; return False if there is none.

        Raises:
            OSError: the folder cannot be written.
        """
        try:
            self._path(target).unlink()
        except FileNotFoundError:
            return False
        return True

    def standing(self) -> dict[str, str]:
        """Return the reason of each request, by target.

        Raises:
            OSError: the folder cannot be read.
        """
        requests = {}
        for name in sorted(os.listdir(self.folder)) if self.folder.is_dir() else ():
            if not name.startswith("."):
                with suppress(FileNotFoundError, UnicodeDecodeError):  # removed meanwhile, or no file of this class
                    requests[unquote(name)] = (self.folder / name).read_text(encoding="utf-8").strip()
        return requests

    def _path(self, target: str) -> Path:
        return self.folder / quote(target, safe="")


class DrainWatch:
    """Watch of the requests, on a thread of its own: the disk of a run directory may not answer for a long time.

    Args:
        requests: the requests.
    """

    def __init__(self, requests: DrainRequests) -> None:
        self.standing: Mapping[str, str] = {}
        """Reason of each request, by target, at the last look."""
        self._requests = requests
        self._done: set[str] = set()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moevement-drains", daemon=True)
        self._thread.start()

    def is_done(self, targets: set[str]) -> None:
        """Remove requests that are carried out, or cannot be."""
        self._done |= targets

    def close(self) -> None:
        """End the thread; do not wait for a disk that does not answer."""
        self._ends.set()

    def _run(self) -> None:
        while not self._ends.wait(LOOK_S):
            with suppress(OSError):  # The disk may come back.
                while self._done:
                    self._requests.remove(self._done.pop())
                self.standing = self._requests.standing()
