"""Benchmark of the accuracy that lost ranks cost on several ranks. It writes accuracy_ranks.md and accuracy_ranks.png.

    python -m benchmarks.accuracy_ranks --text ../shared/data/wikitext-2/test.txt ../shared/data/wikitext-2/valid.txt \\
        --folder runs/accuracy_ranks        (40 minutes on two cores; results that are in the folder are used again)

The benchmark trains the laptop preset on four ranks (pipeline 2, expert 2), on WikiText-2 byte by byte. SIGKILL ends a
rank after one, two, three and four fifths of the training, each time another rank, and a spare takes over. Survivors
then have newer experts than the copies or files that the lost rank's experts come from (MoEvement, figure 12; MoEtion,
figure 8 and section 6; MoC-System, sections 5.1 and 5.3). Trainings run one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from benchmarks.accuracy import VOCABULARY, build_data, made_of
from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_cli.bench_ettr import CONFIG
from moevement_cli.bench_run import SCRIPT
from moevement_cli.plotting import figure
from moevement_core.run.run_record import RunRecord
from moevement_core.simulator.experiment import half_interval

OUTPUT = Path(__file__).with_suffix(".md")
PLOT = OUTPUT.with_suffix(".png")
RANKS = 4
KILLED = (1, 2, 3, 0)
"""Rank that each failure ends."""
FREE = "failure-free"
SEEDS = (1, 2, 3, 4, 5)
PERSIST = "{persist}"
"""Word that stands for the folder of windows on disk in :data:`STRATEGIES`."""
MOC = (
    "--moevement-strategy", "moc", "--moevement-window", "auto", "--moevement-dense-interval", "5",
    "--moevement-snapshot-experts", "2", "--moevement-persist-experts", "1", "--moevement-replicas", "0",
    "--moevement-persist-dir", PERSIST,
)  # fmt: skip
MOETION = ("--moevement-strategy", "moetion", "--moevement-window", "auto", "--moevement-snapshot-experts", "1")
STRATEGIES: dict[str, tuple[str, ...]] = {
    "moevement": (),
    "moc": MOC,
    "moetion, S = 1": MOETION,
    "moetion, S = 1, boost 0.1": (*MOETION, "--moevement-capacity-boost", "0.1"),
}
EXACT = ("moevement",)
"""Strategies that lose nothing. One seed shows that bits are equal, and more would show the same."""


@dataclass(frozen=True)
class Run:
    """Settings of one training."""

    name: str
    seed: int
    flags: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Name of the training's folder."""
        return "".join(letter if letter.isalnum() else "_" for letter in self.name) + f"_{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """Result of one training."""

    loss: float
    """Loss on the validation set at the end."""
    lost: float
    """Share of the tokens of the whole training whose updates were lost (MoC-System, equation 7)."""
    lost_after: list[float]
    """Lost share after each failure, added up, as in :attr:`lost`."""
    digest: str
    losses: list[tuple[int, float]]
    """Losses on the validation set, by iteration."""
    from_memory: int
    """Snapshots that recoveries took from memory of their own ranks."""
    from_elsewhere: int
    """Snapshots that recoveries took from peers or files."""


Outcomes = dict[Run, Outcome]


def main() -> None:
    """Train, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="text files of WikiText-2")
    parser.add_argument("--folder", type=Path, required=True, help="folder of runs and results")
    parser.add_argument("--iterations", type=int, default=60, metavar="N", help="of each training (default: 60)")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    data = build_data(folder, arguments.text)
    wanted = list(runs())
    outcomes = {run: _outcome(run, folder, data, arguments.iterations) for run in track(wanted, "trainings")}
    _plot(outcomes, arguments.iterations)
    OUTPUT.write_text(report(outcomes, arguments.iterations), encoding="utf-8")


def runs() -> Iterator[Run]:
    """Yield the trainings, seed by seed, so that an interrupted benchmark has whole seeds."""
    for seed in SEEDS:
        yield Run(FREE, seed)
        for name, flags in STRATEGIES.items():
            if name not in EXACT or seed == SEEDS[0]:
                yield Run(name, seed, flags)


