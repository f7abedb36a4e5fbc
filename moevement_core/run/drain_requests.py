"""Requests to drain a node or a rank, as files in the run directory.

``moevement drain`` writes a file, and the coordinator reads the folder. The file of a rank stays until the rank has
left its process; the file of a node stays until the user takes the request back.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from moevement_core import log

LOOK_S = 0.5
"""Seconds between two looks at the folder."""
MOST_REASON = 200
"""Largest number of characters of a reason, which is part of log lines."""


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """Request to drain a node or a rank."""

    reason: str
    pid: int | None = None
    """Process that had the rank when the request was made; None for a node, or if it is not known."""


class DrainRequests:
    """Requests in one run directory. Any process that may write there can add requests.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "drains"
        """Folder with a file for each request. The name of the file is the target."""
        self._reported: set[str] = set()

    def add(self, target: str, request: DrainRequest) -> None:
        """Ask to drain ``target``: the name of a node, or the number of a rank.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(exist_ok=True)
        path = self._path(target)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(request)), encoding="utf-8")
        unfinished.replace(path)

    def remove(self, target: str, request: DrainRequest | None = None) -> bool:
        """Take a request back; return False if there is none.

        Args:
            target: target of the request.
            request: the request; another one for the same target stays. None for any request.

        Raises:
            OSError: the folder cannot be written.
        """
        path = self._path(target)
        if request is not None and path.is_file() and _decoded(path.read_text(encoding="utf-8")) != request:
            return False
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True

    def standing(self) -> dict[str, DrainRequest]:
        """Return the requests by target. An entry of the folder that is not readable is reported once, and left out.

        Raises:
            OSError: the folder cannot be read.
        """
        requests = {}
        for name in sorted(os.listdir(self.folder)) if self.folder.is_dir() else ():
            if name.startswith("."):
                continue
            try:
                requests[unquote(name)] = _decoded((self.folder / name).read_text(encoding="utf-8"))
            except FileNotFoundError:  # removed meanwhile
                continue
            except (OSError, ValueError) as error:
                if name not in self._reported:
                    self._reported.add(name)
                    log.warning(f"{self.folder / name}: no request to drain ({error})")
        return requests

    def _path(self, target: str) -> Path:
        return self.folder / quote(target, safe="")


def _decoded(text: str) -> DrainRequest:
    """Return the request in a file; a file without JSON, written by hand, has only the reason."""
    try:
        fields = json.loads(text)
        return DrainRequest(str(fields["reason"])[:MOST_REASON], fields["pid"])
    except (ValueError, KeyError, TypeError):
        return DrainRequest(" ".join(text.split())[:MOST_REASON] or "no reason given")


class DrainWatch:
    """Watch of the requests. A process that forks ranks calls :meth:`look` itself, others call :meth:`watch` once.

    A thread of a process that forks could hold a lock at that moment, which would stay locked in the new process.

    Args:
        requests: the requests.
    """

    def __init__(self, requests: DrainRequests) -> None:
        self.standing: Mapping[str, DrainRequest] = {}
        """Requests by target, at the last look."""
        self._requests = requests
        self._done: dict[str, DrainRequest] = {}
        self._looked_at = -float("inf")
        self._has_looked = threading.Event()

    def watch(self, timeout_s: float) -> None:
        """Start a thread that looks again and again, and wait for its first look.

        Args:
            timeout_s: longest time to wait in seconds; the disk of the run directory may not answer for long.
        """
        threading.Thread(target=self._look_for_ever, name="moevement-drains", daemon=True).start()
        self._has_looked.wait(timeout_s)

    def _look_for_ever(self) -> None:
        while True:
            self.look()
            self._has_looked.set()
            time.sleep(LOOK_S)

    def is_done(self, targets: set[str]) -> None:
        """Remove requests that are carried out, or cannot be."""
        for target in targets:
            if (request := self.standing.get(target)) is not None:
                self._done[target] = request

    def look(self) -> None:
        """Read the folder, if that was not done lately. If its disk fails, the requests stay as they were."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        with suppress(OSError):
            for target, request in list(self._done.items()):
                self._requests.remove(target, request)
                self._done.pop(target, None)
            self.standing = self._requests.standing()
