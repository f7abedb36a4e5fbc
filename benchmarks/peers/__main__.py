"""Benchmark of this project beside other systems for fault tolerance. It writes benchmarks/peers.md.

    benchmarks/peers/setup.sh          # once: the environment of the other systems
    python -m benchmarks.peers

Four gloo ranks train one small MoE with each system. In each round, all systems run once without a failure, so that a
system is compared with a job of the same minutes. Afterwards, each system runs once more, and ranks get SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from benchmarks.peers.job import SIZES
from benchmarks.peers.measure import JobError, run
from benchmarks.peers.page import FIGURE, PAGE, RECORDS, draw, report
from benchmarks.peers.systems import PLAIN, ROOT, by_name
from benchmarks.peers.versions import versions_of


def main() -> None:
    """Run the jobs, add a record to the results, and write page and figure."""
    systems = by_name()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", choices=systems, default=list(systems), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="jobs of each system without a failure")
    parser.add_argument("--kills", type=int, default=3, metavar="N", help="kills of each system")
    parser.add_argument("--iterations", type=int, default=60, metavar="N")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of killed ranks and moments")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv.peers", help="environment of the other systems")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file to which the run is added")
    parser.add_argument("--page", type=Path, default=PAGE, help="page to write")
    parser.add_argument(
        "--missing", action="store_true", help="run only the jobs that failed in the newest record, and complete it"
    )
    parser.add_argument("--only-page", action="store_true", help="write the page again from the newest record")
    arguments = parser.parse_args()
    if not arguments.only_page:
        earlier = newest(arguments.records) if arguments.missing else None
        with arguments.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(measure(arguments, earlier)) + "\n")
    record = newest(arguments.records)
    arguments.page.write_text(report(record), encoding="utf-8")
    draw(record, arguments.page.with_name(FIGURE.name))


def newest(records: Path) -> dict[str, Any]:
    """Return the newest record of a file."""
    return dict(json.loads(records.read_text(encoding="utf-8").splitlines()[-1]))


def measure(arguments: argparse.Namespace, earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Run the jobs that ``earlier`` lacks, or all jobs, and return the record of the run."""
    binaries = arguments.peers / "bin"
    systems = [
        system
        for name, system in by_name().items()
        if name in {PLAIN, *arguments.systems} and (not system.packages or (binaries / "python").exists())
    ]
    results: dict[str, dict[str, Any]] = earlier["systems"] if earlier else {}
    later = [name for name, result in results.items() if result["error"] is not None]
    for system in systems:
        results.setdefault(system.name, {"rounds": [], "kills": None})["error"] = None
    for number in range(arguments.rounds + 1):
        for system in systems:
            is_last, result = number == arguments.rounds, results[system.name]
            if is_last:
                is_done = system.name == PLAIN or not arguments.kills or result["kills"] is not None
            else:
                is_done = len(result["rounds"]) > number
            if is_done or result["error"] is not None:
                continue
            print(f"{'kills' if is_last else f'round {number + 1}'}: {system.name}", file=sys.stderr, flush=True)
            try:
                job = run(
                    system, binaries, arguments.iterations, arguments.size,
                    kills=arguments.kills if is_last else 0, seed=arguments.seed,
                ).as_record()  # fmt: skip
            except JobError as error:
                print(error, file=sys.stderr)
                result["error"] = str(error).splitlines()[0]
                continue
            if is_last:
                result["kills"] = job
            else:
                result["rounds"].append(job)
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "command": (
            f"python -m benchmarks.peers --rounds {arguments.rounds} --kills {arguments.kills} "
            f"--iterations {arguments.iterations} --seed {arguments.seed}"
        ),
        "measured_on": measured_on("torch", "nvidia-resiliency-ext"), "peers": versions_of(binaries / "python"),
        "iterations": arguments.iterations, "size": arguments.size, "systems": results,
        "later": later,
    }  # fmt: skip


if __name__ == "__main__":
    main()
