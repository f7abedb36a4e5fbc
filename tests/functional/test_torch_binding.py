"""Jobs of :class:`TorchBinding`: a replicated model loses nothing with a rank, and experts are replayed or redone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from tests.launching import finished, launch
from tests.training import ROOT

SMALL = ROOT / "examples" / "plain_torch" / "small.py"
OWN = ROOT / "examples" / "plain_torch" / "own_binding.py"
WITH_EXPERTS = """
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import moevement_core as ft

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=40)
parser.add_argument("--run-dir", type=Path)
ft.add_session_flags(parser)
args = parser.parse_args()


def make():
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    shared = [nn.Linear(16, 16) for _ in range(3)]
    experts = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(world)]
    model = nn.ModuleDict({"shared": nn.ModuleList(shared), "expert": experts[rank]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)

    def compute_gradients(iteration):
        draws = torch.Generator().manual_seed(iteration)
        x = torch.randn(8, 16, generator=draws)[rank::world].requires_grad_()
        for layer in shared:
            x = torch.tanh(layer(nn.functional.dropout(x, 0.1)))
        loss = (model["expert"](x) - 1).square().mean()
        loss.backward()
        return {"loss": loss, "part": loss / 2}

    operators = [(ft.layer_name(n), ft.OperatorKind.LAYER, list(layer.parameters())) for n, layer in enumerate(shared)]
    operators.append((ft.expert_name(3, rank), ft.OperatorKind.EXPERT, list(model["expert"].parameters())))
    return ft.TorchBinding(
        model, optimizer, compute_gradients, operators=operators, local=model["expert"].parameters(), clip_norm=0.5,
        scheduler=scheduler,
    )


def loop(session):
    for iteration in ft.iterations(session, until=args.iterations):
        session.binding.run(iteration)
        session.step()


ft.train(make, ft.SessionConfig.from_args(args, has_experts=True), loop, "gloo", run_dir=args.run_dir, flags=vars(args))
"""

WITH_AVERAGE = """
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import moevement_core as ft

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=30)
parser.add_argument("--run-dir", type=Path)
ft.add_session_flags(parser)
args = parser.parse_args()
WIDTH, WORDS = 32, 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.ModuleList(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(16), persistent=PERSISTENT)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask=self.mask)
        return self.head(x)


def make():
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))

    def compute_gradients(iteration):
        draws = torch.Generator().manual_seed(iteration)
        text = torch.randint(WORDS, (4, 17), generator=draws).cumsum(1) % WORDS
        own = text[dist.get_rank() :: dist.get_world_size()]
        loss = nn.functional.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        return loss

    binding = ft.TorchBinding(model, optimizer, compute_gradients, scheduler=schedule, extra=[average])
    binding.average, binding.schedule = average, schedule
    return binding


def loop(session):
    for iteration in ft.iterations(session, until=args.iterations):
        session.binding.run(iteration)
        session.step()
        BESIDE
    average = session.binding.average
    assert int(average.n_averaged) == args.iterations, int(average.n_averaged)
    torch.save(average.state_dict(), args.run_dir / f"average_{dist.get_rank()}.pt")


config = ft.SessionConfig.from_args(args, has_experts=False)
ft.train(make, config, loop, "gloo", run_dir=args.run_dir, flags=vars(args))
"""
"""Job of transformer layers with a moving average of the weights. A batch of two sequences is small enough that torch
multiplies by another way if a weight requires no gradient."""

WITH_LOADER = """
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import moevement_core as ft

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=40)
parser.add_argument("--run-dir", type=Path)
ft.add_session_flags(parser)
args = parser.parse_args()


