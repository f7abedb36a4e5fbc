"""The report of a long run calls a resource growing if it grows, and flat if it is only noisy."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.long_run import Run, draw, fit, lines_of, report


def samples(hours: float, leak_mb_per_hour: float, noise_mb: float = 20.0) -> list[dict[str, Any]]:
    """Return samples of a launcher, and of a rank whose process is replaced every six minutes."""
    chance, records = random.Random(3), list[dict[str, Any]]()
    for step in range(int(hours * 720)):
        at = 5.0 * step
        steady = {"threads": 20.0, "descriptors": 40.0, "sockets": 9.0}
        age = at % 360
        records.append(
            {
                "at_s": at,
                "processes": {
                    "1@0": {
                        "is_launcher": True, "age_s": at, **steady,
                        "memory": 2e8 + leak_mb_per_hour * 1e6 * at / 3600 + 1e6 * chance.gauss(0, noise_mb),
                    },
                    f"2@{at // 360}": {
                        "is_launcher": False, "age_s": age, **steady, "memory": 4e8 + 1e6 * chance.gauss(0, noise_mb),
                    },
                },
                "folders": {"logs": {"files": 12, "bytes": 1e6 + chance.gauss(0, 1e4)}},
            }
        )  # fmt: skip
    return records


def growing(measured: list[dict[str, Any]]) -> set[tuple[str, ...]]:
    """Return the resources that grow, each by the words that tell its name from all others."""
    words = ("memory", "threads", "descriptors", "sockets", "files", "bytes", "launcher", "processes", "age")
    return {tuple(word for word in words if word in line.name) for line in lines_of(measured) if line.grows}


def test_noise_is_flat_and_a_leak_is_not() -> None:
    assert growing(samples(2, 0)) == set()
    assert growing(samples(2, 40)) == {("memory", "launcher"), ("memory", "processes")}


def test_a_rank_that_grows_with_its_age_is_found_though_it_is_replaced() -> None:
    records = samples(2, 0, noise_mb=1)
    for record in records:
        for process in record["processes"].values():
            if not process["is_launcher"]:
                process["memory"] += 1e8 * process["age_s"] / 3600
    assert growing(records) == {("memory", "age")}


def test_a_line_has_its_slope_and_its_mean() -> None:
    line = fit("x", [(at, 100 + at / 36) for at in range(0, 7200, 5)])
    assert abs(line.per_hour - 100) < 1e-6
    assert abs(line.mean - 199.93) < 0.1
    assert line.grows


def test_the_page_says_what_grows(tmp_path: Path) -> None:
    run = Run(samples(1, 300), 5, 2, 0, 4000, True, Counter(failure=7), 3, 10**6)
    text = report(argparse.Namespace(hours=1.0, kills=5, seed=1), run)
    summary = next(line for line in text.splitlines() if line.startswith("**"))
    # Without the line "processes", whose name is part of the names of others.
    lines = [line for line in lines_of(run.samples) if "," in line.name]
    assert [line.name in summary for line in lines] == [line.grows for line in lines]
    assert growing(run.samples) == {("memory", "launcher"), ("memory", "processes")}
    assert "| memory, launcher (MB) |" in text
    draw(run.samples, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0
