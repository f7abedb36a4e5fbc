"""Runs `moevement bench ettr` and writes benchmarks/ettr.md and ettr.png.

python -m benchmarks.ettr
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_cli.bench_ettr import HEADER, Sample, rows_of

OUTPUT = Path(__file__).with_suffix(".md")
PLOT = OUTPUT.with_suffix(".png")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mtbf", nargs="+", default=["15", "40"], metavar="S", help="mean seconds between kills")
    parser.add_argument("--iterations", default="60", metavar="N", help="of each job")
    parser.add_argument("--repeats", default="1", metavar="R", help="schedules of kills for each MTBF")
    given = parser.parse_args()
    words = ["bench", "ettr", "--mtbf", *given.mtbf, "--iterations", given.iterations, "--repeats", given.repeats]
    words += ["--json", "--plot", str(PLOT.relative_to(Path.cwd()))]
    command = [str(Path(sys.executable).with_name("moevement")), *words]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    OUTPUT.write_text(report(words, [Sample(**one) for one in json.loads(printed.splitlines()[-1])]), encoding="utf-8")


def report(words: list[str], samples: list[Sample]) -> str:
    """The whole file, from the command's JSON."""
    return f"""# ETTR of each strategy under the same kills

    moevement {" ".join(words)}        (python -m benchmarks.ettr writes this file)

The laptop preset on four ranks (pipeline 2 x expert/data 2) and two spares, which share two cores. Ranks are killed by SIGKILL at
random moments of the wall clock, every strategy by the same schedule; ETTR is the time from the first committed iteration to
the last without checkpoints and kills over the time with them. *recovery* is the median from a kill until training went on,
iterations that are run again included. One schedule for each MTBF unless a confidence interval stands there: differences
of a few hundredths are noise.

{table(HEADER, rows_of(samples))}

![ETTR over MTBF, iterations over time](ettr.png)

What this machine cannot show: memory, disk and "network" are one host's, so a checkpoint of everything costs next to nothing
here, and long intervals, which is what dense checkpoints pay with in a data centre, are not needed. What it does show: how
much work each strategy repeats, and how long it takes to be back.

{measured_on("torch", "megatron-core")}, gloo.
"""


if __name__ == "__main__":
    main()
