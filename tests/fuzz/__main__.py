"""Attack jobs as an unauthenticated peer until the time is over: ``python -m tests.fuzz --seed N --seconds S``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.job import attack, undisturbed


def main() -> int:
    """Run the command; return 1 if the attacker failed, or if a job's final state differs from the undisturbed one."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first job; each has the next")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="no job is begun after them")
    arguments = parser.parse_args()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # torch reports at length each connection that the attacker breaks
    with tempfile.TemporaryDirectory() as folder:
        wanted = undisturbed(Path(folder) / "undisturbed").summary()["state_digest"]["all"]
        began, seed, failed = time.monotonic(), arguments.seed, 0
        while seed == arguments.seed or time.monotonic() - began < arguments.seconds:
            at = time.monotonic()
            done = attack(Path(folder) / f"seed_{seed}", seed)
            is_same = done.code == 0 and done.record.summary()["state_digest"]["all"] == wanted
            failed += not is_same
            took_s = time.monotonic() - at
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(done.stranger.done.items()))
            end = "the same" if is_same else f"ANOTHER END (exit code {done.code})"
            print(f"seed {seed}: {took_s:.0f} s, {end}; {counts}")
            if done.stranger.failure:
                print(f"seed {seed}: the stranger itself failed: {done.stranger.failure}")
                failed += 1
            if not is_same:
                print(done.output[-4000:])
            sys.stdout.flush()
            seed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
