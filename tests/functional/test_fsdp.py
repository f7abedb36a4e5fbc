"""Jobs of :class:`TorchBinding` whose model ``fully_shard`` (FSDP2) has sharded: each rank holds its own shards."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from moevement_core.storage.manifest import manifests
from tests.launching import finished, launch

SCRIPT = """
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import moevement_core as ft

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=40)
parser.add_argument("--run-dir", type=Path)
ft.add_session_flags(parser)
args = parser.parse_args()
WIDTH, WORDS = 17, 33  # divisible by no number of ranks, so that shards are unequal


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def make():
    torch.manual_seed(1)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

    def compute_gradients(iteration):
        draws = torch.Generator().manual_seed(iteration)
        text = torch.randint(WORDS, (8, 17), generator=draws).cumsum(1) % WORDS
        own = text[dist.get_rank() :: dist.get_world_size()]
        loss = nn.functional.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return ft.TorchBinding(model, optimizer, compute_gradients, clip_norm=0.5)


def loop(session):
    for iteration in ft.iterations(session, until=args.iterations):
        session.binding.run(iteration)
        session.step()


config = ft.SessionConfig.from_args(args, has_experts=False)
ft.train(make, config, loop, "gloo", run_dir=args.run_dir, flags=vars(args), sizes=(1, 2, 4))
"""

ELASTIC = ("--moevement-elastic", "--moevement-join-wait", "0.5")
WINDOW = ("--moevement-window", "3")
EVERY = ("--moevement-strategy", "dense", "--moevement-dense-interval", "1")


@pytest.fixture(autouse=True)
def one_thread_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all jobs one thread a rank. By default the launcher divides the cores among the ranks that it starts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def start(
    run_dir: Path, *words: str, nproc: int = 2, spares: int = 0, options: Sequence[str] = (), script: str = SCRIPT
) -> Any:
    path = run_dir.parent / "fsdp.py"
    path.write_text(script)
    options = ["--trainer", "torch", "--nproc", str(nproc), "--spares", str(spares), *options]
    return launch(*options, str(path), "--run-dir", str(run_dir), *words)


def train(run_dir: Path, *words: str, **launched: Any) -> RunRecord:
    code, out, err = finished(start(run_dir, *words, **launched))
    assert code == 0, out + err
    return RunRecord(run_dir)


def losses(record: RunRecord, since: int) -> dict[int, float]:
    return {line["iteration"]: line["loss"] for line in record.metrics() if line["iteration"] > since}


def active(record: RunRecord) -> dict[int, int]:
    """Return the pid of each rank."""
    processes = json.loads(record.ranks_path.read_text()) if record.ranks_path.exists() else []
    return {entry["rank"]: entry["pid"] for entry in processes if entry["role"] == "active"}


def recoveries(record: RunRecord) -> list[dict[str, Any]]:
    return [event["recovery"] for event in record.events() if event["event"] == "failure"]


def are_equal(folder: Path) -> bool:
    return main(["verify", str(folder / "free"), str(folder / "killed")]) == 0


@pytest.mark.parametrize("recovery", ["replay", "redo"])
@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_lost_shard_comes_back(nproc: int, recovery: str, tmp_path: Path) -> None:
    """Kill a rank in an update, and another one in a snapshot, when the first replacement has taken over."""
    train(tmp_path / "free", *WINDOW, nproc=nproc)
    faults = [f"rank={nproc - 1},iteration=12,phase=step", "rank=0,iteration=27,phase=snapshot"]
    words = [word for fault in faults for word in ("--moevement-inject", fault)]
    record = train(tmp_path / "killed", *WINDOW, "--moevement-recovery", recovery, *words, nproc=nproc, spares=2)
    for lost in recoveries(record):
        assert (lost["redone"] if recovery == "redo" else lost["replayed"]) > 0
    assert are_equal(tmp_path)


def test_a_replacement_reduces_gradients_in_the_dtype_of_the_others(tmp_path: Path) -> None:
    """Compute in BF16 and reduce in FP32. A replacement's first pass is a replay of mostly frozen operators."""
    policy = "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
    script = SCRIPT.replace("import fully_shard", "import MixedPrecisionPolicy, fully_shard")
    script = script.replace("fully_shard(layer)", f"fully_shard(layer, {policy})")
    script = script.replace("fully_shard(model)", f"fully_shard(model, {policy})")
    for name, words in (("free", ()), ("killed", ("--moevement-inject", "rank=1,iteration=12,phase=step"))):
        record = train(tmp_path / name, *WINDOW, *words, spares=1, script=script)
    (lost,) = recoveries(record)
    assert lost["replayed"] > 0
    assert are_equal(tmp_path)


@pytest.mark.slow("ranks are killed until the job has lost four")
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
def test_ranks_are_killed_at_any_moment_of_a_pass(seed: int, tmp_path: Path) -> None:
    """Kill ranks from outside, so that survivors stop in the middle of FSDP's own collectives."""
    assert sum(each["replayed"] > 0 for each in kill_at_any_moment(seed, tmp_path)) > 1


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 6))
def test_ranks_with_copies_of_shards_are_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    lost = kill_at_any_moment(seed, tmp_path, nproc=4, script=hybrid())
    assert [each["replayed"] for each in lost] == [0] * len(lost)


