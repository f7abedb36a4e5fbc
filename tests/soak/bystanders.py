"""Long job that a script disturbs as users and programs around it do; a seed draws the disturbances.

    python -m tests.soak.bystanders                         # thirty minutes
    python -m tests.soak.bystanders --minutes 5 --seed 7 --folder runs/bystanders

Two ranks and a spare train the example in plain torch. At random moments the script kills ranks and spares, sends them
signals, removes and fills the launcher's temporary folder, edits script and configuration, and sends signals to the
process group of the job. A job that was asked to end must end with 0 and a whole record; the script then starts it
again from its windows. At the end the record must have every iteration once, with the bits of an undisturbed run. Then
the exit code is 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from moevement_core.run.run_record import RunRecord
from tests.soak.__main__ import ROOT

SCRIPT = ROOT / "examples" / "plain_torch" / "train.py"
CONFIG = "moevement-window: 4\nseed: 7\n"
ENDLESS = 10_000_000
PATIENCE_S = 240.0


class Job:
    """Job over all of its starts, and the disturbances that it meets."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.record = RunRecord(folder / "run")
        self.script, self.config = folder / "train.py", folder / "job.yaml"
        self.windows, self.temporary = folder / "windows", folder / "tmp"
        self.done: Counter[str] = Counter()
        self._draw = draw
        self._launcher: subprocess.Popen[bytes] | None = None
        self._log = folder / "launcher.log"
        for path in (self.windows, self.temporary):
            path.mkdir(parents=True)
        self._is_mounted = not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "none", self.temporary], capture_output=True, check=False
        ).returncode

    def start(self) -> None:
        """Start the job, from its newest window if there is one, and wait until it trains."""
        self.script.write_text(SCRIPT.read_text())
        self.config.write_text(CONFIG)
        for path in self.temporary.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        before = self.iteration
        with open(self._log, "ab") as log:
            self._launcher = subprocess.Popen(
                [
                    sys.executable, "-m", "moevement_cli.main", "launch", "--trainer", "torch", "--nproc", "2",
                    "--spares", "1", self.script, "--config", self.config, "--iterations", str(ENDLESS),
                    "--run-dir", self.record.folder, "--moevement-persist-dir", self.windows,
                    "--moevement-load", self.windows,
                ],
                stdout=log, stderr=log, cwd=ROOT, start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        self.wait_for(lambda: self.iteration > before and len(self.pids("spare")) == 1, "it trains")

    @property
    def iteration(self) -> int:
        """Newest iteration that was committed; 0 before the first."""
        newest = self.record.newest_metric() if self.record.metrics_path.exists() else None
        return int(newest["iteration"]) if newest else 0

    def pids(self, role: str) -> list[int]:
        """Return the ids of living processes that have ranks (``active``) or wait for one (``spare``)."""
        try:
            listed = json.loads(self.record.ranks_path.read_text())
        except (OSError, ValueError):
            return []
        return [process["pid"] for process in listed if process["role"] == role and _lives(process["pid"])]

    def wait_for(self, holds: Callable[[], bool], goal: str) -> None:
        """Wait until ``holds()`` is true while the job runs.

        Raises:
            SystemExit: the time is over, or the job has ended.
        """
        assert self._launcher is not None
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            if (code := self._launcher.poll()) is not None:
                raise SystemExit(f"the job ended with {code} before {goal}; see {self._log}")
            if time.monotonic() > deadline:
                raise SystemExit(f"not within {PATIENCE_S:g} s: {goal}; see {self._log}")
            time.sleep(0.05)

    def goes_on(self) -> None:
        """Wait until training has continued for some iterations, with two ranks and a spare."""
        least = self.iteration + 5
        self.wait_for(
            lambda: self.iteration >= least and [len(self.pids(role)) for role in ("active", "spare")] == [2, 1],
            "training continues",
        )

    def end(self, number: signal.Signals, *, to_group: bool) -> None:
        """Send a signal that asks the job to end, and wait until it has ended.

        Raises:
            SystemExit: the exit code is not that of the signal, or iterations are lost.
        """
        assert self._launcher is not None
        least = self.iteration
        (os.killpg if to_group else os.kill)(self._launcher.pid, number)
        code = self._launcher.wait(PATIENCE_S)
        ended_in_order = number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
        if code != (0 if ended_in_order else 128 + number) or self.iteration < least:
            raise SystemExit(f"{number.name}: code {code} at iteration {self.iteration}, and {least} before")

    def _kill(self, role: str) -> None:
        """Kill a process of this role, as soon as there is one."""
        self.wait_for(lambda: bool(self.pids(role)), f"there is a process: {role}")
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(self._draw.choice(self.pids(role)), signal.SIGKILL)

    # Disturbances

    def kill_a_rank(self) -> None:
        self._kill("active")

    def kill_the_spare(self) -> None:
        self._kill("spare")

    def kill_a_rank_and_the_spare(self) -> None:
        """Kill both at once, so that no process can take over immediately."""
        self.kill_the_spare()
        self.kill_a_rank()

    def signal_ranks(self) -> None:
        """Send signals that ask to end to a rank and to the spare, but not to their launcher."""
        for pid in (self._draw.choice(self.pids("active")), *self.pids("spare")):
            with suppress(ProcessLookupError):
                os.kill(pid, self._draw.choice([signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGINT]))

    def remove_temporary_folders(self) -> None:
        """Remove temporary files as a cleaner does, then kill a spare and a rank."""
        for path in self.temporary.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        self.kill_a_rank_and_the_spare()

    def fill_the_temporary_folder(self) -> None:
        """Fill the temporary folder to the last byte, kill a rank, and free the space after the recovery."""
        filler = self.temporary / "filler"
        if self._is_mounted:
            with open(filler, "wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        self.kill_a_rank()
        self.goes_on()
        filler.unlink(missing_ok=True)

    def edit_for_the_next_experiment(self) -> None:
        """Edit script and configuration while the job runs, then kill a rank."""
        self.config.write_text(self._draw.choice(["seed: 8\n", "moevement-window: [4\n", ""]))
        self.script.write_text(self._draw.choice(["raise RuntimeError\n", SCRIPT.read_text().replace("1e-3", "1e-2")]))
        self.kill_a_rank()

    def ask_the_group_to_end(self) -> None:
        """Ask the process group to end cleanly, then start the job again."""
        self.end(self._draw.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]), to_group=True)
        self.start()

    def end_the_group_at_once(self) -> None:
        """Interrupt the process group, then start the job again from its newest window."""
        self.end(self._draw.choice([signal.SIGINT, signal.SIGHUP]), to_group=True)
        self.start()

    def close(self) -> None:
        """End the launcher if it still runs, and unmount the temporary folder."""
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.kill()
            self._launcher.wait()
        if self._is_mounted:
            subprocess.run(["umount", "-l", self.temporary], check=False)


