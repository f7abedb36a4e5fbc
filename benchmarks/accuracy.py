"""Benchmark of the accuracy that failures cost under each strategy. It writes accuracy.md and accuracy.png.

    python -m benchmarks.accuracy --text ../shared/data/wikitext-2/test.txt ../shared/data/wikitext-2/valid.txt \\
        --folder runs/accuracy        (an hour and a half on two cores; results that are in the folder are used again)

The benchmark trains the laptop preset's model on one rank, on WikiText-2 byte by byte. ``--moevement-wipe-at``
overwrites model and optimizer with NaN. The rank restores them from its own snapshots, as the strategy does after a
failure. Two trainings run at a time.

1. Four failures per training (MoEvement, figure 12 and table 5): each strategy, several seeds.
2. One failure half way (MoC-System, figure 7): several numbers of saved experts and several intervals, so that the
   trainings lose different shares of tokens.
3. Routers that drop tokens all the time (MoEtion, table 1).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import Progress

from benchmarks import dropping
from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_cli.bench_ettr import CONFIG
from moevement_cli.bench_run import SCRIPT
from moevement_cli.plotting import figure
from moevement_core.run.run_record import RunRecord
from moevement_core.simulator.experiment import half_interval

OUTPUT = Path(__file__).with_suffix(".md")
PLOT = OUTPUT.with_suffix(".png")
FREE = "failure-free"
SEEDS = (1, 2, 3)
AT_ONCE = 2
VOCABULARY = 257
"""Number of different tokens: all bytes, and the end of a document."""
OTHERS = ("--moevement-window", "auto")
LOSSY = (*OTHERS, "--moevement-plt-limit", "1")
STRATEGIES: dict[str, tuple[str, ...]] = {
    "moevement": (),
    "gemini": ("--moevement-strategy", "gemini", *OTHERS, "--moevement-dense-interval", "10"),
    "moc, K from 1": ("--moevement-strategy", "moc", *OTHERS, "--moevement-snapshot-experts", "1"),
    "moc, K = 1": ("--moevement-strategy", "moc", *LOSSY, "--moevement-snapshot-experts", "1"),
    "moc, K = 4": ("--moevement-strategy", "moc", *LOSSY, "--moevement-snapshot-experts", "4"),
    "moetion, S = 1": ("--moevement-strategy", "moetion", *OTHERS, "--moevement-snapshot-experts", "1"),
    "moetion, S = 4": ("--moevement-strategy", "moetion", *OTHERS, "--moevement-snapshot-experts", "4"),
}  # fmt: skip
HALF_WAY = tuple((experts, interval) for interval in (5, 20) for experts in (4, 2, 1))
"""Pairs of K, the experts in a snapshot, and the interval in iterations."""
DROPPED = (0.01, 0.03, 0.1, 0.2)


@dataclass(frozen=True)
class Run:
    """Settings of one training."""

    name: str
    seed: int
    flags: tuple[str, ...] = ()
    wiped_at: tuple[int, ...] = ()
    dropped: float = 0.0
    """Share of routed tokens that the routers drop."""

    @property
    def id(self) -> str:
        """Name of the training's folder."""
        words = "".join(letter if letter.isalnum() else "_" for letter in self.name)
        return f"{words}_{len(self.wiped_at)}_{1000 * self.dropped:.0f}_{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """Result of one training."""

    loss: float
    """Loss on the validation set at the end."""
    test_loss: float
    lost: float
    """Share of all routed tokens whose updates were lost (PLT)."""
    digest: str
    losses: list[tuple[int, float]]
    """Losses on the validation set, by iteration."""


def main() -> None:
    """Train, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="text files of WikiText-2")
    parser.add_argument("--folder", type=Path, required=True, help="folder of runs and results")
    parser.add_argument("--iterations", type=int, default=200, metavar="N", help="of each training (default: 200)")
    arguments = parser.parse_args()
    data = build_data(arguments.folder, arguments.text)
    wanted = list(_runs(arguments.iterations))
    outcomes = dict(_outcomes(wanted, arguments.folder, data, arguments.iterations))
    _plot(outcomes, arguments.iterations)
    OUTPUT.write_text(report(outcomes, arguments.iterations), encoding="utf-8")