def kill_at_any_moment(seed: int, tmp_path: Path, **launched: Any) -> list[dict[str, Any]]:
    """Kill four ranks of a job from outside, compare its bits with a job without failures, return the recoveries."""
    draws, nproc = random.Random(seed), launched.get("nproc", 2)
    train(tmp_path / "free", *WINDOW, "--iterations", "300", **launched)
    job = start(tmp_path / "killed", *WINDOW, "--iterations", "300", spares=2, **launched)
    record, lost = RunRecord(tmp_path / "killed"), 0
    while lost < 4 and job.poll() is None:
        newest = (record.newest_metric() or {}).get("iteration", 0)
        if len(ranks := active(record)) == nproc and newest > 10 + 60 * lost:
            time.sleep(draws.uniform(0, 0.1))
            os.kill(ranks[draws.randrange(nproc)], signal.SIGKILL)
            lost += 1
        time.sleep(0.05)
    code, out, err = finished(job)
    assert code == 0, out + err
    assert are_equal(tmp_path)
    return recoveries(record)


def test_a_mesh_that_the_job_makes_anew_keeps_its_groups(tmp_path: Path) -> None:
    """Shard over one dimension of a mesh whose groups every rank makes in every generation; a replacement has them."""
    script = SCRIPT.replace("fully_shard(layer)", 'fully_shard(layer, mesh=mesh["rows"])').replace(
        "fully_shard(model)", 'fully_shard(model, mesh=mesh["rows"])'
    )
    script = script.replace("sizes=(1, 2, 4))", "make_groups=make_groups)").replace(
        "def make():",
        "def make_groups():\n"
        "    global mesh\n"
        "    shape = 1, dist.get_world_size()\n"
        "    mesh = torch.distributed.init_device_mesh('cpu', shape, mesh_dim_names=('one', 'rows'))\n"
        "\n\ndef make():",
    )
    for name, words in (("free", ()), ("killed", ("--moevement-inject", "rank=1,iteration=12,phase=reduce"))):
        train(tmp_path / name, *WINDOW, *words, spares=1, script=script)
    assert are_equal(tmp_path)


def hybrid() -> str:
    """Return the script with two copies of each shard: ranks 0 and 2 hold the same shards, and so do 1 and 3."""
    script = SCRIPT.replace("fully_shard(layer)", "fully_shard(layer, mesh=mesh)")
    script = script.replace("fully_shard(model)", "fully_shard(model, mesh=mesh)")
    return script.replace("sizes=(1, 2, 4))", "make_groups=make_groups)").replace(
        "def make():",
        "def make_groups():\n"
        "    global mesh\n"
        "    shape = 2, dist.get_world_size() // 2\n"
        "    mesh = torch.distributed.init_device_mesh('cpu', shape, mesh_dim_names=('copies', 'shards'))\n"
        "\n\ndef make():",
    )


@pytest.mark.slow("two jobs of four ranks")
@pytest.mark.parametrize("phase", ["reduce", pytest.param("step", marks=pytest.mark.full)])
def test_a_shard_with_copies_is_taken_from_a_live_rank(phase: str, tmp_path: Path) -> None:
    """Lose a rank whose shards another one holds, and then both holders of a shard at once."""
    train(tmp_path / "free", *WINDOW, nproc=4, script=hybrid())
    faults = [f"rank=1,iteration=11,phase={phase}", *(f"rank={rank},iteration=25,phase={phase}" for rank in (0, 2))]
    words = [word for fault in faults for word in ("--moevement-inject", fault)]
    record = train(tmp_path / "killed", *WINDOW, *words, nproc=4, spares=3, script=hybrid())
    alone, *both = recoveries(record)
    assert alone["replayed"] == 0
    assert any(each["replayed"] > 0 for each in both)
    assert are_equal(tmp_path)


def test_copies_of_a_shard_that_differ_are_refused(tmp_path: Path) -> None:
    script = hybrid().replace("torch.manual_seed(1)", "torch.manual_seed(dist.get_rank() // 3)")
    code, _, err = finished(start(tmp_path / "run", nproc=4, script=script))
    assert code == 2
    assert "manual_seed" in err


def test_an_elastic_job_divides_the_rows_anew(tmp_path: Path) -> None:
    """Lose one of two ranks: the other one goes on with all rows, as a fresh job of one rank from a window on disk."""
    dense = (*ELASTIC, *EVERY, "--iterations", "16")
    fault = ("--moevement-inject", "rank=1,iteration=7,phase=reduce")
    survived = train(tmp_path / "elastic", *dense, *fault, options=("--respawn-after", "600"))
    (event,) = [event for event in survived.events() if event["event"] == "resized"]
    assert (event["world_before"], event["world_size"]) == (2, 1)
    assert event["digests_equal"]
    at = event["iteration"]
    assert [line["iteration"] for line in survived.metrics()] == list(range(1, 17))
    windows = str(tmp_path / "windows")
    train(tmp_path / "first", *dense, "--moevement-persist-dir", windows, "--iterations", str(at + 1))
    assert manifests(Path(windows))[0].reaches == at
    fresh = train(tmp_path / "fresh", *dense, "--moevement-load", windows, "--moevement-replicas", "0", nproc=1)
    assert losses(survived, at) == losses(fresh, at)


@pytest.mark.slow("a process joins while the job runs")
def test_an_elastic_job_grows_again(tmp_path: Path) -> None:
    words = (*ELASTIC, *EVERY, "--moevement-inject", "rank=0,iteration=5,phase=forward", "--iterations", "1200")
    survived = train(tmp_path / "run", *words, options=("--respawn-after", "0.5"))
    events = [event for event in survived.events() if event["event"] == "resized"]
    assert [event["world_size"] for event in events] == [1, 2]
    assert events[1]["digests_equal"]
    assert [line["iteration"] for line in survived.metrics()] == list(range(1, 1201))
