"""Benchmark of the rate at which bytes are added to a block of parity, against the package galois. It writes parity_rates.md.

python -m benchmarks.parity_rates        (a minute on two cores)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import galois
import numpy as np

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_core.replication.parity.field import add_product

OUTPUT = Path(__file__).with_suffix(".md")
NBYTES = 64 << 20
FIELD = galois.GF(2**8, irreducible_poly=0x11D)


def main() -> None:
    """Measure all methods, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity_rates", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each method (default: 5)")
    arguments = parser.parse_args()
    random = np.random.default_rng(1)
    values, total = (random.integers(256, size=NBYTES, dtype=np.uint8) for _ in range(2))

    def with_galois(coefficient: int) -> None:
        total[:] = FIELD(total) + FIELD(coefficient) * FIELD(values)

    ways: dict[str, Callable[[], None]] = {
        "XOR (M = 1, and the first block of more)": lambda: add_product(total, 1, values),
        "any other coefficient": lambda: add_product(total, 90, values),
        "any other coefficient, by galois": lambda: with_galois(90),
    }
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    rows = [[name, f"{NBYTES / statistics.median(samples) / 1e9:.2f} GB/s"] for name, samples in seconds.items()]
    OUTPUT.write_text(report(rows, arguments.rounds), encoding="utf-8")


def report(rows: list[list[str]], rounds: int) -> str:
    """Return the text of the page."""
    return f"""# Adding to parity

    python -m benchmarks.parity_rates --rounds {rounds}        (writes this file)

One thread multiplies 64 MiB of a member's bytes by a coefficient and adds them to a sum; median of {rounds} rounds, in turns.

{table(("", "rate"), rows)}

A holder adds the bytes of each member once, and digests them as every receiver does. zfec and liberasurecode encode faster
than table look-ups, but need the blocks of all members in one place at once. Parity exists to avoid that.

{measured_on("numpy", "galois", "numba")}.
"""


if __name__ == "__main__":
    main()