def build_data(folder: Path, text: Sequence[Path]) -> Path:
    """Make ``folder`` and the data set of ``text`` in it, unless the folder has the data set; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "wikitext"
    if not data.with_suffix(".bin").exists():
        words = ["data", "build", "--documents", "line", "--output", str(data), *map(str, text)]
        subprocess.run([sys.executable, "-m", "moevement_cli.main", *words], check=True)
    return data


def _runs(iterations: int) -> Iterator[Run]:
    fifths = tuple(iterations * fifth // 5 for fifth in (1, 2, 3, 4))
    for seed in SEEDS:
        yield Run(FREE, seed)
        for name, flags in STRATEGIES.items():
            yield Run(name, seed, flags, fifths)
        for experts, interval in HALF_WAY:
            flags = ("--moevement-strategy", "moc", *LOSSY, "--moevement-snapshot-experts", str(experts))
            flags += ("--moevement-dense-interval", str(interval))
            yield Run(f"K = {experts} every {interval}", seed, flags, (iterations // 2 + 3,))
        for share in DROPPED:
            yield Run("dropped", seed, dropped=share)


def _outcomes(wanted: Sequence[Run], folder: Path, data: Path, iterations: int) -> Iterator[tuple[Run, Outcome]]:
    with Progress() as progress, ThreadPoolExecutor(AT_ONCE) as pool:
        task = progress.add_task("trainings", total=len(wanted))

        def one(run: Run) -> Outcome:
            outcome = _outcome(run, folder, data, iterations)
            progress.advance(task)
            return outcome

        yield from zip(wanted, pool.map(one, wanted), strict=True)


def _outcome(run: Run, folder: Path, data: Path, iterations: int) -> Outcome:
    """Return the result of a training. The function trains only if the folder has no result for these settings."""
    run_dir, words = folder / run.id, _words(run, data, iterations)
    kept, settings = run_dir.with_suffix(".json"), made_of([*words, str(run.dropped)], folder)
    if kept.exists() and (saved := json.loads(kept.read_text(encoding="utf-8"))).pop("made_of") == settings:
        return Outcome(**saved)
    shutil.rmtree(run_dir, ignore_errors=True)
    script = dropping.__file__ if run.dropped else str(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", dropping.SHARE_ENV: str(run.dropped)}
    command = [sys.executable, "-m", "moevement_cli.main", "launch", "--nproc", "1", script, *words]
    command += ["--run-dir", str(run_dir)]
    with run_dir.with_suffix(".console").open("wb") as console:
        subprocess.run(command, check=True, stdout=console, stderr=console, env=environment)
    record = RunRecord(run_dir)
    events, summary = list(record.events()), record.summary()
    recoveries = [event for event in events if event["event"] == "recovery"]
    # Recoveries from the same snapshot lost the same tokens, so the sum counts them once.
    lost = sum(
        {
            recovery["until"] - recovery["replayed"]: sum(recovery["lost_tokens"].values()) for recovery in recoveries
        }.values()
    )
    routed = sum(1 for _ in record.metrics()) * 16 * 128 * 2 * 4  # samples, positions, experts of a token, layers
    losses = [(e["iteration"], e["loss"]) for e in events if e["event"] == "evaluation" and e["set"] == "validation"]
    outcome = Outcome(
        loss=summary["validation_loss"],
        test_loss=summary["test_loss"],
        lost=lost / routed,
        digest=summary["state_digest"]["all"],
        losses=losses,
    )
    kept.write_text(json.dumps({"made_of": settings, **asdict(outcome)}), encoding="utf-8")
    return outcome


def _words(run: Run, data: Path, iterations: int) -> list[str]:
    words = ["--config", str(CONFIG), "--train-iters", str(iterations), "--seed", str(1000 + run.seed)]
    words += ["--pipeline-model-parallel-size", "1", "--expert-model-parallel-size", "1", "--eval-interval", "20"]
    words += ["--eval-iters", "8", "--split", "80,10,10", "--data-path", str(data), "--tokenizer-type", "NullTokenizer"]
    words += ["--vocab-size", str(VOCABULARY), *(run.flags or OTHERS)]
    if run.wiped_at:
        words += ["--moevement-wipe-at", *map(str, run.wiped_at)]
    if run.dropped:  # The dispatcher expects a fixed number of tokens, so experts need capacity for all of them.
        words += ["--moe-expert-capacity-factor", "8"]
    return words


def made_of(words: Sequence[str], folder: Path) -> str:
    """Return a digest of a training's settings that does not depend on the paths of the folder and the project."""
    return hashlib.sha256(" ".join(words).replace(str(folder), "").replace(str(CONFIG.parent), "").encode()).hexdigest()


Outcomes = dict[Run, Outcome]