def _lives(pid: int) -> bool:
    """Return True if a process runs; the record may list a process that was killed a moment ago."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run(folder: Path, minutes: float, seed: int) -> int:
    """Disturb a job for ``minutes`` and compare its record; return the exit code."""
    draw = random.Random(seed)
    job = Job(folder, draw)
    actions: list[Callable[[], None]] = [
        job.kill_a_rank, job.kill_the_spare, job.kill_a_rank_and_the_spare, job.signal_ranks,
        job.remove_temporary_folders, job.fill_the_temporary_folder, job.edit_for_the_next_experiment,
        job.ask_the_group_to_end, job.end_the_group_at_once,
    ]  # fmt: skip
    deadline = time.monotonic() + 60 * minutes
    try:
        job.start()
        while time.monotonic() < deadline:
            action = draw.choice(actions)
            print(f"iteration {job.iteration}: {action.__name__.replace('_', ' ')}", flush=True)
            action()
            job.done[action.__name__] += 1
            job.goes_on()
            time.sleep(draw.uniform(0, 2))
        job.end(signal.SIGTERM, to_group=False)
    finally:
        job.close()
    return compare(job, folder)


def compare(job: Job, folder: Path) -> int:
    """Compare the record with that of an undisturbed run; return the exit code."""
    iterations = [line["iteration"] for line in job.record.metrics()]
    if iterations != list(range(1, len(iterations) + 1)):
        print("the record does not have every iteration once")
        return 1
    command = [sys.executable, "-m", "moevement_cli.main"]
    (folder / "job.yaml").write_text(CONFIG)
    subprocess.run(
        [
            *command, "launch", "--trainer", "torch", "--nproc", "2", SCRIPT, "--config", folder / "job.yaml",
            "--iterations", str(len(iterations)), "--run-dir", folder / "undisturbed",
        ],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    print(f"{len(iterations)} iterations, {sum(job.done.values())} times disturbed: {dict(job.done)}")
    return subprocess.run(
        [*command, "verify", folder / "undisturbed", folder / "run"], cwd=ROOT, check=False
    ).returncode


def main() -> int:
    """Parse the command line, run the job, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "bystanders", metavar="DIR", help="must not exist"
    )
    arguments = parser.parse_args()
    # A process in the background ignores these signals, and a job that it starts would inherit that and not end.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    arguments.folder.mkdir(parents=True)
    return run(arguments.folder.absolute(), arguments.minutes, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
