"""Silent corruption: a flipped bit is found, its rank is named and replaced, and the job ends with the right bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moevement_cli.main import main
from moevement_core.audit.config import AuditConfig
from moevement_core.run.run_record import RunRecord
from tests.launching import finished, launch
from tests.training import ROOT, SCRIPT, flags

SMALL = ROOT / "examples" / "plain_torch" / "small.py"
EXPERTS = ROOT / "examples" / "plain_torch" / "train.py"


def run(run_dir: Path, *words: str, nproc: int = 2, spares: int = 1) -> RunRecord:
    job = launch("--nproc", str(nproc), "--spares", str(spares), *words, "--run-dir", str(run_dir))
    code, out, err = finished(job)
    assert code == 0, out + err
    return RunRecord(run_dir)


def torch_words(*words: str, script: Path = SMALL) -> list[str]:
    return ["--trainer", "torch", str(script), "--iterations", "60", "--moevement-window", "3", *words]


def planted(*corruptions: str) -> list[str]:
    return ["--moevement-inject-corruption", *corruptions]


def corruptions(record: RunRecord) -> list[dict[str, Any]]:
    return [event for event in record.events() if event["event"] == "corrupted"]


def are_equal(*folders: Path) -> bool:
    return all(main(["verify", str(folders[0]), str(other)]) == 0 for other in folders[1:])


def test_a_flip_of_each_part_is_found_and_its_rank_named(tmp_path: Path) -> None:
    parts = ["weight", "moment", "gradient", "activation"]
    flips = [f"part={part},rank={n % 2},iteration={10 + 10 * n},seed={n + 1}" for n, part in enumerate(parts)]
    record = run(tmp_path / "run", *torch_words("--moevement-audit-interval", "5", *planted(*flips)), spares=2)
    assert [(event["iteration"], event["ranks"]) for event in corruptions(record)] == [
        (10, [0]), (20, [1]), (30, [0]), (40, [1]),
    ]  # fmt: skip
    assert all(event["operators"] for event in corruptions(record))
    run(tmp_path / "free", *torch_words(), spares=0)
    run(tmp_path / "audited", *torch_words("--moevement-audit-interval", "1"), spares=0)
    assert are_equal(tmp_path / "free", tmp_path / "run", tmp_path / "audited")


def test_replicas_find_a_wrong_moment_of_any_iteration(tmp_path: Path) -> None:
    """Flip a moment in an iteration that no stage audits. One of three replicas then has other weights."""
    flip = planted("part=moment,rank=1,iteration=31,seed=2")
    record = run(tmp_path / "run", *torch_words("--moevement-audit-interval", "1000", *flip), nproc=3)
    (event,) = corruptions(record)
    assert event["ranks"] == [1]
    assert 31 <= event["iteration"] <= 34
    assert event["trusted"] < 31
    run(tmp_path / "free", *torch_words(), nproc=3, spares=0)
    assert are_equal(tmp_path / "free", tmp_path / "run")


def test_memory_that_changes_between_two_updates_is_found_in_any_iteration(tmp_path: Path) -> None:
    flips = planted("part=moment,rank=1,iteration=23,seed=4", "part=weight,rank=0,iteration=37,seed=5")
    record = run(tmp_path / "run", *torch_words("--moevement-audit-memory", *flips), spares=2)
    assert [(event["iteration"], event["ranks"]) for event in corruptions(record)] == [(23, [1]), (37, [0])]
    assert all(event["operators"] for event in corruptions(record))
    run(tmp_path / "free", *torch_words(), spares=0)
    assert are_equal(tmp_path / "free", tmp_path / "run")


@pytest.mark.parametrize("recovery", ["replay", "redo"])
def test_a_device_that_stays_wrong_is_found_and_the_job_goes_back_to_an_audited_window(
    recovery: str, tmp_path: Path
) -> None:
    words = ("--moevement-recovery", recovery)
    record = run(
        tmp_path / "run",
        *torch_words(
            *words, "--moevement-audit-interval", "4", "--moevement-persist-dir", str(tmp_path / "windows"),
            "--moevement-keep-windows", "6", *planted("part=gradient,rank=1,iteration=30,times=always"), script=EXPERTS,
        ),
    )  # fmt: skip
    (event,) = corruptions(record)
    assert (event["ranks"], event["iteration"], event["clean_at"]) == ([1], 32, 28)
    (failure,) = [event for event in record.events() if event["event"] == "failure"]
    assert failure["recovery"]["first"] <= 28
    assert [line["iteration"] for line in record.metrics()] == list(range(1, 61))
    run(tmp_path / "free", *torch_words(*words, script=EXPERTS), spares=0)
    assert are_equal(tmp_path / "free", tmp_path / "run")


DIES = """
import collections, os, pathlib, signal, sys
sys.path.insert(0, {example!r})
import torch.distributed as dist
import train
original, calls = train.ft.TorchBinding.run, collections.Counter()