class Shard:
    # This rank's shard of 96 samples, shuffled anew in each epoch, read ahead by two batches.
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.epoch, self.at = 0, 0

    def __iter__(self):
        draws = torch.Generator().manual_seed(1000 * self.epoch + self.rank)
        order = torch.randperm(96 // self.world - self.rank, generator=draws) * self.world + self.rank
        batches = [batch for batch in order.split(4) if len(batch) == 4]
        ahead = batches[self.at : self.at + 2]
        while ahead:
            self.at += 1
            yield ahead.pop(0)
            if self.at + 1 < len(batches):
                ahead.append(batches[self.at + 1])
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self):
        return {"rank": self.rank, "epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        assert state["rank"] == self.rank, "the state of another rank"
        self.epoch, self.at = state["epoch"], state["at"]


def make():
    torch.manual_seed(1)
    layers = [nn.Linear(16, 16) for _ in range(3)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = torch.randn(96, 16, generator=torch.Generator().manual_seed(7))

    def compute_gradients(iteration, batch):
        x = samples[batch].requires_grad_()
        for layer in layers:
            x = torch.tanh(layer(nn.functional.dropout(x, 0.1)))
        loss = (x - samples[batch]).square().mean()
        loss.backward()
        return {"loss": loss, "sum of the batch": batch.sum().float()}

    return ft.TorchBinding(model, optimizer, compute_gradients, loader=Shard())


def loop(session):
    for iteration in ft.iterations(session, until=args.iterations):
        session.binding.run(iteration)
        session.step()


config = ft.SessionConfig.from_args(args, has_experts=False)
ft.train(make, config, loop, "gloo", run_dir=args.run_dir, flags=vars(args))
"""


def train(run_dir: Path, script: Path, *words: str, spares: int) -> RunRecord:
    job = launch(
        "--trainer", "torch", "--nproc", "2", "--spares", str(spares), str(script), "--run-dir", str(run_dir), *words
    )
    code, out, err = finished(job)
    assert code == 0, out + err
    return RunRecord(run_dir)


def recoveries(record: RunRecord) -> list[dict[str, Any]]:
    return [event["recovery"] for event in record.events() if event["event"] == "failure"]


def test_a_replicated_model_repeats_nothing_when_a_rank_is_lost(tmp_path: Path) -> None:
    train(tmp_path / "free", SMALL, spares=0)
    faults = [f"rank={rank},iteration={at},phase={phase}" for rank, at, phase in
              ((1, 12, "step"), (0, 30, "reduce"), (1, 45, "snapshot"))]  # fmt: skip
    words = [word for fault in faults for word in ("--moevement-inject", fault)]
    record = train(tmp_path / "killed", SMALL, *words, "--moevement-window", "3", spares=2)
    lost = recoveries(record)
    assert [(each["replayed"], each["redone"], each["sources"]["replica"]) for each in lost] == [(0, 0, 1)] * 3
    assert main(["verify", str(tmp_path / "free"), str(tmp_path / "killed")]) == 0


@pytest.mark.parametrize("recovery", ["replay", "redo"])
def test_experts_that_one_rank_holds_come_back(recovery: str, tmp_path: Path) -> None:
    script = tmp_path / "experts.py"
    script.write_text(WITH_EXPERTS)
    train(tmp_path / "free", script, spares=0)
    record = train(
        tmp_path / "killed", script, "--moevement-inject", "rank=1,iteration=21,phase=reduce",
        "--moevement-window", "3", "--moevement-recovery", recovery, spares=1,
    )  # fmt: skip
    (lost,) = recoveries(record)
    assert (lost["redone"] if recovery == "redo" else lost["replayed"]) > 0
    assert main(["verify", str(tmp_path / "free"), str(tmp_path / "killed")]) == 0
    lines = list(record.metrics())
    assert [line["learning_rate"] for line in lines] == [0.05 * 0.5 ** (number // 10) for number in range(40)]
    assert all(line["grad_norm"] > 0 and line["loss"] == 2 * line["part"] for line in lines)


@pytest.mark.parametrize("phase", ["step", "reduce", pytest.param("replicate", marks=pytest.mark.full)])
def test_a_trainer_of_eight_methods_comes_back(phase: str, tmp_path: Path) -> None:
    train(tmp_path / "free", OWN, spares=0)
    record = train(
        tmp_path / "killed", OWN, "--moevement-inject", f"rank=1,iteration=20,phase={phase}", "--moevement-window", "3",
        spares=1,
    )  # fmt: skip
    (lost,) = recoveries(record)
    assert lost["replayed"] > 0
    assert main(["verify", str(tmp_path / "free"), str(tmp_path / "killed")]) == 0


@pytest.mark.parametrize("recovery", ["redo", pytest.param("replay", marks=pytest.mark.full)])
def test_parameters_are_divided_between_two_optimizers(recovery: str, tmp_path: Path) -> None:
    """Train matrices with Muon and the rest with AdamW, each with a schedule, and lose the rank of an expert."""
    script = tmp_path / "muon.py"
    script.write_text(
        WITH_EXPERTS.replace(
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)\n"
            "    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)\n",
            "    matrices = [each for each in model.parameters() if each.ndim == 2]\n"
            "    rest = [each for each in model.parameters() if each.ndim != 2]\n"
            "    optimizer = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]\n"
            "    scheduler = [torch.optim.lr_scheduler.StepLR(each, 10, 0.5) for each in optimizer]\n",
        )
    )
    assert "Muon" in script.read_text()
    train(tmp_path / "free", script, spares=0)
    words = ("--moevement-window", "3", "--moevement-recovery", recovery, "--moevement-inject")
    record = train(tmp_path / "killed", script, *words, "rank=1,iteration=17,phase=step", spares=1)
    (lost,) = [event["recovery"] for event in record.events() if event["event"] == "failure"]
    assert lost["redone" if recovery == "redo" else "replayed"] > 0
    assert main(["verify", str(tmp_path / "free"), str(tmp_path / "killed")]) == 0


@pytest.mark.parametrize(("recovery", "is_persistent"), [("replay", True), ("replay", False), ("redo", True)])
def test_a_moving_average_of_the_weights_comes_back(recovery: str, is_persistent: bool, tmp_path: Path) -> None:
    """Lose a rank of a job whose buffers are saved, so that it replays or redoes updates, and one without buffers."""
    script = tmp_path / "average.py"
    script.write_text(WITH_AVERAGE.replace("PERSISTENT", str(is_persistent)).replace("        BESIDE\n", ""))
    train(tmp_path / "free", script, spares=0)
    words = ("--moevement-window", "3", "--moevement-recovery", recovery, "--moevement-inject")
    record = train(tmp_path / "killed", script, *words, "rank=0,iteration=14,phase=step", spares=1)
    (lost,) = [event["recovery"] for event in record.events() if event["event"] == "failure"]
    assert (lost["redone" if recovery == "redo" else "replayed"] > 0) == is_persistent
    assert main(["verify", str(tmp_path / "free"), str(tmp_path / "killed")]) == 0
    averages = [torch.load(tmp_path / job / f"average_{rank}.pt") for job in ("free", "killed") for rank in range(2)]
    for average in averages[1:]:
        assert all(torch.equal(average[name], value) for name, value in averages[0].items())


def test_a_schedule_that_a_replacement_does_not_know_is_named(tmp_path: Path) -> None:
    """Step a schedule beside the binding: a replacement begins it anew, so its first update is another one."""
    script = tmp_path / "forgotten.py"
    script.write_text(
        WITH_AVERAGE.replace("PERSISTENT", "False").replace("scheduler=schedule, ", "")
        .replace("BESIDE", "session.binding.schedule.step()")
    )  # fmt: skip
    words = ("--trainer", "torch", "--nproc", "2", "--spares", "1", str(script), "--run-dir", str(tmp_path / "run"))
    code, out, err = finished(launch(*words, "--moevement-inject", "rank=0,iteration=14,phase=step"))
    assert code == 1
    assert re.search(r"\bdifferent weights\b.*\biteration 1\d\b.*\bscheduler\b", out + err)


def test_ranks_that_have_built_different_weights_are_told_so(tmp_path: Path) -> None:
    """Let ranks build different weights; the job ends before the first update, and the error says what to do."""
    script = tmp_path / "other.py"
    script.write_text(SMALL.read_text().replace("torch.manual_seed(1)", "torch.manual_seed(dist.get_rank())"))
    words = ("--trainer", "torch", "--nproc", "2", "--spares", "0", str(script), "--iterations", "3")
    code, out, err = finished(launch(*words, "--run-dir", str(tmp_path / "run")))
    assert code == 2
    assert re.search(r"\bdifferent weights\b.*\btorch\.manual_seed\b", out + err)


@pytest.mark.slow("three jobs in a row")
@pytest.mark.parametrize("recovery", ["replay", "redo"])
def test_a_loader_draws_the_same_batches_again(recovery: str, tmp_path: Path) -> None:
    """Kill ranks in several phases, then go on from windows in a new job: batches, losses and loaders are the same."""
    script, windows = tmp_path / "with_loader.py", str(tmp_path / "windows")
    script.write_text(WITH_LOADER)
    train(tmp_path / "free", script, spares=0)
    phases = ((1, 9, "forward"), (0, 15, "reduce"), (1, 21, "commit"), (0, 27, "step"), (1, 33, "snapshot"))
    faults = [f"rank={rank},iteration={at},phase={phase}" for rank, at, phase in phases]
    words = ["--moevement-window", "3", "--moevement-recovery", recovery, "--moevement-persist-dir", windows]
    killed = [*words, *(word for fault in faults for word in ("--moevement-inject", fault))]
    record = train(tmp_path / "killed", script, *killed, spares=2)
    assert all(each["replayed"] + each["redone"] > 0 for each in recoveries(record))
    assert main(["verify", str(tmp_path / "free"), str(tmp_path / "killed")]) == 0
    train(tmp_path / "resumed", script, *words, "--moevement-load", windows, "--iterations", "44", spares=0)
    train(tmp_path / "longer", script, "--iterations", "44", spares=0)
    assert main(["verify", str(tmp_path / "longer"), str(tmp_path / "resumed"), "--common"]) == 0
