"""Loop with this project."""

import argparse

import torch
import torch.distributed as dist

import moevement_core as ft
from benchmarks.peers import job

parser = argparse.ArgumentParser()
ft.add_session_flags(parser)
args = parser.parse_args()


def make() -> ft.TorchBinding:
    model, optimizer = job.make()

    def compute_gradients(iteration: int) -> torch.Tensor:
        loss = model(job.batch(iteration, dist.get_rank()))
        loss.backward()
        return loss

    return ft.TorchBinding(model, optimizer, compute_gradients)


def loop(session: ft.Session) -> None:
    rank = dist.get_rank()
    for iteration in ft.iterations(session, until=job.iterations()):
        session.binding.run(iteration)
        session.step()
        job.committed(iteration, rank)
    job.finished(session.binding.model, rank)


config = ft.SessionConfig.from_args(args, has_experts=False)
ft.train(make, config, loop, "gloo", run_dir=job.folder() / "run", flags=vars(args))
