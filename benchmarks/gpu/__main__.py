"""Everything that one GPU can check, in one call and ten minutes; writes benchmarks/gpu.json and benchmarks/gpu.md.

python -m benchmarks.gpu

Each part runs in a process of its own, with a limit of its own: what fails or hangs is reported, and the others go on.
Without a GPU the parts that do not need one run, and nothing is written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import measured_on
from benchmarks.gpu import copies, recipes, takeover, training
from benchmarks.papers.common import table

FOLDER = Path(__file__).parents[1]
PAGE, NUMBERS = FOLDER / "gpu.md", FOLDER / "gpu.json"
PARTS = {"copies": copies, "recipes": recipes, "takeover": takeover, "training": training}
LIMITS_S = {"copies": 60, "recipes": 45, "takeover": 60, "training": 210, "kernels": 180}
_MARK = "benchmarks.gpu: "


def main() -> int:
    """Run the parts; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, help="this part alone, in this process")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, "kernels"], default=[*PARTS, "kernels"])
    parser.add_argument("--output", type=Path, default=FOLDER, metavar="FOLDER", help="of the page and the numbers")
    given = parser.parse_args()
    if given.part:
        print(_MARK + json.dumps(PARTS[given.part].measure()))
        return 0
    found: dict[str, dict[str, Any]] = {}
    for name in given.parts:
        found[name] = _alone(name)
        if torch.cuda.is_available():  # after each part: a machine that is lent for a while may be gone before the last
            (given.output / NUMBERS.name).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            (given.output / PAGE.name).write_text(report(found), encoding="utf-8")
    if not torch.cuda.is_available():
        print("benchmarks.gpu: there is no GPU here; nothing is written", file=sys.stderr)
    return 1 if any("failed" in part for part in found.values()) else 0


def _alone(name: str) -> dict[str, Any]:
    """What a part found, or ``failed``: why it did not."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name]
    if name == "kernels":
        command = [sys.executable, "-m", "benchmarks.kernels", "--rounds", "5"]
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=FOLDER.parent, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=LIMITS_S[name])
    except subprocess.TimeoutExpired:
        return {"failed": f"not over in {LIMITS_S[name]} s"}
    finally:  # all that it has started: it would keep the GPU
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found: dict[str, Any] = {"took_s": round(time.perf_counter() - began, 1)}
    told = [line for line in printed.splitlines() if line.startswith(_MARK)]
    if told:
        found |= json.loads(told[-1].removeprefix(_MARK))
    elif name == "kernels" and process.returncode == 0:
        found["rows"] = [["see", "benchmarks/kernels.md"]]
    elif name == "kernels" and not torch.cuda.is_available():
        found["skipped"] = "needs a GPU"
    else:
        found["failed"] = "\n".join(printed.splitlines()[-15:])
    print(json.dumps(found, indent=1), file=sys.stderr, flush=True)
    return found


def report(found: dict[str, Any]) -> str:
    """The whole page."""
    sections = []
    for name, part in found.items():
        if "failed" in part or "skipped" in part:
            text = f"```\n{part.get('failed') or part['skipped']}\n```"
        else:
            text = table(part.get("header", ["", ""]), part["rows"])
        about = (PARTS[name].__doc__ or "").strip() if name in PARTS else "Kernels against references, and timed."
        sections.append(f"## {name.capitalize()}\n\n{about}\n\n{text}")
    body = "\n\n".join(sections)
    return f"""# On a GPU

    python -m benchmarks.gpu        (writes this file and gpu.json)

{body}

{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}; {measured_on("torch", "megatron-core", "triton")}.
"""


if __name__ == "__main__":
    sys.exit(main())
