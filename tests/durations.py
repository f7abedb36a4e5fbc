"""Durations of the tests: the table ``tests/durations.md``, and the check in CI.

    python -m tests.durations table FILE.xml ...   write the table from reports of pytest --junitxml
    python -m tests.durations check FILE.xml ...   fail if a test of the default set is too slow and gives no reason

A test that may take longer than :data:`LIMIT_S` gives its reason: ``@pytest.mark.slow("reason")``. The check allows for
a busy or slow machine: it multiplies the limit by the median ratio of measured durations to those in the committed
table. A test over the limit is run again, alone, and is too slow only if it exceeds the limit again.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.environment import measured_on
from tests.training import ROOT

TABLE = ROOT / "tests" / "durations.md"
LIMIT_S = 20.0
SHOWN_S = 5.0
"""Shortest duration of a test with its own row in the table, in seconds."""
COMPARED_S = 1.0
"""Shortest duration of a file, in seconds, that counts for the speed of a machine; shorter ones are mostly noise."""


@dataclass(frozen=True)
class Case:
    """Test of a report, with its duration."""

    name: str
    """Node id, as pytest takes it: ``tests/unit/test_a.py::test_b[c]``."""
    seconds: float
    """Wall-clock time in seconds, fixtures included."""
    reason: str
    """Reason that the test may take longer than the limit; empty if it gives none."""

    @property
    def file(self) -> str:
        """Path of the test's file, relative to the root of the repository."""
        return self.name.partition("::")[0]


def read(paths: Iterable[Path]) -> list[Case]:
    """Return the tests of the reports that ``pytest --junitxml`` has written."""
    cases = []
    for path in paths:
        for entry in ElementTree.parse(path).getroot().iter("testcase"):
            properties = {item.get("name"): item.get("value") for item in entry.iter("property")}
            name = properties.get("nodeid")
            if name is not None:  # a module that could not be imported has none
                cases.append(Case(name, float(entry.get("time", "0")), properties.get("slow") or ""))
    return cases


def table(cases: Sequence[Case], measured: str) -> str:
    """Return the text of the page: each long test, and the total of each file."""
    files: dict[str, list[Case]] = {}
    for case in cases:
        files.setdefault(case.file, []).append(case)
    seconds = {file: sum(case.seconds for case in file_cases) for file, file_cases in files.items()}
    lines = [
        "# How long the tests take",
        "",
        f"Written by `make durations`; {measured}.",
        "",
        "Seconds of wall-clock time, fixtures included. Workers run tests side by side, so the sum is",
        f"more than the time of `make test`. CI fails where a test takes more than {LIMIT_S:.0f} s and has no reason",
        "beside its name ([docs/testing.md](../docs/testing.md)).",
        "",
        f"{len(cases)} tests, {sum(seconds.values()):.0f} s in all.",
        "",
        f"## Tests of {SHOWN_S:.0f} seconds and more",
        "",
        "| seconds | test | why it may take longer |",
        "|--:|---|---|",
    ]
    slowest = sorted((case for case in cases if case.seconds >= SHOWN_S), key=lambda case: -case.seconds)
    lines += [f"| {case.seconds:.1f} | `{_in_table(case.name)}` | {case.reason} |" for case in slowest]
    lines += ["", "## Files", "", "| seconds | tests | file |", "|--:|--:|---|"]
    lines += [
        f"| {seconds[file]:.1f} | {len(files[file])} | `{file}` |"
        for file in sorted(files, key=lambda file: -seconds[file])
    ]
    return "\n".join(lines) + "\n"


def committed(text: str) -> dict[str, float]:
    """Return the seconds of each file, read from a page that :func:`table` wrote."""
    rows = (line.split("|") for line in text.partition("## Files")[2].splitlines())
    return {cells[3].strip(" `"): float(cells[1]) for cells in rows if len(cells) == 5 and "`" in cells[3]}


def slowdown(cases: Sequence[Case], before: dict[str, float]) -> float:
    """Return the median ratio of the durations of files to those of the committed table, at least 1."""
    now: dict[str, float] = {}
    for case in cases:
        now[case.file] = now.get(case.file, 0.0) + case.seconds
    ratios = [
        now[file] / seconds_before
        for file, seconds_before in before.items()
        if file in now and seconds_before >= COMPARED_S
    ]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def too_slow(cases: Sequence[Case], factor: float) -> list[Case]:
    """Return the tests over the limit that give no reason."""
    return [case for case in cases if case.seconds > LIMIT_S * factor and not case.reason]


def _run_again(cases: Sequence[Case]) -> list[Case]:
    """Run each test alone and return the new durations."""
    again = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "again.xml"
            command = [sys.executable, "-m", "pytest", "-q", case.name, f"--junitxml={report}"]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            again += read([report])
    return again


def check(cases: Sequence[Case]) -> int:
    """Print the tests that are too slow even when they run alone, and return the exit code."""
    factor = slowdown(cases, committed(TABLE.read_text(encoding="utf-8")))
    suspects = too_slow(cases, factor)
    print(f"durations: {len(cases)} tests, {factor:.2f} times those of {TABLE.name}; {len(suspects)} over the limit")
    late = too_slow(_run_again(suspects), factor)
    for case in late:
        print(
            f"durations: {case.name} takes {case.seconds:.1f} s; needs at most {LIMIT_S * factor:.0f} s here: make it "
            'faster, mark it as full, or give a reason with @pytest.mark.slow("...")',
            file=sys.stderr,
        )
    return int(bool(late))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__)
    parser.add_argument("action", choices=["table", "check"])
    parser.add_argument("reports", nargs="+", type=Path, metavar="FILE.xml")
    arguments = parser.parse_args(argv)
    cases = read(arguments.reports)
    if not cases:
        parser.error(f"{arguments.reports[0]}: holds no test; needs a file that pytest --junitxml has written")
    if arguments.action == "check":
        return check(cases)
    TABLE.write_text(table(cases, measured_on("torch", "pytest")), encoding="utf-8")
    return 0


def _in_table(name: str) -> str:
    return name.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