def _plot(outcomes: Outcomes, iterations: int) -> None:
    with figure(PLOT, 3, (18, 5)) as (over_time, of_lost, of_dropped):
        for name in (FREE, *STRATEGIES):
            own = [outcome for run, outcome in outcomes.items() if run.name == name]
            means = [
                statistics.fmean(loss for _, loss in at)
                for at in zip(*(outcome.losses for outcome in own), strict=True)
            ]
            over_time.plot([at for at, _ in own[0].losses], means, label=name)
        for fifth in (1, 2, 3, 4):
            over_time.axvline(iterations * fifth // 5, color="red", lw=0.5)
        over_time.set(xlabel="iteration", ylabel="validation loss, mean of seeds", title="four failures")
        for axes, pairs, shares in (
            (of_lost, _half_way(outcomes), [outcome.lost for _, outcome in _half_way(outcomes)]),
            (of_dropped, _dropped(outcomes), [run.dropped for run, _ in _dropped(outcomes)]),
        ):
            axes.scatter([100 * share for share in shares], [_more(outcomes, run, outcome) for run, outcome in pairs])
            axes.axhline(0.0, color="black", lw=0.5)
            axes.axhspan(-_noise(outcomes), _noise(outcomes), alpha=0.15, label="between seeds without failures")
            axes.set(ylabel="validation loss over that of the seed without failures")
        of_lost.set(xlabel="tokens lost, % of the training's", title="one failure half way")
        of_dropped.set(xlabel="tokens dropped by routers, %", title="dropped all the time")
        for axes in (over_time, of_lost, of_dropped):
            axes.grid(alpha=0.3)
            axes.legend()


def _half_way(outcomes: Outcomes) -> list[tuple[Run, Outcome]]:
    return [(run, outcome) for run, outcome in outcomes.items() if len(run.wiped_at) == 1]


def _dropped(outcomes: Outcomes) -> list[tuple[Run, Outcome]]:
    return [(run, outcome) for run, outcome in outcomes.items() if run.dropped]


def _free(outcomes: Outcomes, seed: int) -> Outcome:
    return next(outcome for run, outcome in outcomes.items() if (run.name, run.seed) == (FREE, seed))


def _more(outcomes: Outcomes, run: Run, outcome: Outcome) -> float:
    """Return the validation loss minus that of the same seed without failures."""
    return outcome.loss - _free(outcomes, run.seed).loss


def _noise(outcomes: Outcomes) -> float:
    """Return the standard deviation of the validation loss between seeds without failures."""
    return statistics.stdev(_free(outcomes, seed).loss for seed in SEEDS)


def _row(outcomes: Outcomes, pairs: Sequence[tuple[Run, Outcome]]) -> list[str]:
    more = [_more(outcomes, run, outcome) for run, outcome in pairs]
    equal = sum(outcome.digest == _free(outcomes, run.seed).digest for run, outcome in pairs)
    return [
        f"{statistics.fmean(outcome.lost for _, outcome in pairs):.2%}",
        f"{statistics.fmean(outcome.loss for _, outcome in pairs):.4f}",
        f"{statistics.fmean(more):+.4f} ± {half_interval(more):.4f}", " ".join(f"{value:+.4f}" for value in more),
        f"{statistics.fmean(outcome.test_loss for _, outcome in pairs):.4f}", f"{equal} of {len(pairs)}",
    ]  # fmt: skip


HEADER = ("tokens lost", "validation loss", "over failure-free", "by seed", "test loss", "equal bits")


def _named(outcomes: Outcomes, names: Sequence[str]) -> list[list[str]]:
    return [
        [name, *_row(outcomes, [(run, outcome) for run, outcome in outcomes.items() if run.name == name])]
        for name in names
    ]


def report(outcomes: Outcomes, iterations: int) -> str:
    """Return the text of the page."""
    half_way = [f"K = {experts} every {interval}" for experts, interval in HALF_WAY]
    dropped = [
        [f"{share:.0%}", *_row(outcomes, [pair for pair in _dropped(outcomes) if pair[0].dropped == share])[1:-1]]
        for share in DROPPED
    ]
    return f"""# Accuracy under failures

    python -m benchmarks.accuracy --text .../wikitext-2/test.txt .../wikitext-2/valid.txt --folder runs/accuracy --iterations {iterations}

The laptop preset's model (4 layers, 8 experts each, top-2) on one rank, {iterations} iterations of 2,048 bytes of WikiText-2 (80% of
the lines to train on, 10% to validate, 10% to test), seeds {", ".join(map(str, SEEDS))}. A failure overwrites model and optimizer with NaN.
The rank restores both from its snapshots, as the strategy does after a kill. Each training is compared with the failure-free training
of the same seed. ± is half of a 95% confidence interval (Student) of this difference over seeds. Validation losses of different
seeds without failures have a standard deviation of {_noise(outcomes):.4f}. A smaller difference to the same seed can still mean
something, because the two trainings differ in nothing else.

![validation loss over time, over lost tokens, over dropped tokens](accuracy.png)

## Four failures (MoEvement, figure 12 and table 5)

Failures come after one, two, three and four fifths of the training. MoC-System saves every 10 iterations. *K from 1* doubles
K when 3.75% of the tokens are lost; the other rows keep their K. MoEtion saves in every iteration.

{table(("strategy", *HEADER), _named(outcomes, (FREE, *STRATEGIES)))}

## One failure half way (MoC-System, figure 7)

{table(("MoC-System", *HEADER), _named(outcomes, half_way))}

## Tokens dropped all the time (MoEtion, table 1)

Routers drop each routed token with this probability, in training only.

{table(("dropped", *HEADER[1:-1]), dropped)}

A model this small and a training this short can show two things: whether bits are equal where they should be, and whether
lost updates of experts cost more than the noise. They cannot show results on the papers' downstream tasks.

{measured_on("torch", "megatron-core")}, gloo.
"""


if __name__ == "__main__":
    main()
