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
    parser.add_argument("--iterations", type=int, default=40, metavar="N")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of killed ranks and moments")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv.peers", help="environment of the other systems")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file to which the run is added")
    parser.add_argument("--page", type=Path, default=PAGE, help="page to write")
    parser.add_argument("--only-page", action="store_true", help="write the page again from the newest record")
    arguments = parser.parse_args()
    if not arguments.only_page:
        with arguments.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(measure(arguments)) + "\n")
    record = json.loads(arguments.records.read_text(encoding="utf-8").splitlines()[-1])
    arguments.page.write_text(report(record), encoding="utf-8")
    draw(record, arguments.page.with_name(FIGURE.name))


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Run all jobs, and return the record of the run."""
    systems = [system for name, system in by_name().items() if name in {PLAIN, *arguments.systems}]
    binaries = arguments.peers / "bin"
    results: dict[str, dict[str, object]] = {}
    absent = []
    for system in systems:
        if system.packages and not (binaries / "python").exists():
            absent.append(system)
            print(f"{system.name}: skipped, there is no environment in {arguments.peers}", file=sys.stderr)
            continue
        results[system.name] = {"rounds": [], "kills": None, "error": None}
    present = [system for system in systems if system not in absent]
    for number in range(arguments.rounds + 1):
        for system in present:
            is_last = number == arguments.rounds
            result = results[system.name]
            if result["error"] is not None or (is_last and (system.name == PLAIN or not arguments.kills)):
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
                result["rounds"] = [*list(result["rounds"] or ()), job]  # type: ignore[call-overload]
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "command": (
            f"python -m benchmarks.peers --rounds {arguments.rounds} --kills {arguments.kills} "
            f"--iterations {arguments.iterations} --seed {arguments.seed}"
        ),
        "measured_on": measured_on("torch", "nvidia-resiliency-ext"), "peers": versions_of(binaries / "python"),
        "iterations": arguments.iterations, "size": arguments.size, "systems": results,
    }  # fmt: skip


if __name__ == "__main__":
    main()
