"""A loss spike makes a job go back to an older window, once; it then ends as a job that never saw those batches."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from moevement_core.session.loss_watch import FEWEST_LOSSES
from moevement_core.storage.manifest import manifests
from tests.launching import finished, launch
from tests.training import ROOT, SCRIPT, flags, losses

SMALL = (ROOT / "examples" / "plain_torch" / "small.py").read_text(encoding="utf-8")
SPIKE = 40
PHASES = ("start", "forward", "backward", "reduce")


def script(folder: Path, *spikes: int, left_out: range = range(0), until: str = "args.iterations") -> list[str]:
    """Write the smallest example, with losses that are five times as large in ``spikes``, and return its words."""
    loss, binding = "loss = 5 * loss", f"binding.leave_out({left_out!r})"
    text = SMALL.replace("loss.backward()", f"if iteration in {spikes}:\n            {loss}\n        loss.backward()")
    text = text.replace("return ft.TorchBinding(", "binding = ft.TorchBinding(").replace(
        "until=args.iterations", f"until={until}"
    )
    text = text.replace("clip_norm=1.0)\n", f"clip_norm=1.0)\n    {binding}\n    return binding\n")
    path = folder / f"spikes_{left_out.start}.py"
    path.write_text(text, encoding="utf-8")
    return ["--trainer", "torch", str(path), "--moevement-window", "3"]


def run(run_dir: Path, *words: str, nproc: int = 2, spares: int = 1) -> RunRecord:
    job = launch("--nproc", str(nproc), "--spares", str(spares), *words, "--run-dir", str(run_dir))
    code, out, err = finished(job)
    assert code == 0, out + err
    return RunRecord(run_dir)


def watched(folder: Path, factor: float, *words: str) -> list[str]:
    return [
        "--moevement-rollback-on-spike", str(factor), "--moevement-persist-dir", str(folder / "windows"),
        "--moevement-keep-windows", "8", *words,
    ]  # fmt: skip


def restored_by(record: RunRecord) -> int:
    """Return the iteration that the job went back to after its spike."""
    events = [event for event in record.events() if event["event"] in ("loss_spiked", "restart")]
    spiked = next(n for n, event in enumerate(events) if event["event"] == "loss_spiked" and event["rolls_back"])
    return int(events[spiked + 1]["iteration"])


def spikes_of(record: RunRecord) -> list[dict[str, Any]]:
    return [event for event in record.events() if event["event"] == "loss_spiked"]


def are_equal(first: Path, second: Path) -> bool:
    return main(["verify", str(first), str(second)]) == 0


@pytest.mark.parametrize("back", [2, 8])
def test_a_spike_leads_back_to_an_older_window(back: int, tmp_path: Path) -> None:
    words = watched(tmp_path, 2.5, "--moevement-rollback-by", str(back))
    record = run(tmp_path / "run", *script(tmp_path, SPIKE), *words)
    (event,) = spikes_of(record)
    restores = restored_by(record)
    assert event["iteration"] == SPIKE
    assert SPIKE - back - 9 <= restores <= SPIKE - back
    assert [n for n, loss in losses(record).items() if loss is None] == list(range(restores + 1, SPIKE + 1))
    windows = manifests(tmp_path / "windows")
    assert windows
    assert all(window.reaches <= restores or window.reaches >= SPIKE for window in windows)
    run(tmp_path / "without", *script(tmp_path, SPIKE, left_out=range(restores + 1, SPIKE + 1)))
    assert are_equal(tmp_path / "without", tmp_path / "run")


def test_a_job_goes_back_once_and_recovers_afterwards(tmp_path: Path) -> None:
    """Kill a rank after the roll back, so that its replacement leaves out the same iterations, and spike again."""
    words = [*watched(tmp_path, 2.5), "--iterations", "90"]
    kill = ["--moevement-inject", "rank=1,iteration=42,phase=backward"]
    record = run(tmp_path / "run", *script(tmp_path, SPIKE, 75), *words, *kill, spares=2)
    first, second = spikes_of(record)
    assert (first["iteration"], second["iteration"], second["rolls_back"]) == (SPIKE, 75, False)
    left_out = range(restored_by(record) + 1, SPIKE + 1)
    run(tmp_path / "without", *script(tmp_path, SPIKE, 75, left_out=left_out), "--iterations", "90")
    assert are_equal(tmp_path / "without", tmp_path / "run")


def test_a_requeued_job_leaves_out_the_same_iterations(tmp_path: Path) -> None:
    """Let a job end soon after its roll back, so that the next one repeats a window of left-out iterations."""
    words = [*watched(tmp_path, 2.5), "--moevement-load", str(tmp_path / "windows")]
    record = run(tmp_path / "run", *script(tmp_path, SPIKE, until=str(SPIKE + 2)), *words)
    left_out = range(restored_by(record) + 1, SPIKE + 1)
    again = run(tmp_path / "again", *script(tmp_path, SPIKE), *words)
    assert spikes_of(again) == []
    whole = run(tmp_path / "whole", *script(tmp_path, SPIKE, left_out=left_out))
    assert compare(whole, again, common_iterations=True).equal


def highest(losses: dict[int, float]) -> tuple[int, float]:
    """Return the iteration that is highest above the median before it, and a factor which no earlier one reaches."""
    values = [losses[n] for n in sorted(losses)]
    ratios = {n + 1: values[n] / median(values[:n]) for n in range(FEWEST_LOSSES, len(values))}
    spiked = max(ratios, key=lambda n: ratios[n])
    return spiked, (ratios[spiked] + max([1.0, *(ratio for n, ratio in ratios.items() if n < spiked)])) / 2


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
def test_ranks_are_killed_at_the_same_time(seed: int, tmp_path: Path) -> None:
    """Kill ranks at random; a kill may come between the decision to go back and the restart."""
    words = [*watched(tmp_path, 2.5, "--moevement-rollback-by", str(2 + seed % 9)), "--iterations", "120"]
    drill = ["--moevement-inject-mtbf", "1.5", "--moevement-inject-seed", str(seed)]
    kill = ["--moevement-inject", f"rank={seed % 3},iteration={SPIKE + seed % 4},phase={PHASES[seed % len(PHASES)]}"]
    record = run(tmp_path / "run", *script(tmp_path, SPIKE), *words, *drill, *kill, nproc=3, spares=2)
    has_gone_back = any(event["rolls_back"] for event in spikes_of(record))
    left_out = range(restored_by(record) + 1, SPIKE + 1) if has_gone_back else range(0)
    run(tmp_path / "without", *script(tmp_path, SPIKE, left_out=left_out), "--iterations", "120", nproc=3)
    assert are_equal(tmp_path / "without", tmp_path / "run")


@pytest.mark.slow("three jobs of 44 iterations, one with two restarts")
def test_megatron_goes_back_and_saves_no_dense_checkpoint_of_what_it_left(tmp_path: Path) -> None:
    """Make the highest of the usual losses count as a spike, kill a rank afterwards, and compare dense saves too."""
    words = [
        str(SCRIPT), *flags(train_iters=44, lr=1e-6, pipeline_model_parallel_size=2, eval_interval=5, eval_iters=1),
        "--moevement-sparse-ckpt", "--moevement-window", "3", "--save-interval", "4",
    ]  # fmt: skip
    free = run(tmp_path / "free", *words, "--save", str(tmp_path / "saved"), spares=0)
    spiked, factor = highest(losses(free))
    kill = ["--moevement-inject", f"rank=0,iteration={spiked + 2},phase=forward"]
    watch = [*watched(tmp_path, factor), *kill, "--save", str(tmp_path / "dense")]
    record = run(tmp_path / "run", *words, *watch, spares=2)
    event = spikes_of(record)[0]
    assert event["iteration"] == spiked
    skipped = [str(n) for n in range(restored_by(record) + 1, spiked + 1)]
    run(tmp_path / "without", *words, "--iterations-to-skip", *skipped, spares=0)
    assert are_equal(tmp_path / "without", tmp_path / "run")