def run(self, iteration, *frozen):
    calls[iteration] += 1
    original(self, iteration, *frozen)
    marker = pathlib.Path({marker!r})
    if (iteration, calls[iteration], dist.get_rank()) == (20, 2, {rank}) and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

train.ft.TorchBinding.run = run
train.main()
"""
"""Script whose rank dies in the second execution of iteration 20, once."""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_while_iterations_are_executed_again(rank: int, tmp_path: Path) -> None:
    """Kill a rank when the others have loaded the state before the audited iteration. It must not count as newer."""
    script = tmp_path / "dies.py"
    script.write_text(DIES.format(example=str(EXPERTS.parent), marker=str(tmp_path / "died"), rank=rank))
    record = run(tmp_path / "run", *torch_words("--moevement-audit-interval", "5", script=script))
    assert corruptions(record) == []
    assert len([event for event in record.events() if event["event"] == "failure"]) == 1
    run(tmp_path / "free", *torch_words(script=EXPERTS), spares=0)
    assert are_equal(tmp_path / "free", tmp_path / "run")


def megatron_words(iterations: int, **layout: Any) -> list[str]:
    return [
        str(SCRIPT), *flags(train_iters=iterations, **layout), "--moevement-sparse-ckpt",
        "--moevement-window", "3",
    ]  # fmt: skip


@pytest.mark.slow("the job goes back twice, and evaluates every four iterations")
def test_a_stage_of_megatron_is_audited_alone(tmp_path: Path) -> None:
    words = megatron_words(
        26, pipeline_model_parallel_size=2, expert_model_parallel_size=2, use_distributed_optimizer=True,
        eval_interval=4, eval_iters=1,
    )  # fmt: skip
    flips = planted("part=gradient,rank=1,iteration=12,seed=1", "part=activation,rank=2,iteration=16,seed=2")
    record = run(tmp_path / "run", *words, "--moevement-audit-interval", "4", *flips, nproc=4)
    assert [(event["iteration"], event["ranks"]) for event in corruptions(record)] == [(12, [1]), (16, [2])]
    run(tmp_path / "free", *words, nproc=4, spares=0)
    assert are_equal(tmp_path / "free", tmp_path / "run")


LAYOUTS = {
    "tensor parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "virtual stages": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
    "tied embeddings": {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": False},
    "replicated state": {"expert_model_parallel_size": 2},
    "overlapped reductions": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "per-token loss": {"pipeline_model_parallel_size": 2, "calculate_per_token_loss": True},
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout: dict[str, Any], tmp_path: Path) -> None:
    """Audit each iteration; without a flip nothing is found, and a flip is found on its rank or beside it."""
    words = megatron_words(20, **layout)
    run(tmp_path / "free", *words, nproc=4, spares=0)
    record = run(tmp_path / "audited", *words, "--moevement-audit-interval", "1", nproc=4)
    assert corruptions(record) == []
    flip = planted("part=activation,rank=1,iteration=9,seed=3,times=always")
    record = run(tmp_path / "run", *words, "--moevement-audit-interval", "1", *flip, nproc=4)
    assert 1 in corruptions(record)[0]["ranks"]
    assert are_equal(tmp_path / "free", tmp_path / "audited", tmp_path / "run")


def audited_by(rank: int, first: int) -> int:
    """Return the first iteration from ``first`` on that the stage of ``rank`` audits, if stages take turns by twos."""
    return next(
        iteration
        for iteration in range(first, first + 4)
        if AuditConfig(2, memory=False).stage_of(iteration, 2) == rank // 2
    )


def seeds(count: int) -> Sequence[int]:
    return range(1, count + 1)


@pytest.mark.full
@pytest.mark.parametrize("seed", seeds(20))
def test_kills_at_the_same_time(seed: int, tmp_path: Path) -> None:
    """Let two ranks stay wrong from an iteration on that their stage audits, and kill ranks at random.

    A kill may hit the wrong process before it is found. The wrong iteration then does not count.
    """
    words = megatron_words(
        60, pipeline_model_parallel_size=2, expert_model_parallel_size=2, use_distributed_optimizer=True
    )
    flips = planted(
        f"part=gradient,rank={seed % 4},iteration={audited_by(seed % 4, 7 + seed % 5)},times=always,seed={seed}",
        f"part=activation,rank={(seed + 1) % 4},iteration={audited_by((seed + 1) % 4, 30)},times=always,seed={seed}",
    )
    record = run(
        tmp_path / "run", *words, "--moevement-audit-interval", "2", *flips, "--moevement-inject-mtbf", "6",
        "--moevement-inject-seed", str(seed), "--moevement-persist-dir", str(tmp_path / "windows"),
        "--moevement-keep-windows", "5", nproc=4, spares=2,
    )  # fmt: skip
    assert {rank for event in corruptions(record) for rank in event["ranks"]} <= {seed % 4, (seed + 1) % 4}
    run(tmp_path / "free", *words, nproc=4, spares=0)
    assert are_equal(tmp_path / "free", tmp_path / "run")
