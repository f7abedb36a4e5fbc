"""Headless browser with which tests look at pages."""

from __future__ import annotations

import json
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib import image

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Browser:
    """Browser of this machine, which runs without a window.

    Args:
        command: path of the browser's program.
        folder: folder for the browser's profile and for temporary files.
    """

    def __init__(self, command: str, folder: Path) -> None:
        self._folder = folder
        self._words = [
            command, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND",  # no request of a page leaves this machine
        ]  # fmt: skip

    def picture(self, page: Path, width: int, height: int) -> npt.NDArray[np.uint8]:
        """Return a picture of the page, uint8 ``[height, width, 3]``."""
        path = self._folder / "picture.png"
        self._run(f"--window-size={width},{height}", f"--screenshot={path}", page.as_uri())
        return np.rint(image.imread(path)[..., :3] * 255).astype(np.uint8)

    def measured(self, page: Path, script: str, width: int, height: int = 1000) -> Any:
        """Return the result of ``script``, the body of a function, in a copy of the page that may run scripts."""
        text = page.read_text(encoding="utf-8")
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        assert policy in text
        probe = f"document.body.dataset.measured = JSON.stringify((() => {{ {script} }})());"
        copy = self._folder / "probed.html"
        copy.write_text(
            text.replace(policy, f"{policy}; script-src 'unsafe-inline'").replace(
                "</body>", f"<script>{probe}</script></body>"
            ),
            encoding="utf-8",
        )
        dumped = self._run(f"--window-size={width},{height}", "--dump-dom", copy.as_uri())
        _, marker, tail = dumped.partition('data-measured="')
        assert marker, "the script failed"
        return json.loads(unescape(tail[: tail.index('"')]))

    def document(self, address: str) -> str:
        """Return the HTML of the page at an address after its scripts have run for ten seconds of virtual time."""
        return self._run("--virtual-time-budget=10000", "--dump-dom", address)

    def _run(self, *words: str) -> str:
        ended = subprocess.run([*self._words, *words], capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout


def find(folder: Path) -> Browser:
    """Return the browser of this machine; skip the test if there is none."""
    command = next((path for name in NAMES if (path := shutil.which(name))), None)
    if command is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)")
    return Browser(command, folder)
