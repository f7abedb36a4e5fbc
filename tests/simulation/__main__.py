"""Command that simulates many random jobs, one for each seed; it exits with 1 if a job violates an invariant.

``python -m tests.simulation --seeds 1000`` runs the seeds 0 to 999.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

from tests.simulation.scenario import Scenario, draw, with_moves
from tests.simulation.simulate import Outcome, simulate, stand_ins

CHUNK = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many (default: 1000)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="K", help="the first of them (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes that share them (default: 2)")
    parser.add_argument("--seed", type=int, metavar="K", help="this one alone")
    parser.add_argument("--moves", action="store_true", help="mix planned moves (moevement drain) into the faults")
    parser.add_argument("--trace", action="store_true", help="with --seed: print everything that happens")
    asked = parser.parse_args(arguments)
    if asked.seeds < 1 or asked.jobs < 1 or asked.first_seed < 0 or (asked.seed is not None and asked.seed < 0):
        parser.error("--seeds and --jobs need 1 or more, --first-seed and --seed 0 or more")
    if asked.trace and asked.seed is None:
        parser.error("--trace needs the --seed that is to be shown")
    if asked.seed is not None:
        return _one(asked.seed, moves=asked.moves, is_traced=asked.trace)
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    return _many(seeds, asked.jobs, moves=asked.moves)


def _scenario(seed: int, *, moves: bool) -> Scenario:
    return with_moves(draw(seed), seed) if moves else draw(seed)


def _one(seed: int, *, moves: bool, is_traced: bool) -> int:
    with stand_ins():
        outcome = simulate(seed, scenario=_scenario(seed, moves=moves), full_trace=is_traced)
    if is_traced:
        print("\n".join(outcome.trace))
    elif outcome.violation is not None:
        _show(outcome, moves=moves)
    print(f"seed {seed}: {outcome.violation or outcome.reason or 'came to its end'}, {outcome.generations} generations")
    return 0 if outcome.violation is None else 1


def _many(seeds: range, jobs: int, *, moves: bool) -> int:
    began, cpu_s, events, failed = time.monotonic(), 0.0, 0, 0
    ends: Counter[str] = Counter()
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    with multiprocessing.get_context("fork").Pool(jobs, _collect_rarely) as pool:
        for outcomes, chunk_cpu_s in pool.imap_unordered(partial(_chunk, moves=moves), chunks):
            cpu_s += chunk_cpu_s
            for outcome in outcomes:
                events += outcome.events
                ends[_end_of(outcome)] += 1
                if outcome.violation is not None:
                    failed += 1
                    _show(outcome, moves=moves)
    wall_s = time.monotonic() - began
    for end, count in ends.most_common():
        print(f"{count:8} {end}")
    each_ms, an_hour = 1e3 * cpu_s / len(seeds), 3600 * len(seeds) / wall_s
    print(
        f"{len(seeds)} seeds, {failed} violations; {events / len(seeds):,.0f} events, {each_ms:.0f} ms of a core each"
    )
    print(f"{wall_s:.1f} s with {jobs} processes: {an_hour:,.0f} seeds an hour")
    return 1 if failed else 0


def _collect_rarely() -> None:
    """Collect garbage rarely. Most objects belong to modules and stay; scanning them takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def _chunk(seeds: range, *, moves: bool) -> tuple[list[Outcome], float]:
    began = time.process_time()
    with stand_ins():
        outcomes = [simulate(seed, scenario=_scenario(seed, moves=moves)) for seed in seeds]
    return outcomes, time.process_time() - began


def _end_of(outcome: Outcome) -> str:
    if outcome.violation is not None:
        return "violations"
    if outcome.reason:
        return "stopped: no spare came"
    return f"came to the end in {outcome.generations} generations"


def _show(outcome: Outcome, *, moves: bool) -> None:
    print("\n".join(outcome.trace[-80:]))
    print(f"VIOLATION in seed {outcome.seed}: {outcome.violation}")
    again = f"--seed {outcome.seed}{' --moves' if moves else ''}"
    print(f"replay it: python -m tests.simulation {again} --trace", flush=True)


if __name__ == "__main__":
    sys.exit(main())