def failures(iterations: int) -> list[tuple[int, int]]:
    """Return the killed rank and the iteration of each failure."""
    return [(rank, iterations * fifth // 5) for fifth, rank in enumerate(KILLED, start=1)]


def _outcome(run: Run, folder: Path, data: Path, iterations: int) -> Outcome:
    """Return the result of a training. The function trains only if the folder has no result for these settings."""
    run_dir, words = folder / run.id, _words(run, data, iterations)
    kept, settings = run_dir.with_suffix(".json"), made_of(words, folder)
    if kept.exists() and (saved := json.loads(kept.read_text(encoding="utf-8"))).pop("made_of") == settings:
        return Outcome(**saved)
    windows = folder / f"windows_{run.id}"
    for old in (run_dir, windows):
        shutil.rmtree(old, ignore_errors=True)
    spares = 0 if run.name == FREE else len(KILLED)
    command = [sys.executable, "-m", "moevement_cli.main", "launch", "--nproc", str(RANKS), "--spares", str(spares)]
    command += [str(SCRIPT), *(str(windows) if word == PERSIST else word for word in words), "--run-dir", str(run_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with run_dir.with_suffix(".console").open("wb") as console:
        subprocess.run(command, check=True, stdout=console, stderr=console, env=environment)
    shutil.rmtree(windows, ignore_errors=True)
    record = RunRecord(run_dir)
    events, summary = list(record.events()), record.summary()
    recoveries = [event for event in events if event["event"] == "recovery"]
    sources = [recovery["sources"] for recovery in recoveries]
    lost_after = [recovery.get("proportion_lost") or 0.0 for recovery in recoveries]
    outcome = Outcome(
        loss=summary["validation_loss"],
        lost=lost_after[-1] if lost_after else 0.0,
        lost_after=lost_after,
        digest=summary["state_digest"]["all"],
        losses=[(e["iteration"], e["loss"]) for e in events if e["event"] == "evaluation" and e["set"] == "validation"],
        from_memory=sum(of_recovery["memory"] for of_recovery in sources),
        from_elsewhere=sum(of_recovery["peer"] + of_recovery["file"] for of_recovery in sources),
    )
    kept.write_text(json.dumps({"made_of": settings, **asdict(outcome)}), encoding="utf-8")
    return outcome


def _words(run: Run, data: Path, iterations: int) -> list[str]:
    words = ["--config", str(CONFIG), "--train-iters", str(iterations), "--seed", str(1000 + run.seed)]
    words += ["--eval-interval", str(iterations // 5), "--eval-iters", "8", "--split", "80,10,10"]
    words += ["--data-path", str(data), "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY)]
    # Extra capacity needs a capacity. All trainings have the same, so that routers drop tokens in all of them.
    words += ["--moe-expert-capacity-factor", "1.25", *run.flags]
    if run.name != FREE:
        for rank, iteration in failures(iterations):
            words += ["--moevement-inject", f"rank={rank},iteration={iteration},phase=backward"]
    return words


def _plot(outcomes: Outcomes, iterations: int) -> None:
    with figure(PLOT, 1, (9, 5)) as axes:
        for name in (FREE, *STRATEGIES):
            own = [outcome for run, outcome in outcomes.items() if run.name == name and name not in EXACT]
            if own:
                at = [iteration for iteration, _ in own[0].losses]
                means = [
                    statistics.fmean(loss for _, loss in row)
                    for row in zip(*(outcome.losses for outcome in own), strict=True)
                ]
                axes.plot(at, means, label=name)
        for _, iteration in failures(iterations):
            axes.axvline(iteration, color="red", lw=0.5)
        axes.set(xlabel="iteration", ylabel="validation loss, mean of seeds", title="a rank lost at each line")
        axes.grid(alpha=0.3)
        axes.legend()


def _free(outcomes: Outcomes, seed: int) -> Outcome:
    return next(outcome for run, outcome in outcomes.items() if (run.name, run.seed) == (FREE, seed))


def _after_each(pairs: Sequence[tuple[Run, Outcome]]) -> str:
    """Return the mean lost share after each failure."""
    series = [outcome.lost_after for _, outcome in pairs if outcome.lost_after]
    return ", ".join(f"{statistics.fmean(shares):.2%}" for shares in zip(*series, strict=False)) if series else ""


def _row(outcomes: Outcomes, name: str) -> list[str]:
    pairs = [(run, outcome) for run, outcome in outcomes.items() if run.name == name]
    more = [outcome.loss - _free(outcomes, run.seed).loss for run, outcome in pairs]
    equal = sum(outcome.digest == _free(outcomes, run.seed).digest for run, outcome in pairs)
    spread = f" ± {half_interval(more):.4f}" if len(more) > 1 else ""
    return [
        name, f"{statistics.fmean(outcome.lost for _, outcome in pairs):.2%}", _after_each(pairs),
        f"{statistics.fmean(outcome.loss for _, outcome in pairs):.4f}", f"{statistics.fmean(more):+.4f}{spread}",
        " ".join(f"{value:+.4f}" for value in more),
        f"{sum(outcome.from_memory for _, outcome in pairs)} / {sum(outcome.from_elsewhere for _, outcome in pairs)}",
        f"{equal} of {len(pairs)}",
    ]  # fmt: skip


HEADER = (
    "strategy", "tokens lost", "after each failure", "validation loss", "over failure-free", "by seed",
    "snapshots from own memory / elsewhere", "equal bits",
)  # fmt: skip


def report(outcomes: Outcomes, iterations: int) -> str:
    """Return the text of the page."""
    noise = statistics.stdev(_free(outcomes, seed).loss for seed in SEEDS)
    rows: Sequence[list[str]] = [_row(outcomes, name) for name in (FREE, *STRATEGIES)]
    return f"""# Accuracy after lost ranks

    python -m benchmarks.accuracy_ranks --text .../wikitext-2/test.txt .../wikitext-2/valid.txt --folder runs/accuracy_ranks --iterations {iterations}

The laptop preset (4 layers, 8 experts each, top-2, capacity factor 1.25) on {RANKS} ranks (pipeline 2, expert 2), {iterations}
iterations of 2,048 bytes of WikiText-2, seeds {", ".join(map(str, SEEDS))}. SIGKILL ends ranks {", ".join(map(str, KILLED))} after one, two, three and
four fifths of the training; spares take over. Each training is compared with the failure-free training of the same seed. ± is half
of a 95% confidence interval (Student) of this difference over seeds. *tokens lost* is the share of all tokens of the training
(MoC-System, equation 7). [accuracy.md](accuracy.md) has more strategies, on one rank.

- *moc*: a snapshot every 5 iterations, no copies on peers. Memory keeps 2 experts of each layer in a snapshot, and files have 1 of
  them: survivors restore experts from memory, and a lost rank's experts come from files (section 5.1). Both numbers double as
  tokens are lost (section 5.3). The limit of 3.75% cannot hold in so short a training: at first a file has an expert once in 40
  iterations, so the first failures cost more. *after each failure* shows how much later ones add. It
  has no value for a failure before the first window is on disk: the job then starts again from its seed, and loses nothing.
- *moetion*: a snapshot in every iteration, with one expert of each layer on average. *boost*: an expert that lost tokens gets a
  tenth more capacity until it has received as many (section 6).

{table(HEADER, rows)}

Validation losses of different seeds without failures have a standard deviation of {noise:.4f}. Differences to the same seed
can be smaller and still mean something, because the two trainings differ in nothing else; where the interval contains 0, the
seeds do not show a difference.

![validation loss over iterations](accuracy_ranks.png)

{measured_on("torch", "megatron-core")}, gloo.
"""


if __name__ == "__main__":
    main()
