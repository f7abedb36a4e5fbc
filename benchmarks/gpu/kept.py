"""Writer of the page gpu_h200.md from the results that this repository keeps.

python -m benchmarks.gpu.kept

The results come from several calls of ``python -m benchmarks.gpu`` on one kind of machine. Each result has its own date
and versions.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu.catalogue import CHECKS
from benchmarks.gpu.check import Form, Status
from benchmarks.gpu.page import page
from benchmarks.gpu.runner import Result

RESULTS = Path(__file__).parents[1] / "gpu_h200.json"
COMMAND = (
    "python -m benchmarks.gpu --only ...    (several calls; E3, E6 to E9, E15, E19 and M1 ran beside other checks)"
)


def kept_page(path: Path) -> str:
    """Return the page for the results in a file. It describes the machine of the newest result.

    Args:
        path: file in the format of ``gpu.json`` in a folder of results.
    """
    read = json.loads(path.read_text(encoding="utf-8"))
    results = {
        name: Result(**{**result, "status": Status(result["status"]), "form": Form(result["form"])})
        for name, result in read.items()
    }
    newest = max(results.values(), key=lambda result: result.began)
    return page(CHECKS, results, newest.machine, COMMAND)


if __name__ == "__main__":
    RESULTS.with_suffix(".md").write_text(kept_page(RESULTS), encoding="utf-8")
