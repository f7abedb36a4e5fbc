"""Reproduction of a fault of torch: coalesced collectives over gloo corrupt the heap of two processes.

``python scripts/coalesced_gloo.py`` crashes within two minutes if torch has the fault, as torch 2.13.0 does: malloc
aborts the process, or a segmentation fault ends it. The script does not crash with ``--one-by-one``, which issues the
collectives as ``megatron/moevement/platform/megatron_cpu.py`` does. The script uses neither Megatron nor this project.
It sends and receives in pairs, reduces gradients from hooks of the backward pass, and gathers parameters in place.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _coalescing_manager

PARAMETERS, WIDTH = 8, 64


def _collective(function: Any, *tensors: torch.Tensor, group: dist.ProcessGroup, one_by_one: bool) -> Any:
    if one_by_one:
        return function(*tensors, group=group, async_op=True)
    with _coalescing_manager(group, async_ops=True) as manager:
        function(*tensors, group=group)
    return manager


def _of_member(group: Any) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    return group


def _run(rank: int, port: int, seconds: float, one_by_one: bool) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    pair, other = _of_member(dist.new_group([0, 1])), 1 - rank
    alone = _of_member([dist.new_group([member]) for member in range(2)][rank])
    sending, receiving = (pair, dist.group.WORLD) if rank == 0 else (dist.group.WORLD, pair)
    parameters = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)) for _ in range(PARAMETERS)]
    gradients = [torch.zeros(WIDTH * WIDTH) for _ in parameters]
    under_way: list[Any] = []

    def reduce(number: int) -> None:
        parameter, gradient = parameters[number], gradients[number]
        assert parameter.grad is not None
        gradient.add_(parameter.grad.view(-1))
        parameter.grad = None
        under_way.append(
            _collective(
                dist.reduce_scatter_tensor, gradient.view(1, -1)[0], gradient, group=alone, one_by_one=one_by_one
            )
        )

    for number, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: reduce(number))

    def exchange(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        received = torch.empty_like(tensor)
        first = dist.isend(tensor, other, group=sending) if rank == 0 else None
        receives = dist.irecv(received, other, group=receiving)
        sends = first or dist.isend(tensor, other, group=sending)
        assert receives is not None
        receives.wait()
        return received.requires_grad_(), sends

    began, rounds = time.monotonic(), 0
    is_over = torch.zeros(1)
    while not is_over.item():
        for _ in range(2):
            activation, last = torch.randn(32, 2, WIDTH, dtype=torch.bfloat16), None
            for _ in range(4):
                received, sends = exchange(activation.detach())
                activation = received
                for parameter in parameters:
                    activation = torch.tanh(activation @ parameter)
                if last is not None:
                    last.wait()
                last = sends
            activation.float().sum().backward()
        for work in under_way:
            work.wait()
        flat = [parameter.data.view(-1) for parameter in parameters]
        under_way[:] = [
            _collective(
                dist.all_gather_into_tensor, parameter, parameter.view(1, -1)[0], group=alone, one_by_one=one_by_one
            )
            for parameter in flat
        ]
        for work in under_way:
            work.wait()
        under_way.clear()
        for gradient in gradients:
            gradient.zero_()
        rounds += 1
        is_over = torch.tensor([float(time.monotonic() - began > seconds)])
        dist.all_reduce(is_over)
    print(f"rank {rank}: {rounds} rounds without a crash (torch {torch.__version__})", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--port", type=int, default=29512)
    parser.add_argument("--one-by-one", action="store_true")
    words = parser.parse_args()
    torch.multiprocessing.spawn(_run, (words.port, words.seconds, words.one_by_one), nprocs=2)
